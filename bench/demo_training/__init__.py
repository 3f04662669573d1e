"""Training of the demo model: drawing, packing, training, export. In a clone only: the wheel does not carry it."""
