"""The same conversation through transformers: chat template, image processor, greedy generation in fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from models.config.huggingface import read_config
from models.config.video import read_video_geometry
from models.media.video import DEFAULT_SOURCE_FPS, time_text
from tests.unit.models.reference import image_processor, token_types, video_pixels

Videos = Sequence[list[Image.Image]]


class Reference:
    def __init__(self, folder: Path):
        self._config = read_config(folder)
        self._video = read_video_geometry(folder, self._config.geometry)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def text(
        self, messages: list[dict[str, Any]], images: Sequence[Image.Image], max_tokens: int, ignore_eos: bool = False, videos: Videos = ()
    ) -> str:
        """The greedy answer. Image parts of `messages` are `{"type": "image"}`, in the order of `images`; so are those of videos, which are
        frames of no known rate."""
        inputs = self._inputs(messages, images, videos=videos)
        self._model.model.rope_deltas = None
        options = {"eos_token_id": None, "min_new_tokens": max_tokens} if ignore_eos else {"eos_token_id": list(self._config.eos_token_ids)}
        tokens = self._model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, top_k=None, top_p=None, **options)
        return str(self._tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    @torch.inference_mode()
    def last_hidden(self, messages: list[dict[str, Any]], images: Sequence[Image.Image], is_framed: bool) -> torch.Tensor:
        self._model.model.rope_deltas = None
        hidden = self._model.model(**self._inputs(messages, images, is_framed)).last_hidden_state[0, -1]
        return hidden

    @torch.inference_mode()
    def logits_of_words(self, messages: list[dict[str, Any]], images: Sequence[Image.Image], words: list[str]) -> list[float]:
        logits = self._model.lm_head(self.last_hidden(messages, images, is_framed=True))
        ids = [self._tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        found = logits[ids].tolist()
        return found

    def _inputs(
        self, messages: list[dict[str, Any]], images: Sequence[Image.Image], is_framed: bool = False, videos: Videos = ()
    ) -> dict[str, torch.Tensor]:
        """`is_framed`: with the tokens that the tokenizer puts around a text."""
        prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = {}
        if images:
            pixels = image_processor(self._config)(images=[image.convert("RGB") for image in images], return_tensors="pt")
            inputs = {"pixel_values": pixels["pixel_values"], "image_grid_thw": pixels["image_grid_thw"]}
            for grid in pixels["image_grid_thw"]:
                prompt = prompt.replace("<|image_pad|>", "<|placeholder|>" * (int(grid.prod()) // self._config.vision.merge_size**2), 1)
            prompt = prompt.replace("<|placeholder|>", "<|image_pad|>")
        if videos:
            found = [video_pixels(self._video, torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))) for frames in videos]
            inputs |= {"pixel_values_videos": torch.cat([p for p, _ in found]), "video_grid_thw": torch.tensor([grid for _, grid in found])}
            for (_, (_, rows, columns)), frames in zip(found, videos, strict=True):
                times = self._video.pair_times([i / DEFAULT_SOURCE_FPS for i in range(len(frames))])
                pads = "<|placeholder|>" * (rows * columns // self._config.vision.merge_size**2)
                pairs = "".join(f"{time_text(time)}<|vision_start|>{pads}<|vision_end|>" for time in times)
                prompt = prompt.replace("<|video_pad|>", pairs, 1)
            prompt = prompt.replace("<|placeholder|>", "<|video_pad|>")
        ids = torch.tensor([self._tokenizer.encode(prompt, add_special_tokens=is_framed)])
        return inputs | {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": token_types(self._config, ids),
        }
