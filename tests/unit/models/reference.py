"""transformers' Qwen3-VL as the reference: the same prompt through its own image processor, positions and model."""

import numpy as np
import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from models.config.types import ModelConfig
from models.media.video import VideoGeometry
from tests.unit.models.harness import VIDEO_GEOMETRY, Prompt


def image_processor(config: ModelConfig) -> Qwen2VLImageProcessorPil:
    geometry = config.geometry
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels},
        patch_size=geometry.patch_size,
        merge_size=geometry.merge_size,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def token_types(config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    return (ids == config.placeholder_ids["image"]).int() + 2 * (ids == config.placeholder_ids["video"]).int()


def video_pixels(video: VideoGeometry, frames: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    height, width = smart_resize(*frames.shape[:3], 2, 32, video.min_pixels, video.max_pixels)
    resized = [Image.fromarray(frame.numpy()).resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    pixels = torch.stack([torch.from_numpy(np.array(frame)) for frame in resized]).permute(0, 3, 1, 2)[None]
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, (pixels.float() / 255 - 0.5) / 0.5, 16, 2, 2)
    return patches[0], grid


def inputs(config: ModelConfig, prompt: Prompt, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.tensor([prompt.ids])
    tensors = {"input_ids": ids, "mm_token_type_ids": token_types(config, ids), "attention_mask": torch.ones_like(ids)}
    if prompt.videos:
        found = [video_pixels(VIDEO_GEOMETRY, frames) for frames in prompt.videos]
        tensors |= {"pixel_values_videos": torch.cat([p for p, _ in found]), "video_grid_thw": torch.tensor([grid for _, grid in found])}
    images = [image for image in prompt.images if image.ndim == 3]
    if images:
        pixels = image_processor(config)(images=[Image.fromarray(image.numpy()) for image in images], return_tensors="pt")
        tensors |= {"pixel_values": pixels["pixel_values"], "image_grid_thw": pixels["image_grid_thw"]}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@torch.inference_mode()
def logits(model: Qwen3VLForConditionalGeneration, config: ModelConfig, prompt: Prompt) -> torch.Tensor:
    model.model.rope_deltas = None  # it keeps the last prompt's
    return model(**inputs(config, prompt, str(model.device))).logits[0]


@torch.inference_mode()
def greedy(model: Qwen3VLForConditionalGeneration, config: ModelConfig, prompt: Prompt, steps: int) -> list[int]:
    model.model.rope_deltas = None
    tokens = model.generate(
        **inputs(config, prompt), do_sample=False, max_new_tokens=steps, min_new_tokens=steps, eos_token_id=None, top_k=None, top_p=None
    )
    return tokens[0, len(prompt.ids) :].tolist()
