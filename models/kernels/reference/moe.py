"""Mixture of SwiGLU experts in plain torch, in the order of operations of transformers' Qwen3-VL-MoE."""

import torch
import torch.nn.functional as F

from models.kernels.ops import Experts
from models.kernels.stream import RowClass
from models.weights.matrix import Matrix, products_of


def route(logits_TE: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (T, K) weights in the logits' dtype and their experts; the shared one is the last."""
    weights_TK, experts_TK = logits_TE[:, : experts.num_experts].softmax(-1, dtype=torch.float32).topk(experts.num_chosen)
    weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype)
    if experts.has_shared:
        weights_TK = torch.cat((weights_TK, logits_TE[:, experts.num_experts, None].sigmoid()), dim=1)
        experts_TK = F.pad(experts_TK, (0, 1), value=experts.num_experts)
    return weights_TK, experts_TK


def sparse_swiglu(x_TD: torch.Tensor, experts: Experts, valid_T: torch.Tensor | None) -> torch.Tensor:
    """Return (K, T, D), see `Ops`: part k of a token is from its k-th best expert, the last from the shared one."""
    weights_TK, experts_TK = route(x_TD @ experts.router_ED.t(), experts)
    if valid_T is not None:
        experts_TK = experts_TK.masked_fill(~valid_T[:, None], -1)
    parts_KTD = x_TD.new_zeros((experts.num_given, *x_TD.shape))
    for i in range(experts.count):
        token, place = (experts_TK == experts.first + i).nonzero(as_tuple=True)
        if len(token):
            gate, up = _product(x_TD[token], experts.gate_up, i, experts.count).chunk(2, dim=-1)
            values = _product(F.silu(gate) * up, experts.down, i, experts.count)
            parts_KTD[place, token] = values * weights_TK[token, place, None]
    return parts_KTD


def _product(x_TX: torch.Tensor, matrices: Matrix, index: int, count: int) -> torch.Tensor:
    """Multiply x by matrix `index` of `count` stacked matrices of equal shape."""
    size = matrices.shape[0] // count
    return products_of(matrices.format, "torch")(matrices.storage.rows(index * size, (index + 1) * size), 1).product(x_TX, RowClass.MANY)
