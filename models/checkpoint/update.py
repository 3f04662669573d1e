"""Replacement of a model's weights in place: everything is checked first, then tensors are written one by one, in any order. A matrix in
another format than the checkpoint's is opened with its first tensor and converted after its last one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from models.checkpoint.load import OUTPUT_MATRIX, demand_none, present
from models.checkpoint.names import CheckpointTensor, Index, Stored, leaves, own_tensors
from models.decoders.contract import LanguageModel
from models.weights.matrix import Matrix

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})  # dtypes that are converted to each other
FILE_DTYPES = {  # by their names in safetensors
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32,
    "U8": torch.uint8,
}  # fmt: skip


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FILE_DTYPES.values()}


@dataclass(frozen=True)
class InMemory:
    """A `Stored` tensor in memory; on the meta device, its values have not arrived yet."""

    tensor: torch.Tensor

    def get_shape(self) -> Sequence[int]:
        return self.tensor.shape

    def get_dtype(self) -> str:
        return next((name for name, dtype in FILE_DTYPES.items() if dtype == self.tensor.dtype), str(self.tensor.dtype))

    def __getitem__(self, index: Index) -> torch.Tensor:
        return self.tensor[index]


@dataclass
class _Leaf:
    module: nn.Module
    path: str
    names: frozenset[str]  # of its tensors in the update
    lacking: set[str]  # tensors that are missing while it is written
    slots: tuple[CheckpointTensor, ...] = ()  # targets while it is written

    @property
    def matrices(self) -> list[Matrix]:
        return [value for value in vars(self.module).values() if isinstance(value, Matrix)]


class WeightUpdate:
    """Update of a loaded model's weights: pass all tensors of `names` to `write`, then call `finish`."""

    def __init__(self, model: LanguageModel, source: Mapping[str, Stored], is_whole: bool) -> None:
        """ValueError, before anything is written, if tensors differ from the model's in names, shapes or formats, or if some are missing
        although `is_whole`."""
        self._model, self._source = model, source
        self._leaves_of: dict[str, list[_Leaf]] = {}
        expected: set[str] = set()
        for root, root_path in model.checkpoint_modules():
            for module, path in leaves(root, root_path):
                expected |= self._note(module, path)
        is_tied = model.config.tie_word_embeddings and OUTPUT_MATRIX not in expected
        demand_none("has unexpected", source.keys() - expected - ({OUTPUT_MATRIX} if is_tied else set()))
        if is_whole:
            demand_none("misses", expected - source.keys())

    @property
    def names(self) -> list[str]:
        """Tensors in the order that needs the least memory."""
        return list(self._leaves_of)

    def write(self, name: str, stored: Stored) -> None:
        """Write a tensor. An error leaves the model with a mixture of weights."""
        for leaf in self._leaves_of.get(name, ()):
            if not leaf.lacking:
                for matrix in leaf.matrices:
                    matrix.reopen(self._model.device)
                leaf.lacking, leaf.slots = set(leaf.names), _slots(leaf.module, leaf.path, self._source)
            for slot in leaf.slots:
                if slot.name == name:
                    slot.read(stored)
            leaf.lacking.discard(name)
            if not leaf.lacking:
                leaf.slots = ()
                for matrix in leaf.matrices:
                    matrix.finish()

    def finish(self) -> None:
        self._model.finish()

    def _note(self, module: nn.Module, path: str) -> set[str]:
        """Check one module's tensors; return all names, present or not."""
        leaf = _Leaf(module, path, frozenset(), set())
        for matrix in leaf.matrices:
            matrix.reopen(torch.device("meta"))
        try:
            slots = _slots(module, path, self._source)
        finally:
            for matrix in leaf.matrices:
                matrix.close()
        for slot in slots:
            if slot.name in self._source:
                _check(slot, self._source[slot.name])
        names = {slot.name for slot in slots}
        leaf.names = frozenset(names & self._source.keys())
        if leaf.names and any(matrix.format != "plain" for matrix in leaf.matrices):
            demand_none(f"has {min(leaf.names)}, of a quantized layer, but misses", names - leaf.names)
        for name in dict.fromkeys(slot.name for slot in slots):
            if name in leaf.names:
                self._leaves_of.setdefault(name, []).append(leaf)
        return names


def _slots(module: nn.Module, path: str, source: Mapping[str, Stored]) -> tuple[CheckpointTensor, ...]:
    return tuple(slot for part in own_tensors(module, path) for slot in present(part, source))


def _check(slot: CheckpointTensor, tensor: Stored) -> None:
    if (shape := tuple(tensor.get_shape())) != slot.shape:
        raise ValueError(f"tensor {slot.name} has shape {shape}, the model requires {slot.shape}")
    dtype, ours = FILE_DTYPES.get(tensor.get_dtype()), slot.target.dtype
    if dtype != ours and not (dtype in FLOATS and ours in FLOATS):
        raise ValueError(f"tensor {slot.name} has dtype {tensor.get_dtype()}, the model requires {str(ours).removeprefix('torch.')}")
