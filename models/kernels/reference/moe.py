"""A mixture of SwiGLU experts in plain torch, in the order of transformers' Qwen3-VL-MoE."""

import torch
import torch.nn.functional as F

from models.kernels.ops import Experts
from models.kernels.stream import RowClass
from models.weights.matrix import Matrix


def route(logits_TE: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, K) weights in the logits' dtype, and which experts they are of; the shared one is the last."""
    weights_TK, experts_TK = logits_TE[:, : experts.num_experts].softmax(-1, dtype=torch.float32).topk(experts.num_chosen)
    weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).to(logits_TE.dtype)
    if experts.has_shared:
        weights_TK = torch.cat((weights_TK, logits_TE[:, experts.num_experts, None].sigmoid()), dim=1)
        experts_TK = F.pad(experts_TK, (0, 1), value=experts.num_experts)
    return weights_TK, experts_TK


def sparse_swiglu(x_TD: torch.Tensor, experts: Experts, real_T: torch.Tensor | None) -> torch.Tensor:
    """(K, T, D): see `Ops`. The k-th part of a token is that of its k-th best expert, the last that of the shared one."""
    weights_TK, experts_TK = route(x_TD @ experts.router_ED.t(), experts)
    if real_T is not None:
        experts_TK = experts_TK.masked_fill(~real_T[:, None], -1)
    parts_KTD = x_TD.new_zeros((experts.num_given, *x_TD.shape))
    for i in range(experts.count):
        token, place = (experts_TK == experts.first + i).nonzero(as_tuple=True)
        if len(token):
            gate, up = _product(x_TD[token], experts.gate_up, i, experts.count).chunk(2, dim=-1)
            values = _product(F.silu(gate) * up, experts.down, i, experts.count)
            parts_KTD[place, token] = values * weights_TK[token, place, None]
    return parts_KTD


def _product(x_TX: torch.Tensor, matrices: Matrix, index: int, count: int) -> torch.Tensor:
    """x times matrix `index` of `count` equal ones that lie below each other."""
    size = matrices.shape[0] // count
    return matrices.on("torch").rows(index * size, (index + 1) * size).product(x_TX, RowClass.MANY)
