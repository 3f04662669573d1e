"""Prediction head with the rotary positions and the output matrix that it shares with the model."""

import torch

from models.decoders.batch import HeadTokens
from models.kernels.paged import AttentionBackend
from models.kernels.stream import RowClass
from models.layers.decoder import LayerContext
from models.layers.head import PredictionHead
from models.layers.linear import VocabParallelEmbedding
from models.layers.rotary import MRope
from models.parallel.group import TensorParallel
from models.weights.matrix import Matrix, storage_of

ROUNDED = "float8"  # output matrix for `top_tokens`


class HeadPredictor:
    """See `Predictor`."""

    def __init__(self, head: PredictionHead, rope: MRope, lm_head: VocabParallelEmbedding, tp: TensorParallel) -> None:
        self._head, self._rope, self._lm_head = head, rope, lm_head
        self._tp = tp
        self._rounded: Matrix | None = None

    def predict(
        self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor, tokens: HeadTokens, attention: AttentionBackend, wanted_S: torch.Tensor
    ) -> torch.Tensor:
        rows = RowClass.of(len(hidden_TD)), RowClass.of(len(wanted_S))
        context = LayerContext(attention, None, *rows, self._rope.rows(tokens.positions_3T), tokens.slots_T, None)
        hidden_SD: torch.Tensor = self._head(embedded_TD, hidden_TD, context, wanted_S)
        return hidden_SD

    def top_tokens(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        matrix_VD = self._rounded or self._lm_head.as_matrix()
        return self._tp.all_gather_columns(matrix_VD.product_f32(hidden_SD, RowClass.of(len(hidden_SD)))).argmax(dim=-1)

    def round_output_matrix(self) -> None:
        rows, columns = self._lm_head.weight.shape
        try:
            storage_of(ROUNDED).check(columns, (rows,))
        except ValueError:
            return
        self._rounded = self._lm_head.as_matrix(ROUNDED)

    def finish(self) -> None:
        if self._rounded is not None:
            self._rounded.storage.quantize_(self._lm_head.weight.data)  # in place: an update has no memory for another one
