"""Rewrites the decoder's matrices of a checkpoint as quantizers publish them, and returns the values that they mean.

compressed-tensors packs its own formats; AutoAWQ's and AutoGPTQ's packing follows their sources' description.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # a matrix -> tensors by suffix, and the values

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of eight whose values lie in a word one after the other
IGNORED = ["lm_head", "re:.*visual.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_[ab]$", "re:mtp.fc"]


def affine(matrix: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (N, K), scales and zero points (N, K / group), and the values."""
    groups = matrix.unflatten(1, (-1, group or matrix.shape[1]))
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    last = (1 << bits) - 1
    if symmetric:
        scale = groups.abs().amax(2) / (last // 2)
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        scale = (most - least) / last
        zero = (-least / scale).round().clamp(0, last)
    codes = (groups / scale[:, :, None] + zero[:, :, None]).round().clamp(0, last)
    values = (codes - zero[:, :, None]) * scale[:, :, None]
    return codes.flatten(1).int(), scale, zero.int(), values.flatten(1)


def pack(values: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """(X, Y) -> int32 words of values that follow each other along Y, the first in the lowest bits."""
    per = 32 // bits
    packed = torch.zeros((values.shape[0], values.shape[1] // per), dtype=torch.int64)
    for place, column in enumerate(order or range(per)):
        packed |= values[:, column::per].long() << (bits * place)
    return (packed - ((packed >> 31) << 32)).int()


def awq(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zero, values = affine(matrix, 4, 32, symmetric=False)
    words, zeros = pack(codes.t(), 4, AWQ_COLUMNS), pack(zero.t(), 4, AWQ_COLUMNS)
    return {".qweight": words, ".qzeros": zeros, ".scales": scale.t().contiguous()}, values


def gptq(bits: int, offset: int, symmetric: bool = True) -> Writer:
    def write(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        matrix = matrix if symmetric else torch.cat((matrix[:8].abs(), matrix[8:]))
        codes, scale, zero, values = affine(matrix, bits, 32, symmetric)
        zeros = pack(zero.t() - offset & (1 << bits) - 1, bits)
        tensors = {".qweight": pack(codes, bits).t(), ".qzeros": zeros, ".scales": scale.t()}
        return tensors | {".g_idx": (torch.arange(matrix.shape[1]) // 32).int()}, values

    return write


def compressed(**weights: object) -> Writer:
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)

    def write(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if weights["type"] == "float" and weights["num_bits"] == 8:
            scale = matrix.abs().amax(1, keepdim=True) / 448
            scale = scale if weights["strategy"] == "channel" else scale.amax().reshape(1)
            codes = (matrix / scale).to(torch.float8_e4m3fn)
            return {".weight": codes, ".weight_scale": scale}, codes.float() * scale
        if weights["type"] == "float":
            whole = 448 * 6 / matrix.abs().max().reshape(1)
            scale = (matrix.unflatten(1, (-1, 16)).abs().amax(2) * whole / 6).to(torch.float8_e4m3fn).float()
            given = {"weight": matrix, "weight_scale": scale, "weight_global_scale": whole}
            made = NVFP4PackedCompressor.compress(given, scheme)
            halves = torch.stack((made["weight_packed"] & 15, made["weight_packed"] >> 4), 2).flatten(1)
            values = torch.tensor([*FLOAT4, *(-x for x in FLOAT4)])[halves.long()].unflatten(1, (-1, 16)) * scale[:, :, None] / whole
            assert values.flatten(1).bfloat16().equal(NVFP4PackedCompressor.decompress(dict(made), scheme)["weight"].bfloat16())
            return _named(made), values.flatten(1)
        bits, symmetric = arguments.num_bits, arguments.symmetric
        _, scale, zero, _ = affine(matrix, bits, arguments.group_size or 0, symmetric)
        given = {"weight": matrix, "weight_scale": scale, "weight_zero_point": (zero - (1 << (bits - 1))).to(torch.int8)}
        made = PackedQuantizationCompressor.compress(given, scheme)
        return _named(made), PackedQuantizationCompressor.decompress(dict(made), scheme)["weight"].float()

    return write


def modelopt_fp4(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, values = compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)(matrix)
    factor = tensors[".weight_global_scale"].reciprocal().reshape(())
    stored = {".weight": tensors[".weight_packed"], ".weight_scale": tensors[".weight_scale"], ".weight_scale_2": factor}
    return stored | {".input_scale": torch.ones(())}, values


def modelopt_fp8(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, values = compressed(num_bits=8, type="float", strategy="tensor", symmetric=True)(matrix)
    return tensors | {".weight_scale": tensors[".weight_scale"].reshape(()), ".input_scale": torch.ones(())}, values


def _named(tensors: Tensors) -> Tensors:
    return {f".{name}": tensor for name, tensor in tensors.items() if tensor is not None}


def rewrite(plain: Path, out: Path, meant: Path, writer: Writer, quantization: dict[str, object], takes: Callable[[str], bool]) -> None:
    """The checkpoint `plain` in `out` as `writer` stores the matrices whose module it `takes`, and in `meant` with the values that these
    mean. Experts of a stacked tensor become modules of their own."""
    stored, values = {}, {}
    for name, tensor in modules_of(load_file(plain / "model.safetensors")).items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 2 and takes(module):
            tensors, values[name] = writer(tensor.float())
            stored |= {module + suffix: each.contiguous() for suffix, each in tensors.items()}
        else:
            stored[name] = values[name] = tensor
    for folder, content, more in ((out, stored, {"quantization_config": quantization}), (meant, values, {})):
        folder.mkdir()
        for file in plain.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
        save_file({name: each.contiguous() for name, each in content.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def modules_of(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    hidden = next(tensor.shape[1] for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    for name, tensor in tensors.items():
        if ".experts." not in name or tensor.dim() != 3:
            found[name] = tensor
            continue
        parent, kind = name.rsplit(".", 1)
        by_input = tensor.shape[1 if kind == "gate_up_proj" else 2] == hidden
        for expert, matrix in enumerate(tensor.transpose(1, 2) if by_input else tensor):
            if kind == "down_proj":
                found[f"{parent}.{expert}.down_proj.weight"] = matrix
            else:
                for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    found[f"{parent}.{expert}.{part}.weight"] = half
    return found
