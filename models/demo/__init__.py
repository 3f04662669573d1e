"""Small Qwen3-VL that reads pictures: the checkpoint, pictures and questions for it, and an evaluation.

Clients and tests import the questions from here; nothing on that path imports torch. What it was trained with is in `training/`, which no
wheel carries.
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"  # a model folder in the published layout
