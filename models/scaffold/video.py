"""A model folder's file about videos, in the layout of the published checkpoints."""

from models.scaffold.configs import image_processor_json


def video_processor_json() -> dict[str, object]:
    """Return video_preprocessor_config.json; `size` is an area in pixels summed over the frames."""
    return {
        **image_processor_json(),
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 4_096, "longest_edge": 25_165_824},
    }
