"""The parts of the decoder and the vision tower."""
