"""Gated DeltaNet in plain torch, row by row: the reference."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from models.kernels.ops import DELTA_CHUNK, DeltaHeads, DeltaState, StateRows

L2_EPS = 1e-6


def delta_rule_(heads: DeltaHeads, state: DeltaState, rows: StateRows) -> torch.Tensor:
    """See `Ops`."""
    num_heads, key_dim, value_dim = state.recurrent_RHKV.shape[1:]
    qkv_TC, z_TX = heads.inputs_TX.tensor_split((len(heads.conv_CW),), dim=1)
    out_THV = z_TX.new_empty((len(z_TX), num_heads, value_dim))
    starts, targets, (sources, firsts) = rows.starts_R1.tolist(), rows.rows_R.tolist(), (each.tolist() for each in rows.origins)
    for index, (row, start, end) in enumerate(zip(targets, starts, starts[1:], strict=False)):
        if start == end:
            continue
        source = sources[index] if firsts[index] == start else targets[index - 1]
        for kept in (state.recurrent_RHKV, state.inputs_RWC[:, : heads.conv_CW.shape[1] - 1]) if source != row else ():
            kept[row] = kept[source]
        is_prompt, num_again = index < rows.num_prefill_rows, int(state.num_accepted_R[row])
        num_new = end - start if is_prompt else 1  # the state after these tokens is stored
        mixed_TC = _convolved(qkv_TC[start:end], state.inputs_RWC[row], num_again, num_new, heads.conv_CW)
        mixed_TC = _after_drafts(state.mixed_RDC[row], mixed_TC, num_again, num_new)
        gates_TG = _after_drafts(state.gates_RDG[row], heads.gates_TX[start:end], num_again, num_new)
        key_width = heads.num_key_heads * key_dim
        q_TX, k_TX, v_TX = mixed_TC.float().split([key_width, key_width, num_heads * value_dim], dim=1)
        q_HTK, k_HTK = (_unit(x, key_dim).repeat_interleave(num_heads // heads.num_key_heads, dim=0) for x in (q_TX, k_TX))
        v_HTV = v_TX.unflatten(1, (num_heads, value_dim)).transpose(0, 1)
        b_HT, a_HT = gates_TG.float().t().chunk(2)
        decay_HT = -heads.a_log_H[:, None].exp() * F.softplus(a_HT + heads.dt_bias_H[:, None])
        tokens = q_HTK * key_dim**-0.5, k_HTK, v_HTV, decay_HT, b_HT.sigmoid()
        memory_HKV, num_kept = state.recurrent_RHKV[row], num_again + num_new
        first, drafts = zip(*(x.tensor_split((num_kept,), dim=1) for x in tokens), strict=True)
        o_HTV, after_HKV = (chunked if is_prompt else recurrent)(first, memory_HKV)
        memory_HKV.copy_(after_HKV)
        if num_new < end - start:
            o_HTV = torch.cat((o_HTV, recurrent(drafts, memory_HKV)[0]), dim=1)
        out_THV[start:end] = o_HTV[:, num_again:].transpose(0, 1).to(out_THV.dtype)
    return gated_norm(out_THV, z_TX, heads.norm_V, heads.eps)


def gated_norm(o_THV: torch.Tensor, z_TX: torch.Tensor, weight_V: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (T, H * V): the rounded norm of each head times its weight times silu(z)."""
    o = o_THV.float()
    normed_THV = (o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)).to(o_THV.dtype) * weight_V
    return (normed_THV.flatten(1) * F.silu(z_TX.float())).to(z_TX.dtype)


def recurrent(tokens: Sequence[torch.Tensor], memory_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (H, T, V) and the state after the last token, in float32, rounded to the given one's type after each token. Of the
    tokens: queries and keys (H, T, K), values (H, T, V), g and beta (H, T)."""
    q_HTK, k_HTK, v_HTV, g_HT, beta_HT = tokens
    outputs, dtype, memory_HKV = [], memory_HKV.dtype, memory_HKV.float()
    for t in range(q_HTK.shape[1]):
        q_HK1, k_HK1 = q_HTK[:, t, :, None], k_HTK[:, t, :, None]
        memory_HKV = memory_HKV * g_HT[:, t, None, None].exp()
        change_HV = (v_HTV[:, t] - (memory_HKV * k_HK1).sum(1)) * beta_HT[:, t, None]
        memory_HKV = (memory_HKV + k_HK1 * change_HV[:, None]).to(dtype).float()
        outputs.append((memory_HKV * q_HK1).sum(1))
    return torch.stack(outputs, dim=1), memory_HKV


def chunked(tokens: Sequence[torch.Tensor], memory_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `recurrent` by matrix products. Within a chunk, with G the sums of g, changes U solve a triangular system:

    (I + L) U = beta (V - e^G K S), L = beta_i e^(G_i - G_j) k_i k_j for j < i; then O = e^G Q S + [e^(G_i - G_j) q_i k_j for j <= i] U.
    """
    outputs, memory_HKV = [], memory_HKV.float()
    for q, k, v, g, beta in zip(*(x.split(DELTA_CHUNK, dim=1) for x in tokens), strict=True):
        sums_HT = g.cumsum(1)
        later = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).triu(1)
        decay_HTT = (sums_HT[:, :, None] - sums_HT[:, None]).masked_fill(later, -torch.inf).exp()
        system_HTT = beta[:, :, None] * decay_HTT * (k @ k.mT)
        wanted_HTV = beta[:, :, None] * (v - sums_HT.exp()[:, :, None] * (k @ memory_HKV))
        changes_HTV = torch.linalg.solve_triangular(system_HTT, wanted_HTV, upper=False, unitriangular=True)
        outputs.append(sums_HT.exp()[:, :, None] * (q @ memory_HKV) + (decay_HTT * (q @ k.mT)) @ changes_HTV)
        left_HT = (sums_HT[:, -1:] - sums_HT).exp()
        memory_HKV = sums_HT[:, -1, None, None].exp() * memory_HKV + (left_HT[:, :, None] * k).mT @ changes_HTV
    return torch.cat(outputs, dim=1), memory_HKV


def _convolved(x_TC: torch.Tensor, kept_WC: torch.Tensor, num_again: int, num_new: int, weight_CW: torch.Tensor) -> torch.Tensor:
    """Return the rounded SiLU of the convolution. `kept_WC` is set to the inputs around the end of the first `num_new` tokens."""
    whole_TC = torch.cat((kept_WC[num_again : num_again + weight_CW.shape[1] - 1], x_TC))
    kept_WC[: len(whole_TC) - num_new] = whole_TC[num_new:]
    sums_TC = sum(whole_TC[i : i + len(x_TC)].float() * weight for i, weight in enumerate(weight_CW.float().unbind(1)))
    assert isinstance(sums_TC, torch.Tensor)
    return F.silu(sums_TC.to(x_TC.dtype))


def _after_drafts(kept_DX: torch.Tensor, new_TX: torch.Tensor, num_again: int, num_new: int) -> torch.Tensor:
    """Concatenate the accepted drafts and the step's tokens, and store those after `num_new`."""
    whole_TX = torch.cat((kept_DX[:num_again], new_TX))
    kept_DX[: len(new_TX) - num_new] = new_TX[num_new:]
    return whole_TX


def _unit(x_TX: torch.Tensor, dim: int) -> torch.Tensor:
    """Normalise heads (H, T, dim) to length 1."""
    x_THK = x_TX.unflatten(1, (-1, dim))
    return (x_THK * torch.rsqrt(x_THK.square().sum(-1, keepdim=True) + L2_EPS)).transpose(0, 1)
