"""Cases of the vision tower and the preprocessing."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench.kernels.timing import Case, copies
from models.config.types import ModelConfig, VisionConfig
from models.kernels.backend import Backend
from models.kernels.ops import Ops
from models.vision.preprocess import Preprocessor

SIZES = {"720p": (720, 1280), "1080p": (1080, 1920), "2k": (1440, 2560)}
BF16 = 2


def vision_cases(config: ModelConfig, backend: Backend) -> Iterator[Case]:
    """Return cases of all operations per block or per image."""
    ops, device = backend.ops, backend.device
    for name in ("720p", "1080p"):
        yield preprocessing(config, ops, device, name)
    for name, count in (("720p", 1), ("720p", 4), ("1080p", 1), ("2k", 1)):
        yield attention(config, backend, name, count)
    num_patches = 4 * patches_of(config, "720p")
    yield layer_norm(config, ops, device, num_patches)
    yield from gemms(config, ops, device, num_patches)


def tower_of(config: ModelConfig) -> VisionConfig:
    assert config.vision is not None
    return config.vision


def patches_of(config: ModelConfig, name: str) -> int:
    _, rows, columns = config.geometry.grid(*SIZES[name])
    return rows * columns


def preprocessing(config: ModelConfig, ops: Ops, device: torch.device, name: str) -> Case:
    height, width = SIZES[name]
    grid = config.geometry.grid(height, width)
    frame = tower_of(config).in_channels * tower_of(config).patch_size**2
    out_PX = torch.empty((grid[1] * grid[2], frame), dtype=torch.bfloat16, device=device)
    num_bytes = height * width * 3 + out_PX.nbytes
    images = [torch.randint(256, (height, width, 3), dtype=torch.uint8, device=device) for _ in range(copies(num_bytes))]
    preprocessor = Preprocessor(config.geometry, ops, device)
    calls = [lambda image=image: preprocessor.write_patches(image, grid, out_PX) for image in images]
    return Case("resize and cut", name, 0, num_bytes, calls)


def attention(config: ModelConfig, backend: Backend, name: str, count: int) -> Case:
    """Return attention with rotation; operations count the tower's head size, not the kernel's multiple of 16."""
    heads, head_dim = tower_of(config).num_heads, tower_of(config).head_dim
    length, device = patches_of(config, name), backend.device
    segments = backend.varlen_attention(heads, head_dim)
    segments.plan([length] * count)
    kvq = torch.randn((length * count, 3, heads, head_dim), dtype=torch.bfloat16, device=device)
    cos_sin = torch.randn((length * count, head_dim), device=device).clamp_(-1, 1)
    flops = 4.0 * count * length**2 * heads * head_dim
    return Case("vision attention", f"{count} x {name}", flops, kvq.nbytes * 4 / 3, [lambda: segments.run(kvq, cos_sin)])


def layer_norm(config: ModelConfig, ops: Ops, device: torch.device, num_patches: int) -> Case:
    width = tower_of(config).hidden_size
    ones = torch.ones(width, dtype=torch.bfloat16, device=device)
    num_bytes = 2 * num_patches * width * BF16
    inputs = [torch.randn((num_patches, width), dtype=torch.bfloat16, device=device) for _ in range(copies(num_bytes))]
    calls = [lambda x=x: ops.layer_norm(x, ones.float(), ones, ones, 1e-6) for x in inputs]
    return Case("layer norm", f"{num_patches} x {width}", 0, num_bytes, calls)


def gemms(config: ModelConfig, ops: Ops, device: torch.device, num_patches: int) -> Iterator[Case]:
    """Return the four matrix products of a block with their epilogues."""
    hidden, inner = tower_of(config).hidden_size, tower_of(config).intermediate_size

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    x, h, residual = tensor(num_patches, hidden), tensor(num_patches, inner), tensor(num_patches, hidden)
    qkv, proj, fc1, fc2 = tensor(3 * hidden, hidden), tensor(hidden, hidden), tensor(inner, hidden), tensor(hidden, inner)
    bias = tensor(3 * hidden + inner)
    products = {
        "qkv, bias": (qkv, lambda: F.linear(x, qkv, bias[: 3 * hidden])),
        "proj, residual": (proj, lambda: residual.addmm_(x, proj.t())),
        "fc1, bias, gelu": (fc1, lambda: ops.linear_gelu(x, fc1, bias[:inner])),
        "fc2, residual": (fc2, lambda: residual.addmm_(h, fc2.t())),
    }
    for name, (weight, call) in products.items():
        flops = 2.0 * num_patches * weight.numel()
        yield Case(f"vision {name}", f"{num_patches} x {weight.shape[1]} x {weight.shape[0]}", flops, 0, [call])
