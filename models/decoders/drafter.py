"""A model's own head for drafts with what it shares with the model: rotary positions and the output matrix."""

import torch

from models.decoders.batch import HeadTokens
from models.kernels.ops import Ops
from models.kernels.paged import AttentionBackend
from models.layers.decoder import LayerContext
from models.layers.head import PredictionHead
from models.layers.linear import VocabParallelEmbedding
from models.layers.rotary import MRope
from models.parallel.group import TensorParallel
from models.weights.float8 import BLOCK, BlockScaled


class HeadDrafter:
    """See `Drafter`."""

    def __init__(self, head: PredictionHead, rope: MRope, lm_head: VocabParallelEmbedding, ops: Ops, tp: TensorParallel) -> None:
        self._head, self._rope, self._lm_head = head, rope, lm_head
        self._ops, self._tp = ops, tp
        self._rounded: BlockScaled | None = None

    def predict(
        self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, places: HeadTokens, attention: AttentionBackend, wanted_S: torch.Tensor
    ) -> torch.Tensor:
        context = LayerContext(attention, None, self._rope.rows(places.positions_3T), places.slots_T, None)
        hidden_SD: torch.Tensor = self._head(embedded_TD, hidden_TD, context, wanted_S)
        return hidden_SD

    def guesses(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        matrix_VD = self._lm_head.weight if self._rounded is None else self._rounded
        return self._tp.all_gather_columns(self._ops.linear_f32(hidden_SD, matrix_VD)).argmax(dim=-1)

    def round_guesses(self) -> None:
        matrix_VD = self._lm_head.weight
        if not any(size % BLOCK for size in matrix_VD.shape):
            self._rounded = BlockScaled.quantized(matrix_VD)
