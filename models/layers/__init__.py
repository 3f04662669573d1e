"""The parts that the decoder and the vision tower are made of: sharded linear layers, norms, rotary tables, attention, device kernels."""
