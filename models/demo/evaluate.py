"""Ask a model folder held-out questions through transformers: `python -m models.demo.evaluate --questions 600 [--tasks ...]`.

Greedy, exact match, in float32, pictures through the reference's Pillow image processor. `--record FILE` keeps questions and answers.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jinja2 import Template
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models.demo import CHECKPOINT
from models.demo.questions import TASKS, Question, question
from models.demo.score import score, table

FIRST_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokenized question: ids with expanded placeholders, pixels (P, 1536) and grids of its pictures."""

    ids: list[int]
    pixels: Tensor | None
    grids: list[tuple[int, int, int]]


class Answer(NamedTuple):
    """Greedy answer, and the smallest margin of its tokens: the logit minus that of the second most likely token."""

    text: str
    margin: float


class Reference:
    """Model folder in transformers. Prompts are made from the files of the folder."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.device = device
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = Template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        nn.Module.to(self.model, device)
        self.pad, self.image = self.tokenizer.encode("<|endoftext|><|image_pad|>").ids

    def prompt(self, item: Question) -> Prompt:
        """Render the template, expand placeholders and preprocess pictures."""
        text = self.template.render(messages=item.template_messages(), add_generation_prompt=True)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if not item.pictures:
            return Prompt(ids, None, [])
        seen = self.processor([picture.open() for picture in item.pictures], return_tensors="pt")
        grids = [(int(t), int(h), int(w)) for t, h, w in seen["image_grid_thw"]]
        counts = iter([t * h * w // 4 for t, h, w in grids])
        expanded = [j for i in ids for j in ([i] * next(counts) if i == self.image else [i])]
        return Prompt(expanded, seen["pixel_values"], grids)

    @torch.no_grad()
    def answers(self, prompts: Sequence[Prompt], most: int = 128) -> list[Answer]:
        """Return greedy answers for a batch, which is padded on the left."""
        longest = max(len(p.ids) for p in prompts)
        ids = torch.tensor([[self.pad] * (longest - len(p.ids)) + p.ids for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p.ids)) + [1] * len(p.ids) for p in prompts])
        inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": torch.eq(ids, self.image).int()}
        pixels = [p.pixels for p in prompts if p.pixels is not None]
        if pixels:
            inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor([g for p in prompts for g in p.grids])}
        inputs = {k: v.to(self.device) for k, v in inputs.items()}
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=most, output_logits=True, return_dict_in_generate=True)
        tokens_BT = out.sequences[:, longest:]
        best_TB2 = torch.stack([logits_BV.topk(2).values for logits_BV in out.logits])
        leads_BT = (best_TB2[..., 0] - best_TB2[..., 1]).T.masked_fill(tokens_BT == self.pad, torch.inf)  # nothing follows an answer's end
        return [Answer(self.tokenizer.decode(row), lead) for row, lead in zip(tokens_BT.tolist(), leads_BT.amin(1).tolist(), strict=True)]


def ask_all(reference: Reference, items: Sequence[Question], batch: int) -> list[Answer]:
    """Return greedy answers in the order of the questions; a batch holds prompts of similar length."""
    prompts = [reference.prompt(item) for item in items]
    order = sorted(range(len(items)), key=lambda i: len(prompts[i].ids))
    answers = [Answer("", 0.0)] * len(items)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        for i, answer in zip(chosen, reference.answers([prompts[i] for i in chosen]), strict=True):
            answers[i] = answer
    return answers


def draw_questions(task: str, count: int, first: int, workers: int) -> list[Question]:
    """Return the questions of consecutive seeds, generated in parallel."""
    if workers < 2:
        return [question(first + i, task) for i in range(count)]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(partial(question, task=task), range(first, first + count), chunksize=16))


def main() -> None:
    """Read the flags, ask, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--questions", type=int, default=600, help="per task")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="processes that generate the questions")
    parser.add_argument("--record", type=Path, help="write seed, task, expected and given answer, and its margin as JSON")
    args = parser.parse_args()
    reference = Reference(args.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    records: list[dict[str, object]] = []
    for task in args.tasks:
        items = draw_questions(task, args.questions, args.first_seed, args.workers)
        said = ask_all(reference, items, args.batch)
        records += [
            {"seed": item.seed, "task": task, "answer": item.answer, "said": answer.text, "margin": round(answer.margin, 2)}
            for item, answer in zip(items, said, strict=True)
        ]
    if args.record:
        args.record.write_text(json.dumps(records, indent=0) + "\n")
    print(table(score((str(r["task"]), r["said"] == r["answer"]) for r in records)))


if __name__ == "__main__":
    main()
