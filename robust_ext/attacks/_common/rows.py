"""Operations on the rows of a batch: checks, seeds, starts, queries, gradients and directions."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.attacks.base import draw_seed
from robust_ext.core.errors import AttackRefusedError, RobustExtError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels

STARTS = ("random", "input")
NO_GRADIENTS = (
    "gives no gradients; attack it through a differentiable approximation (BPDA), or choose an attack without gradients"
)


def check_batch(target: Target, inputs: Tensor, labels: Tensor, threat_model: ThreatModel) -> tuple[Tensor, Tensor]:
    """Inputs, finite and in bounds, as contiguous float32, and labels ``(N,)``, valid classes, on their device."""
    inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
    labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes)
    return inputs, labels.to(inputs.device)


def check_images(name: str, inputs: Tensor, instead: str) -> None:
    """Raise an AttackRefusedError where inputs are no images ``(N, C, H, W)``; ``instead`` is what to choose then."""
    if inputs.dim() != 4:
        raise AttackRefusedError(
            f"{name}: works on images (N, C, H, W), and inputs here are {tuple(inputs.shape)}; reshape them inside the "
            f"model, or choose {instead}"
        )


def row_streams(rows: int, generator: torch.Generator) -> list[torch.Generator]:
    """A CPU generator for each row, seeded in order: those of the first rows do not depend on how many follow."""
    return [torch.Generator().manual_seed(draw_seed(generator)) for _ in range(rows)]


def random_start(inputs: Tensor, threat_model: ThreatModel, streams: list[torch.Generator]) -> Tensor:
    """Points uniform in the balls and clipped to the bounds, ``(N, ...)``, each row's from its own stream."""
    return threat_model.sample_inner(inputs, 1, key=[draw_seed(stream) for stream in streams])[:, 0]


def query(target: Target, points: Tensor) -> Tensor:
    """The target's logits ``(N, K)``, without gradients; of a copy, as a module may work on its input in place."""
    with torch.no_grad():
        logits: Tensor = target.module(points.clone())
    return logits


def runner_up(target: Target, points: Tensor, labels: Tensor) -> Tensor:
    """The class with the highest logit among all but the label's, int64 ``(N,)``; one query of the whole batch."""
    return query(target, points).scatter(1, labels.view(-1, 1), -torch.inf).argmax(1)


def gradient_of(value: Tensor, points: Tensor, missing: RobustExtError, *, keep: bool = False) -> Tensor:
    """The gradient of values ``(N,)`` with respect to their points ``(N, ...)``; NaN is taken for zero.

    ``missing`` is raised without one; ``keep`` is whether the graph is needed once more.
    """
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value.sum(), points, retain_graph=keep, allow_unused=True)
    if gradient is None:
        raise missing
    return gradient.nan_to_num(nan=0.0)


def broken(logits: Tensor, *, targeted: bool = False) -> Tensor:
    """Return a mask of rows with non-finite logits, bool ``(N,)``, for untargeted attacks; all False for targeted ones.

    A model is not robust at such a point, so it is kept where no other is found. It is in no class that is aimed at.
    """
    return ~torch.isfinite(logits).all(1) & (not targeted)


def l2_normalize(rows: Tensor) -> Tensor:
    """Rows ``(N, D)`` of Euclidean length 1; zeros stay.

    They are divided by their largest entry first: in float32 the squares of entries below 1e-19 are lost.
    """
    largest = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    scaled = rows / largest
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled.div_(length.clamp_min(1))


def over_rows(values: Tensor, points: Tensor) -> Tensor:
    """Values ``(N,)`` in a shape that broadcasts over points ``(N, ...)``."""
    return values.view(-1, *[1] * (points.dim() - 1))
