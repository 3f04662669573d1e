"""The recipe for a format in docs/architecture.md, followed: int8 values with a scale for each row, made up."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from models.checkpoint.load import load_weights
from models.config import formats
from models.config.huggingface import read_config
from models.kernels.reference.products import TorchProducts
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from models.weights.matrix import WHOLE, Stored, matrices_of
from models.weights.plain import Plain
from tests.unit.models.harness import ONE_IMAGE, Prompt, every_logit, load, make

ENTRY = formats.FormatEntry(f"{__name__}:RowScaled", {"torch": f"{__name__}:TorchRowScaled"}, 1, {formats.METHOD: "rows"})


@dataclass(frozen=True)
class RowScaled(Plain):
    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> "RowScaled":
        return cls(torch.empty((rows, columns), dtype=torch.int8, device=device), torch.ones((rows, 1), device=device))

    @classmethod
    def quantized(cls, matrix_NK: torch.Tensor) -> "RowScaled":
        scales = matrix_NK.float().abs().amax(1, keepdim=True) / 127
        return cls((matrix_NK.float() / scales).round().to(torch.int8), scales)

    @property
    def stored(self) -> tuple[Stored, ...]:
        return Stored(".weight", self.values), Stored(".weight_scale", self.scales, (1, WHOLE))

    def rows(self, first: int, last: int) -> "RowScaled":
        return RowScaled(self.values[first:last], self.scales[first:last])


class TorchRowScaled(TorchProducts[RowScaled]):
    def multiply(self, x_TX: torch.Tensor, matrix: RowScaled) -> torch.Tensor:
        return x_TX @ (matrix.values.float() * matrix.scales).to(x_TX.dtype).t()


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_format_by_the_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.FORMATS, "rows", ENTRY)  # type: ignore[arg-type]
    for format in ("plain", "rows"):
        write_model_folder(tmp_path / format, SHAPES[name], weights="random", seed=1, format=format)
    ours, plain = load(tmp_path / "rows"), load(tmp_path / "plain")
    prompt = Prompt.build(ours.config, ONE_IMAGE)
    assert every_logit(load(tmp_path / "plain", quantized_to="rows"), prompt).equal(every_logit(ours, prompt))
    for (_, stored), (_, target) in zip(matrices_of(ours), matrices_of(plain), strict=True):
        target.storage.values.copy_(stored.storage.values * stored.storage.scales)
    assert every_logit(ours, prompt).equal(every_logit(plain, prompt))
    part = make(read_config(tmp_path / "rows"), TensorParallel(1, 2, None))
    load_weights(part, tmp_path / "rows", lambda done, total: None)
    mine, whole = (model.language_model._layers[1].self_attn.o_proj.weight.storage for model in (part, ours))
    assert mine.values.equal(whole.values.chunk(2, dim=1)[1]) and mine.scales.equal(whole.scales)
