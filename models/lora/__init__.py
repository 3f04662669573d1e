"""LoRA adapters: an annex. `adapter.py` reads a folder as PEFT writes it (plain Python), `matrix.py` and `tower.py` add adapters to
products, `slots.py` holds those on the device."""
