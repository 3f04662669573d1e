"""Model architecture of the Qwen3-VL family; imports neither `engine` nor `server`."""
