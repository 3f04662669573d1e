"""What our CUDA kernels of attention do with a plan, in torch: for tests of plans on machines without a GPU."""

import pytest
import torch


class SplitKernel:
    """What `flash_decoding.cu` does, unit by unit."""

    def run(self, q, k, v, out, items, pages, partials, sums, arrivals, page_size, scale, overlaps) -> None:  # type: ignore[no-untyped-def]
        group = q.shape[1] // k.shape[1]
        values, total = torch.zeros(q.shape, dtype=torch.float64), torch.zeros((*q.shape[:2], 1), dtype=torch.float64)
        for first_token, count, offset, start, stop, part, first, parts in items.tolist():
            key, tokens = torch.arange(start, stop), slice(first_token, first_token + count)
            slots = pages[offset + key // page_size].long() * page_size + key % page_size
            keys, cached = (x[slots].repeat_interleave(group, dim=1).double() for x in (k, v))
            hidden = key > stop - count + torch.arange(count)[:, None] if part == first + parts - 1 else torch.zeros(1, len(key)).bool()
            weights = (torch.einsum("thk,shk->hts", q[tokens].double(), keys) * scale).masked_fill(hidden, -torch.inf).exp()
            values[tokens] += torch.einsum("hts,shk->thk", weights, cached)
            total[tokens] += weights.sum(-1).T[:, :, None]
        planned = total[:, 0, 0] > 0
        out[planned] = (values / total)[planned].to(out.dtype)


class PrefillKernel:
    """What `prefill_attention.cu` does, item by item."""

    def tile_rows(self) -> int:
        return 32

    def tile_keys(self) -> int:
        return 32

    def part_floats(self) -> int:
        return 1

    def part_arrivals(self) -> int:
        return 1

    def run(self, q, k, v, out, items, parts, arrivals, pages, page_size, num_blocks, scale) -> None:  # type: ignore[no-untyped-def]
        group = q.shape[1] // k.shape[1]
        values, total = torch.zeros(q.shape, dtype=torch.float64), torch.zeros((*q.shape[:2], 1), dtype=torch.float64)
        for first, count, offset, end, head, first_tile, end_tile, *_ in items[1 : 1 + int(items[0, 0])].tolist():
            key, tokens, heads = (
                torch.arange(first_tile * 32, min(end, end_tile * 32)),
                slice(first, first + count),
                slice(head * group, (head + 1) * group),
            )
            slots = pages[offset + key // page_size].long() * page_size + key % page_size
            hidden = key >= end - count + 1 + torch.arange(count)[:, None]
            scores = torch.einsum("thk,sk->ths", q[tokens, heads].double(), k[slots, head].double()) * scale
            weights = scores.masked_fill(hidden[:, None], -torch.inf).exp()
            values[tokens, heads] += weights @ v[slots, head].double()
            total[tokens, heads] += weights.sum(-1, keepdim=True)
        planned = total[:, 0, 0] > 0
        out[planned] = (values / total)[planned].to(out.dtype)


def use_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.kernels.hopper import flash_decoding, fused_decoding, prefill_attention  # need triton

    monkeypatch.setattr(flash_decoding, "load_kernel", lambda name, head_dim, is_float8: SplitKernel())
    monkeypatch.setattr(fused_decoding, "load_kernel", lambda name, head_dim: None)
    monkeypatch.setattr(prefill_attention, "load_kernel", lambda name, head_dim: PrefillKernel())
