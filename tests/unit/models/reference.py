"""transformers' Qwen3-VL as the reference: the same prompt through its own image processor, positions and model."""

import torch
from PIL import Image
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models.config import ModelConfig
from tests.unit.models.harness import Prompt


def image_processor(config: ModelConfig) -> Qwen2VLImageProcessorPil:
    geometry = config.geometry
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels},
        patch_size=geometry.patch_size,
        merge_size=geometry.merge_size,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def inputs(config: ModelConfig, prompt: Prompt, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What the reference's `forward` and `generate` take for one prompt."""
    ids = torch.tensor([prompt.ids])
    tensors = {"input_ids": ids, "mm_token_type_ids": (ids == config.image_token_id).int(), "attention_mask": torch.ones_like(ids)}
    if prompt.images:
        pixels = image_processor(config)(images=[Image.fromarray(image.numpy()) for image in prompt.images], return_tensors="pt")
        tensors |= {"pixel_values": pixels["pixel_values"], "image_grid_thw": pixels["image_grid_thw"]}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@torch.inference_mode()
def logits(model: Qwen3VLForConditionalGeneration, config: ModelConfig, prompt: Prompt) -> torch.Tensor:
    """(T, V) of all tokens of the prompt."""
    model.model.rope_deltas = None  # it keeps the last prompt's
    return model(**inputs(config, prompt, str(model.device))).logits[0]


@torch.inference_mode()
def greedy(model: Qwen3VLForConditionalGeneration, config: ModelConfig, prompt: Prompt, steps: int) -> list[int]:
    model.model.rope_deltas = None
    tokens = model.generate(
        **inputs(config, prompt), do_sample=False, max_new_tokens=steps, min_new_tokens=steps, eos_token_id=None, top_k=None, top_p=None
    )
    return tokens[0, len(prompt.ids) :].tolist()
