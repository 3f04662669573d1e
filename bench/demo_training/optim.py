"""Muon for matrices, AdamW for the rest, an average of the weights, and the learning-rate schedule. Used by `train`.

Every step is free of host synchronisation, so that it can be part of a CUDA graph; rates are tensors that the host sets between steps.
Muon: the momentum of a matrix is orthogonalised by a Newton-Schulz iteration (Jordan et al., 2024); equal shapes go through as one batch.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """(n, r, c) to matrices of the same singular vectors with singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Steps all parameters of `module` from their gradients and keeps an exponential average of them.

    Invariant: `rate` and `horizon` (the decay of the average) are read from the device at each step; nothing else changes between steps.
    """

    def __init__(self, module: nn.Module, matrix_rate: float, rest_rate: float, device: torch.device) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.matrix_rate, self.rest_rate = matrix_rate, rest_rate
        self.rate = torch.zeros((), device=device)  # fraction of the peak rates
        self.decay = torch.zeros((), device=device)  # of the average; 0 copies the weights
        self.count = torch.zeros((), device=device)
        matrices = [p for name, p in named if p.ndim == 2 and not _is_table(name)]
        self.rest = [p for name, p in named if p.ndim != 2 or _is_table(name)]
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in matrices:
            groups[(p.shape[0], p.shape[1])].append(p)
        self.groups = list(groups.values())
        self.momentum = [torch.zeros(len(group), *group[0].shape, device=device) for group in self.groups]
        self.first = [torch.zeros_like(p) for p in self.rest]
        self.second = [torch.zeros_like(p) for p in self.rest]
        self.average = [p.detach().clone() for p in self.parameters]

    def state(self) -> dict[str, object]:
        """All that a later process needs besides the weights."""
        return {name: getattr(self, name) for name in ("count", "momentum", "first", "second", "average")}

    def load(self, state: dict[str, object]) -> None:
        """The inverse of `state`, in place."""
        for name, saved in state.items():
            own = getattr(self, name)
            for mine, theirs in zip(own if isinstance(own, list) else [own], saved if isinstance(saved, list) else [saved], strict=True):
                mine.copy_(theirs)

    @torch.no_grad()
    def step(self) -> None:
        """One update from `p.grad`."""
        self.count += 1
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            self._muon(group, momentum)
        self._adam()
        keep = self.decay
        torch._foreach_mul_(self.average, keep)
        torch._foreach_add_(self.average, torch._foreach_mul([p.detach() for p in self.parameters], 1 - keep))

    def _muon(self, group: list[nn.Parameter], momentum: Tensor) -> None:
        grads = torch.stack([p.grad for p in group])  # type: ignore[misc]
        momentum.lerp_(grads, 0.05)
        update = grads.lerp(momentum, 0.95)
        rows, columns = update.shape[1:]
        parts = 3 if rows == 3 * columns else 1  # queries, keys and values of the vision tower are three matrices in one
        update = orthogonalise(update.reshape(-1, rows // parts, columns)).reshape(update.shape)
        scale = self.rate * self.matrix_rate * max(1.0, rows / parts / columns) ** 0.5
        weights = [p.detach() for p in group]
        torch._foreach_mul_(weights, 1 - self.rate * self.matrix_rate * 0.02)
        torch._foreach_add_(weights, list((-scale * update).unbind(0)))

    def _adam(self) -> None:
        grads = [p.grad for p in self.rest]
        torch._foreach_lerp_(self.first, grads, 0.1)  # type: ignore[arg-type]
        torch._foreach_mul_(self.second, 0.97)
        torch._foreach_addcmul_(self.second, grads, grads, 0.03)  # type: ignore[arg-type]
        scale = self.rate * self.rest_rate / (1 - 0.9**self.count)
        roots = torch._foreach_div(self.second, 1 - 0.97**self.count)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, 1e-8)
        update = torch._foreach_div(self.first, roots)
        torch._foreach_mul_(update, -scale)
        torch._foreach_add_([p.detach() for p in self.rest], update)


def _is_table(name: str) -> bool:
    """Embeddings and read-outs: each row stands for itself, so they are no matrices to Muon."""
    return any(part in name for part in ("embed", "lm_head", "heads."))


def rate_at(progress: float) -> float:
    """Fraction of the peak rate at this share of the run: a short warm-up, a plateau, then a straight line to zero."""
    if progress < 0.01:
        return 0.05 + 0.95 * progress / 0.01
    return 1.0 if progress < 0.5 else max(0.0, (1 - progress) / 0.5)


def level_at(progress: float) -> float:
    """Difficulty of the pictures at this share of the run: easy at first, full from a third on."""
    return min(1.0, max(0.0, (progress - 0.02) / 0.3))
