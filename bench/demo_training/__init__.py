"""How the demo model was made: drawing, packing, training, export. In a clone only: the wheel carries none of it."""
