"""A small Qwen3-VL that reads pictures, with all it was made from: the pictures, the questions, the training and the checkpoint.

Clients and tests import the questions from here; nothing on that path imports torch.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"  # a model folder in the published layout
