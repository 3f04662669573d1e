"""Triton kernels of sampling: two launches, one pass over the logits, and only a few candidates are sorted.

`_scan` stores the best (score, token) of each tile for rows without a filter, and the largest logit of each group of GROUP tokens for rows
with top-k. `_choose` completes a row; with top-k it takes the k best groups in the order (largest logit, lowest group) and finds the k best
tokens in them: any other token is preceded by k groups, hence by k tokens. Both are exact for any tiles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.reference.sampling import sample_random
from models.kernels.sampling import MASS_BITS, RowParams, SampleParams
from models.kernels.triton.launch import await_kernel, cdiv, kernel, power_of_2

# Rows of a table: no recompilation when their alignment changes with the number of rows.
PARAMS = list(RowParams._fields)
SORTED_ROWS = 16  # rows at once: each takes 10 MB with a vocabulary of 150,000


@triton.jit
def _noise(token: tensor, key: tensor) -> tensor:
    """`gumbel_noise` of the torch backend."""
    x = (token.to(tl.uint32) * 0x9E3779B1) ^ key
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _rank(logit: tensor, index: tensor) -> tensor:
    """Return int64 keys in the order (logit ascending, index descending)."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)  # minus zero equals zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _logit(rank: tensor) -> tensor:
    ordered = (rank >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index(rank: tensor) -> tensor:
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)


@kernel(do_not_specialize=["stride"], do_not_specialize_on_alignment=PARAMS)
def _scan(
    logits: tensor, inverse_temperature: tensor, top_k: tensor, key: tensor, maxima: tensor, best_score: tensor, best_token: tensor,
    stride: tensor, V: constexpr, TILES: constexpr, TILE: constexpr, GROUP: constexpr, MAX_TOP_K: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: a tile of a row. Results of wide rows are not used."""
    tile, row = tl.program_id(0), tl.program_id(1)
    GROUPS: tl.constexpr = TILE // GROUP
    group = tile * GROUPS + tl.arange(0, GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < V
    await_kernel(OVERLAP)
    k = tl.load(top_k + row)
    if (k > 0) & (k <= MAX_TOP_K):
        logit = tl.load(logits + row.to(tl.int64) * stride + token, inside, float("-inf")).to(tl.float32)
        tl.store(maxima + row * (TILES * GROUPS) + group, tl.max(logit, 1))
    elif k == 0:
        score = tl.load(logits + row.to(tl.int64) * stride + token, inside, float("-inf")).to(tl.float32)
        inverse = tl.load(inverse_temperature + row)
        if inverse > 0:
            score = score * inverse + _noise(token, tl.load(key + row).to(tl.uint32, bitcast=True))
        best = tl.max(score)
        tl.store(best_score + row * TILES + tile, best)
        tl.store(best_token + row * TILES + tile, tl.min(tl.where((score == best) & inside, token, V - 1)))


@kernel(do_not_specialize=["stride"], do_not_specialize_on_alignment=PARAMS)
def _choose(
    logits: tensor, inverse_temperature: tensor, top_p: tensor, log_min_p: tensor, top_k: tensor, key: tensor, maxima: tensor,
    best_score: tensor, best_token: tensor, out: tensor, stride: tensor, V: constexpr, TILES: constexpr, TILES_POWER: constexpr,
    GROUPS: constexpr, GROUPS_POWER: constexpr, GROUP: constexpr, K: constexpr, MASS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: a row. K is a power of two that reaches its top-k."""
    row = tl.program_id(0)
    await_kernel(OVERLAP)
    k = tl.load(top_k + row)
    if k == 0:
        tile = tl.arange(0, TILES_POWER)
        score = tl.load(best_score + row * TILES + tile, tile < TILES, float("-inf"))
        token = tl.load(best_token + row * TILES + tile, tile < TILES, V - 1)
        tl.store(out + row, tl.min(tl.where(score == tl.max(score), token, V - 1)).to(tl.int64))
    elif k <= K:
        group = tl.arange(0, GROUPS_POWER)
        largest = tl.load(maxima + row * GROUPS + group, group < GROUPS, float("-inf"))
        best_groups = _index(tl.topk(_rank(largest, group), K))
        tokens = best_groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        found = tl.load(logits + row.to(tl.int64) * stride + tokens, tokens < V, float("-inf")).to(tl.float32)
        best = tl.topk(tl.reshape(_rank(found, tokens), (K * GROUP,)), K)
        token, position = _index(best), tl.arange(0, K)
        score = _logit(best) * tl.load(inverse_temperature + row)
        distance = tl.where(score > float("-inf"), score - tl.max(score), float("-inf"))
        mass = tl.where(position < k, (tl.exp(distance) * MASS).to(tl.int64), 0)
        limit = (tl.sum(mass).to(tl.float64) * tl.load(top_p + row).to(tl.float64)).to(tl.int64)
        kept = (position < k) & (tl.cumsum(mass) - mass < limit) & (distance >= tl.load(log_min_p + row)) | (position == 0)
        noisy = score + _noise(token, tl.load(key + row).to(tl.uint32, bitcast=True))
        noisy = tl.where(kept, noisy, float("-inf"))
        is_best = kept & (noisy == tl.max(noisy))
        tl.store(out + row, tl.min(tl.where(is_best, token, V - 1)).to(tl.int64))


@kernel(do_not_specialize=["stride"])
def _penalise(
    logits: tensor, index: tensor, counts: tensor, rows: tensor, penalties: tensor, stride: tensor, V: constexpr, TILE: constexpr,
) -> None:  # fmt: skip
    """One program: a tile of a row."""
    row, token = tl.program_id(1), tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = logits + tl.load(index + row) * stride + token
    logit = tl.load(place, token < V, 0.0)
    count = tl.load(counts + tl.load(rows + row) * V + token, token < V, 0)
    repetition = tl.load(penalties + row * 3)
    frequency, presence = tl.load(penalties + row * 3 + 1), tl.load(penalties + row * 3 + 2)
    logit = tl.where(count > 0, tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition), logit)
    sampled = count & 0x3FFFFFFF
    penalty = frequency * sampled.to(tl.float32) + tl.where(sampled > 0, presence, 0.0)
    tl.store(place, logit - penalty, token < V)


@kernel(do_not_specialize=["stride"])
def _mask(logits: tensor, index: tensor, allowed: tensor, stride: tensor, V: constexpr, WORDS: constexpr, TILE: constexpr) -> None:
    """One program: a tile of a row."""
    row, token = tl.program_id(1), tl.program_id(0) * TILE + tl.arange(0, TILE)
    word = tl.load(allowed + row * WORDS + token // 32, token < V, -1)
    banned = (word >> (token % 32)) & 1 == 0
    tl.store(logits + tl.load(index + row) * stride + token, float("-inf"), (token < V) & banned)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes, all powers of two."""

    group: int = 64  # tokens represented by their largest logit
    tile: int = 4096  # logits of a program
    candidates: tuple[int, ...] = (32, 128)  # a step uses the first that reaches all its top-k
    scan_warps: int = 8
    choose_warps: int = 16


TILES = Tiles()
ADJUSTED = 4096  # logits that a program changes


class TritonSampling:
    """`SamplingOps` for up to `max_rows` rows. Torch samples rows that need a sorted vocabulary."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, tiles: Tiles = TILES):
        self.max_top_k = tiles.candidates[-1]
        self._vocab_size, self._tiles = vocab_size, tiles
        self._num_tiles = cdiv(vocab_size, tiles.tile)
        self._num_groups = self._num_tiles * tiles.tile // tiles.group
        self._maxima = torch.empty((max_rows, self._num_groups), device=device)
        self._best_score = torch.empty((max_rows, self._num_tiles), device=device)
        self._best_token = torch.empty((max_rows, self._num_tiles), dtype=torch.int32, device=device)

    def penalise_(
        self, logits_SV: torch.Tensor, index_A: torch.Tensor, counts_RV: torch.Tensor, rows_A: torch.Tensor, penalties_A3: torch.Tensor
    ) -> None:
        grid, stride = (cdiv(self._vocab_size, ADJUSTED), len(index_A)), logits_SV.stride(0)
        _penalise[grid](logits_SV, index_A, counts_RV, rows_A, penalties_A3, stride, V=self._vocab_size, TILE=ADJUSTED)

    def mask_(self, logits_SV: torch.Tensor, index_A: torch.Tensor, allowed_AW: torch.Tensor) -> None:
        grid, words = (cdiv(self._vocab_size, ADJUSTED), len(index_A)), allowed_AW.shape[1]
        _mask[grid](logits_SV, index_A, allowed_AW, logits_SV.stride(0), V=self._vocab_size, WORDS=words, TILE=ADJUSTED)

    def sample(self, logits_SV: torch.Tensor, params: SampleParams) -> torch.Tensor:
        assert len(logits_SV) <= len(self._maxima), "more rows than the scratch memory holds"
        out_S = torch.empty(len(logits_SV), dtype=torch.int64, device=logits_SV.device)
        tiles, stride, rows = self._tiles, logits_SV.stride(0), params.rows
        scratch = self._maxima, self._best_score, self._best_token
        _scan[self._num_tiles, len(out_S)](
            logits_SV, rows.inverse_temperature, rows.top_k, rows.key, *scratch, stride, V=self._vocab_size, TILES=self._num_tiles,
            TILE=tiles.tile, GROUP=tiles.group, MAX_TOP_K=self.max_top_k, num_warps=tiles.scan_warps,
        )  # fmt: skip
        candidates = next(size for size in tiles.candidates if size >= params.largest_top_k)
        _choose[len(out_S),](
            logits_SV, *rows, *scratch, out_S, stride, V=self._vocab_size, TILES=self._num_tiles,
            TILES_POWER=power_of_2(self._num_tiles), GROUPS=self._num_groups,
            GROUPS_POWER=max(power_of_2(self._num_groups), candidates), GROUP=tiles.group, K=candidates, MASS=2.0**MASS_BITS,
            num_warps=tiles.choose_warps,
        )  # fmt: skip
        if params.wide is not None:
            for wide in params.wide.split(SORTED_ROWS):
                out_S[wide] = sample_random(logits_SV[wide], RowParams(*(values[wide] for values in rows)), any_filter=True)
        return out_S
