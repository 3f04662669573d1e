"""Prediction head with its rotary positions, embedding and output matrix."""

from typing import Any

import torch

from models.decoders.batch import HeadTokens
from models.kernels.paged import AttentionBackend
from models.kernels.stream import RowClass
from models.layers.decoder import LayerContext
from models.layers.eagle3 import Eagle3Head
from models.layers.head import PredictionHead
from models.layers.linear import VocabParallelEmbedding
from models.layers.rotary import MRope
from models.parallel.group import TensorParallel
from models.weights.matrix import Products, storage_of

ROUNDED = "float8"  # output matrix for `top_tokens`


class Predictor:
    """Prediction head of a model, see `layers.head` and `layers.eagle3`."""

    def __init__(
        self,
        head: PredictionHead | Eagle3Head,
        rope: MRope,
        embedding: VocabParallelEmbedding,
        lm_head: VocabParallelEmbedding,
        tp: TensorParallel,
    ) -> None:
        self._head, self._rope, self._embedding, self._lm_head = head, rope, embedding, lm_head
        self._tp = tp
        self._rounded: Products[Any] | None = None

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the (T, D) embeddings of token ids for `predict`."""
        embedded_TD: torch.Tensor = self._embedding(ids_T)
        return embedded_TD

    def predict(
        self, embedded_TD: torch.Tensor, hidden_TX: torch.Tensor, tokens: HeadTokens, attention: AttentionBackend, wanted_S: torch.Tensor
    ) -> torch.Tensor:
        """Return (S, D), the input of `top_tokens`, from `ForwardBatch.hidden_TX` of tokens and the embeddings of the next tokens. The
        result replaces the hidden states in the next call. `attention` is planned for the tokens."""
        rows = RowClass.of(len(hidden_TX)), RowClass.of(len(wanted_S))
        context = LayerContext(attention, None, *rows, self._rope.rows(tokens.positions_3T), tokens.slots_T, None)
        hidden_SD: torch.Tensor = self._head(embedded_TD, hidden_TX, context, wanted_S)
        return hidden_SD

    def top_tokens(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return the (S,) tokens with the largest logits of `predict`'s result; the output matrix may be rounded."""
        output = self._rounded or self._lm_head.output
        return self._tp.all_gather_columns(output.product_f32(hidden_SD, RowClass.of(len(hidden_SD)))).argmax(dim=-1)

    def round_output_matrix(self) -> None:
        """Keep a float8 copy of the output matrix for `top_tokens`, if it has whole blocks."""
        rows, columns = self._lm_head.weight.shape
        try:
            storage_of(ROUNDED).check(columns, (rows,))
        except ValueError:
            return
        self._rounded = self._lm_head.rounded(ROUNDED)

    def finish(self) -> None:
        """Round a kept copy again; call after the weights have changed."""
        if self._rounded is not None:
            self._rounded.matrix.quantize_(self._lm_head.weight.data)  # in place: an update has no memory for another one


class Eagle3Predictor(Predictor):
    """Predictor of the draft vocabulary, whose ids are mapped to the model's."""

    def __init__(self, head: Eagle3Head, rope: MRope, embedding: VocabParallelEmbedding, tp: TensorParallel) -> None:
        super().__init__(head, rope, embedding, head.lm_head, tp)
        self._eagle3 = head

    def top_tokens(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self._eagle3.model_ids(super().top_tokens(self._eagle3.normed(hidden_SD)))

    def finish(self) -> None:
        super().finish()
        self._eagle3.check_ids()
        own, self._eagle3.embed_tokens = self._eagle3.embed_tokens, None
        if own is not None and not own.weight.equal(self._embedding.weight):
            self._embedding = own
