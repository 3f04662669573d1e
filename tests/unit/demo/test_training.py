"""The training forward is transformers' own model, and batches say what the chat template says."""


import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bench.demo_training.data import Batch, Conversation, Encoder, GridTable, Packer, Sizes, empty_batch
from bench.demo_training.feed import Composer
from bench.demo_training.net import Trainee, build_model
from models.demo import CHECKPOINT

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
SIZES = Sizes(patches=1024, tokens=1024, answers=256, pictures=64, conversations=48)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")))


@pytest.fixture(scope="module")
def packed(encoder: Encoder) -> tuple[Batch, list[Conversation]]:
    composer = Composer(np.random.default_rng(0), encoder)
    composer.refill(1.0, 60)
    batch, conversations = empty_batch(SIZES), []
    packer = Packer(batch, SIZES, GridTable())
    for _ in range(200):
        item = composer.conversation(1.0)
        if packer.add(item):
            conversations.append(item)
    packer.finish()
    return batch, conversations


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.arrays().items()}


def test_packed_forward_equals_transformers(packed: tuple[Batch, list[Conversation]]) -> None:
    batch, conversations = packed
    model = build_model(0).eval()
    trainee = Trainee(model, SIZES, CPU)
    inputs, at = tensors(batch), 0
    with torch.no_grad():
        _, visual, deep = trainee.see(inputs)
        hidden, _ = trainee.read(inputs, visual, deep)
        for item in conversations[:5]:
            vision = {}
            if item.pictures:
                pixels = torch.cat([torch.from_numpy(p.patches) for p in item.pictures]).view(-1, 3, 1, 256) / 127.5 - 1
                vision = {
                    "pixel_values": pixels.expand(-1, 3, 2, 256).reshape(len(pixels), -1),
                    "image_grid_thw": torch.tensor([(1, *p.grid) for p in item.pictures]),
                    "mm_token_type_ids": torch.from_numpy(item.visual >= 0).int()[None],
                }
            reference = model.model(input_ids=torch.tensor([item.ids]), **vision).last_hidden_state[0]
            assert (reference - hidden[at : at + len(item.ids)]).abs().max() < 1e-4
            at += len(item.ids)
