"""A mixture of SwiGLU experts in plain torch, in the order of transformers' Qwen3-VL-MoE."""

import torch
import torch.nn.functional as F

from models.backends.ops import Experts
from models.backends.torch.linear import linear, rows_of


def route(logits_TE: torch.Tensor, num_chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, K) weights in the logits' dtype, and which experts they are of."""
    weights_TK, experts_TK = logits_TE.softmax(-1, dtype=torch.float32).topk(num_chosen)
    return (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype), experts_TK


def sparse_swiglu(x_TD: torch.Tensor, experts: Experts, real_T: torch.Tensor | None) -> torch.Tensor:
    """(K, T, D): see `Ops`. The k-th part of a token is that of its k-th best expert."""
    weights_TK, experts_TK = route(linear(x_TD, experts.router_ED), experts.num_chosen)
    if real_T is not None:
        experts_TK = experts_TK.masked_fill(~real_T[:, None], -1)
    parts_KTD = x_TD.new_zeros((experts.num_chosen, *x_TD.shape))
    for i in range(experts.count):
        token, place = (experts_TK == experts.first + i).nonzero(as_tuple=True)
        if len(token):
            gate, up = linear(x_TD[token], rows_of(experts.gate_up, i, experts.count)).chunk(2, dim=-1)
            values = linear(F.silu(gate) * up, rows_of(experts.down, i, experts.count))
            parts_KTD[place, token] = values * weights_TK[token, place, None]
    return parts_KTD
