"""Model architecture of the Qwen3-VL family: configuration, preprocessing, layers and weights; imports neither `engine` nor `server`."""
