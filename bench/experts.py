"""Number of distinct experts that the tokens of a step choose, next to the expectation for uniform routing."""

from dataclasses import dataclass, field

import torch

from models.kernels.stream import Normed, Residual, RowClass
from models.layers import repeats
from models.layers.moe import SparseMoe


@dataclass(slots=True)
class ExpertCounter:
    """Counts on the device, also in CUDA graphs: for each layer, in order of its first step, (steps, distinct, expected)."""

    sums: dict[int, torch.Tensor] = field(default_factory=dict)

    def watch(self) -> None:
        """Count in all mixtures of this process; must precede the capture of graphs."""
        compute = SparseMoe.add_

        def add_(layer: SparseMoe, residual: Residual, x_TD: Normed, rows: RowClass, valid_T: torch.Tensor | None) -> None:
            self._count(layer, x_TD, valid_T)
            compute(layer, residual, x_TD, rows, valid_T)

        SparseMoe.add_ = add_  # type: ignore[assignment, method-assign]
        repeats.can_capture = lambda: False  # repeated layers would count for another one

    @torch.inference_mode()
    def reset(self) -> None:
        for sums in self.sums.values():
            sums.zero_()

    def layers(self) -> list[tuple[float, float]]:
        """Return distinct and expected experts per step of each layer."""
        found = [sums.tolist() for sums in self.sums.values()]
        return [(distinct / max(1, steps), expected / max(1, steps)) for steps, distinct, expected in found]

    def _count(self, layer: SparseMoe, x: Normed, valid_T: torch.Tensor | None) -> None:
        num_experts, per_token = layer._experts.num_experts, layer._experts.num_chosen
        sums = self.sums.setdefault(id(layer), torch.zeros(3, dtype=torch.float64, device=x.stream_TD.device))
        stream_TD = x.stream_TD.float() + (0 if x.parts_STD is None else x.parts_STD.float().sum(0))
        normed_TD = stream_TD * torch.rsqrt(stream_TD.square().mean(-1, keepdim=True) + x.eps) * x.weight_D.float()
        chosen_TK = (normed_TD @ layer.gate.weight[:num_experts].float().T).topk(per_token).indices
        valid_T = torch.ones(len(chosen_TK), dtype=torch.bool, device=chosen_TK.device) if valid_T is None else valid_T
        flags_E = torch.zeros(num_experts + 1, device=chosen_TK.device)
        flags_E.index_fill_(0, torch.where(valid_T[:, None], chosen_TK, num_experts).flatten(), 1.0)
        num_tokens = valid_T.sum().double()
        expected = num_experts * (1 - torch.pow(1 - per_token / num_experts, num_tokens))
        sums += torch.stack((torch.ones_like(expected), flags_E[:num_experts].sum().double(), expected))
