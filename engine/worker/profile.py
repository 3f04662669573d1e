"""Memory of a device and of a step, measured; `engine/wire/memory.py` divides it."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from engine.wire.config import EngineConfig
from engine.wire.memory import Used, gather_bytes
from engine.wire.messages import SamplingParams
from engine.wire.step_sizes import StepSizes
from engine.worker.head import run_head
from engine.worker.sampling.samples import Int64s, samples_of
from engine.worker.warm_up import SMALL
from models.cache.layout import AttentionLayout, offsets_of
from models.cache.spec import CacheSpec
from models.cache.states import RowStates
from models.decoders.batch import ForwardBatch
from models.decoders.contract import LanguageModel
from models.kernels.backend import Backend
from models.kernels.compiling import compiling
from models.kernels.ops import StateRows
from models.kernels.paged import allocate_pools
from models.kernels.sampling import SamplingOps
from models.vision.encoder import Tower


def free_bytes(device: torch.device) -> int:
    """Return the free bytes reported by a GPU's driver; 0 on a CPU, where nothing is planned."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _encode(tower: Tower | None, num_tokens: int, stream: torch.cuda.Stream) -> None:
    """Encode a square frame pair, which takes a little more than an image, on the tower's stream."""
    if tower is None:
        return
    geometry = tower.config.geometry
    side = int(num_tokens**0.5) * geometry.patch_size * geometry.merge_size
    stream.wait_stream(torch.cuda.current_stream(tower.device))  # random weights may still be in transfer
    with torch.cuda.stream(stream):
        pair = torch.randint(256, (geometry.temporal_patch_size, side, side, 3), dtype=torch.uint8, device=tower.device)
        tower.encode([pair], [geometry.grid(side, side)])


def _peak_of(run: Callable[[], None], device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def measure(
    model: LanguageModel,
    backend: Backend,
    sampling: SamplingOps,
    config: EngineConfig,
    num_logits: int,
    tower_stream: torch.cuda.Stream,
    free: int,
) -> Used:
    """Measure a loaded model on a GPU, of which `free` bytes were free at the start, with steps that sample `num_logits` times."""
    weights = torch.cuda.memory_allocated(model.device)
    encode, step = _peaks(model, backend, sampling, config, num_logits, tower_stream)
    torch.cuda.empty_cache()  # the cached memory of the peaks does not fit the KV pool
    return Used(
        weights=weights,
        runtime=free - free_bytes(model.device) - weights,
        encode=max(encode, gather_bytes(model.config, config)),
        step=step,
        tower=0 if model.tower is None else model.tower.kept_bytes(),
    )


@torch.inference_mode()
def run_once(model: LanguageModel, backend: Backend, config: EngineConfig, tower_stream: torch.cuda.Stream, sizes: StepSizes) -> None:
    """Run what `measure` measures, but for sampling. Before, compile the kernels of all usual steps, many at once, except with several
    ranks, where this is untested."""
    prompts = [[size] for size in (*SMALL, sizes.mixed[0], sizes.usual, sizes.mixed[-1])]
    decodes = [[1] * size for size in sizes.decodes if not size & (size - 1)]
    encode = partial(_encode, model.tower, config.max_num_encoder_tokens, tower_stream)
    step = _step_of(model, backend, config, [config.max_num_batched_tokens], 1)
    if model.tp.size == 1:
        with compiling(model.device):
            encode()
            step()
            for lengths in (*prompts, *decodes):
                if sum(lengths) <= config.max_num_batched_tokens:
                    _step_of(model, backend, config, lengths, len(lengths))()
    encode()
    step()


@torch.inference_mode()
def _peaks(
    model: LanguageModel, backend: Backend, sampling: SamplingOps, config: EngineConfig, num_logits: int, tower_stream: torch.cuda.Stream
) -> tuple[int, int]:
    """Measure an encoder budget of images (on `tower_stream`), then a full batch of tokens whose rows all sample by sorting. Pools and
    states of rows are not counted."""
    step = _step_of(model, backend, config, [config.max_num_batched_tokens], num_logits)

    def sampled_step() -> None:
        logits_SV = step()
        rows_to_sort = [SamplingParams(top_p=0.9)] * len(logits_SV)
        sampling.sample(logits_SV, samples_of(rows_to_sort, range(len(logits_SV)), 0, model.device).params)
        torch.cuda.synchronize(model.device)

    encode = partial(_encode, model.tower, config.max_num_encoder_tokens, tower_stream)
    return _peak_of(encode, model.device), _peak_of(sampled_step, model.device)


def _step_of(
    model: LanguageModel, backend: Backend, config: EngineConfig, lengths: Sequence[int], num_logits: int
) -> Callable[[], torch.Tensor]:
    """Return a function that computes a step of rows without a context: a prompt, or tokens of decode rows."""
    batch = _batch_of(np.asarray(lengths), config.block_size, num_logits, model.cache_spec, model.device)
    pools = allocate_pools(model.cache_spec.paged, len(batch.attention.pages), config.block_size, model.dtype, model.device)

    def step() -> torch.Tensor:
        attention = backend.attention(pools, model.config.text.num_heads // model.tp.size)
        attention.plan(batch.attention)
        hidden_SD = model(batch, attention)
        run_head(model, batch, attention)
        return model.logits(hidden_SD)

    return step


def _batch_of(lengths_R: Int64s, block_size: int, num_logits: int, spec: CacheSpec, device: torch.device) -> ForwardBatch:
    num_tokens, num_pages_R = int(lengths_R.sum()), -(-lengths_R // block_size)
    positions, pages = torch.arange(num_tokens, device=device), torch.arange(int(num_pages_R.sum()), dtype=torch.int32, device=device)
    layout = AttentionLayout(
        qo_indptr_cpu=offsets_of(lengths_R),
        kv_lens_cpu=torch.from_numpy(lengths_R.astype(np.int32)),
        page_indptr_cpu=offsets_of(num_pages_R),
        pages=pages,
        slot_mapping_T=positions,
        num_prefill_rows=int(len(lengths_R) == 1),
    )
    logits_indices = torch.arange(min(num_logits, num_tokens), device=device)
    states = tuple(RowStates(group, 1, device) for group in spec.states)
    rows = StateRows(positions[: len(lengths_R)], layout.qo_indptr_cpu.to(device), layout.num_prefill_rows)
    padding_slot = None if layout.num_prefill_rows else 0  # as in graphs
    return ForwardBatch(torch.zeros_like(positions), positions.expand(3, -1), layout, (), logits_indices, states, rows, padding_slot)
