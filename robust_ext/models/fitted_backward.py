"""A substitute for the backward pass of a layer, fitted to what the layer does near the inputs.

Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018), section 4.1, ask for a
differentiable function that is about the layer; Papernot et al., "Practical Black-Box Attacks against Machine Learning"
(2017), fit one to a model's own outputs. Of a layer that holds most of a network it is the student of a distillation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.threat import ThreatModel

COPIES = 16
"""Points near each input that the layer is asked at."""
_STEPS, _BATCH, _WIDTH = 300, 128, 64
# Pixels of a step of the fit: fewer rows of large images.
_PIXELS = 2**15
# Values of an input and an output that a dense substitute joins, at most.
_MOST = 50_000


class _Student(nn.Module):
    """A linear map and a small parallel network, of convolutions where the layer keeps height and width."""

    scale: Tensor
    centre: Tensor

    def __init__(self, given: Tensor, made: Tensor) -> None:
        super().__init__()
        images = given.dim() == made.dim() == 4 and given.shape[2:] == made.shape[2:]
        self.images, self.shape = images, made.shape[1:]
        inner, outer = (given.shape[1], made.shape[1]) if images else (given[0].numel(), made[0].numel())
        if not images and max(inner, outer) > _MOST:
            raise AttackRefusedError(
                f"fitted: the layer maps {inner} values to {outer}, more than {_MOST}; name another"
            )
        wide = 4 * _WIDTH
        self.straight: nn.Module = nn.Conv2d(inner, outer, 1) if images else nn.Linear(inner, outer)
        self.bent: nn.Module = (
            nn.Sequential(nn.Conv2d(inner, _WIDTH, 3, padding=1), nn.SiLU(), nn.Conv2d(_WIDTH, outer, 3, padding=1))
            if images
            else nn.Sequential(nn.Linear(inner, wide), nn.SiLU(), nn.Linear(wide, outer))
        )
        self.register_buffer("scale", made.std().clamp_min(1e-12))
        self.register_buffer("centre", made.mean(0))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.images else x.flatten(1)
        found: Tensor = (self.straight(x) + self.bent(x)).view(len(x), *self.shape)
        return found * self.scale + self.centre


def fit_backward(
    network: nn.Module, layer: nn.Module, inputs: Tensor, *, threat_model: ThreatModel, seed: int
) -> nn.Module:
    """Return a small network that is about the layer in the ball, to take gradients of.

    Args:
        network: Called with inputs ``(N, ...)``, whole batches of them.
        layer: A part of it, from one tensor ``(N, ...)`` to another.
        inputs: Clean inputs ``(N, ...)``.
        threat_model: Whose ball the points are drawn from, :data:`COPIES` an input.
        seed: Of the points and the fit.

    Raises:
        AttackRefusedError: The network does not call the layer, or the layer maps no tensor to a tensor.
    """
    pairs: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, given: tuple[object, ...], made: object) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(made, Tensor) and made.is_floating_point():
            pairs.append((given[0].detach().float(), made.detach().float()))

    handle: RemovableHandle = layer.register_forward_hook(note)
    keys = [derive_seed(seed, row, "fitted backward") for row in range(len(inputs))]
    try:
        with torch.no_grad():
            for points in threat_model.sample_inner(inputs, COPIES, key=keys).unbind(1):
                network(points)
    finally:
        handle.remove()
    if not pairs or len({(one.shape[1:], other.shape[1:]) for one, other in pairs}) != 1:
        raise AttackRefusedError("fitted: the layer was not called with one tensor for another; name another layer")
    given, made = (torch.cat(column) for column in zip(*pairs, strict=True))
    with torch.enable_grad(), seeded_globals(derive_seed(seed, "fit")):
        student = _Student(given, made).to(given.device)
        rows_at_once = min(_BATCH, max(4, _PIXELS // given.shape[2:].numel())) if student.images else _BATCH
        optimiser = torch.optim.Adam(student.parameters(), lr=3e-3)
        for step in range(_STEPS):
            optimiser.param_groups[0]["lr"] = 3e-3 * (1 - step / _STEPS)
            rows = torch.randint(len(given), (rows_at_once,)).to(given.device)
            loss = ((student(given[rows]) - made[rows]) / student.scale).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return student.eval().requires_grad_(False)
