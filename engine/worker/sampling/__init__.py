"""Sampling after the forward pass, in stages: each is skipped when no row of a step needs it."""
