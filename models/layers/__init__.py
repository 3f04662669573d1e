"""Layers of the decoder and the vision tower."""
