"""Operations on the rows of a batch: checks, seeds, starts, queries, gradients, directions and projections."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from robust_ext.attacks.base import draw_seed
from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, RobustExtError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels


class Selectable:
    """A dataclass whose tensors have one entry for each row."""

    def select(self, rows: Tensor) -> Self:
        """Return the same of some rows: int64 indices, which may repeat, or a mask."""
        values = {field.name: selected(getattr(self, field.name), rows) for field in fields(self)}  # type: ignore[arg-type]
        return replace(self, **values)  # type: ignore[type-var]


def selected(value: Any, rows: Tensor) -> Any:
    """Return the entries of some rows, of a tensor, a list with an entry a row, or of all in a tuple."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, list):
        return [value[row] for row in rows.tolist()]
    if isinstance(value, tuple):
        return tuple(selected(part, rows) for part in value)
    return value.select(rows) if hasattr(value, "select") else value


# Newton needs about ten steps; for l1, every eighth halves the interval that holds the root.
_MOST_STEPS = 200


def project(points: Tensor, inputs: Tensor, threat_model: ThreatModel) -> Tensor:
    """The nearest points in the threat model, by Euclidean distance; within rounding of the ball, exactly in bounds.

    Points ``(N, ...)`` are finite, float32 or float64; inputs of the same shape and dtype are the balls' centres.

    Example:
        >>> threat_model = ThreatModel(norm="l1", epsilon=1)
        >>> project(torch.tensor([[1.5, 0.75, 0.25]]), torch.zeros(1, 3), threat_model)
        tensor([[0.8750, 0.1250, 0.0000]])
    """
    if threat_model.restricted:
        return _project_entries(points, inputs, threat_model)
    low, high = threat_model.bounds
    epsilon = threat_model.epsilon
    if threat_model.norm == "linf":
        return points.clamp((inputs - epsilon).clamp_min_(low), (inputs + epsilon).clamp_max_(high))
    if points.numel() == 0:
        return points.clone()
    inner, offsets = inputs.flatten(1), (points - inputs).flatten(1)
    room = room_towards(offsets, inner, threat_model.bounds)
    shrink = _shrink_l2 if threat_model.norm == "l2" else _shrink_l1
    moved = shrink(offsets.abs(), room, epsilon)
    return moved.mul_(offsets.sign_()).add_(inner).clamp_(low, high).view(points.shape)


def _project_entries(points: Tensor, inputs: Tensor, threat_model: ThreatModel) -> Tensor:
    """Where entries have limits of their own: nearest in units of their budgets."""
    low, high = threat_model.box(inputs, ball=threat_model.norm == "linf")
    inside = torch.minimum(torch.maximum(points, low), high)
    if threat_model.norm == "linf" or points.numel() == 0:
        return inside
    scale = threat_model.scale(inputs).flatten(1)
    x, ends = inputs.double().flatten(1) / scale, tuple(end.double().flatten(1) / scale for end in (low, high))
    offsets = points.double().flatten(1) / scale - x
    shrink = _shrink_l2 if threat_model.norm == "l2" else _shrink_l1
    moved = shrink(offsets.abs(), room_towards(offsets, x, (ends[0], ends[1])), threat_model.epsilon)
    found = (x + moved * offsets.sign()) * scale
    return torch.minimum(torch.maximum(found.to(points.dtype).view(points.shape), low), high)


def room_towards(force: Tensor, inputs: Tensor, bounds: tuple[float, float] | tuple[Tensor, Tensor]) -> Tensor:
    """Return how far each coordinate of ``inputs (B, D)`` can go in the direction of ``force`` within the bounds."""
    return torch.where(force > 0, bounds[1] - inputs, inputs - bounds[0]).clamp_min_(0)


def _shrink_l2(size: Tensor, room: Tensor, epsilon: float) -> Tensor:
    """``min(s size, room)`` of norm epsilon, s in [0, 1]; s = 1 where that is shorter.

    In the square of s the square of the norm is concave: Newton's method from the left rises to the root.
    """
    weight, limit = (size / epsilon).square_(), (room / epsilon).square_()
    tiny = torch.finfo(size.dtype).tiny
    square = weight.sum(1, keepdim=True).clamp_min_(1).reciprocal_()
    for _ in range(_MOST_STEPS):
        free = _indicator(limit - square * weight)
        left = 1 - (limit * (1 - free)).sum(1, keepdim=True)
        better = (left / (weight * free).sum(1, keepdim=True).clamp_min_(tiny)).clamp_max_(1)
        rising = better > square * (1 + 4 * torch.finfo(size.dtype).eps)
        if not bool(rising.any()):
            break
        square = torch.where(rising, better, square)
    return torch.minimum(size * square.sqrt_(), room)


def _shrink_l1(size: Tensor, room: Tensor, epsilon: float) -> Tensor:
    """``clip(size - t, 0, room)`` of sum epsilon, t at least 0; t = 0 where that is smaller.

    The sum falls as t grows, first faster and then slower: Newton's method, with halving where it leaves the interval.
    """
    threshold = size.new_zeros(len(size), 1)
    low, high = threshold, size.amax(1, keepdim=True)
    slack = 16 * torch.finfo(size.dtype).eps * epsilon
    for number in range(_MOST_STEPS):
        rest = size - threshold
        over = torch.minimum(rest.clamp_min(0), room).sum(1, keepdim=True) - epsilon
        low, high = torch.where(over > 0, threshold, low), torch.where(over <= 0, threshold, high)
        middle = (low + high) / 2
        unfinished = (over.abs() > slack) & (low < middle) & (middle < high)
        if not bool(unfinished.any()):
            break
        falling = (_indicator(rest) - _indicator(rest - room)).sum(1, keepdim=True)
        newton = threshold + over / falling
        good = (low < newton) & (newton < high) & (number % 8 != 7)
        threshold = torch.where(unfinished, torch.where(good, newton, middle), threshold)
    # Where no threshold comes near enough, as the values are too large for their own differences, the one inside.
    threshold = torch.where(over.abs() <= slack, threshold, high)
    return torch.minimum((size - threshold).clamp_min_(0), room)


def _indicator(values: Tensor) -> Tensor:
    """1 where above 0, and 0 elsewhere; on CPUs several times faster than by way of bools."""
    return values.clamp_min(0).sign_()


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


def given_start(target: Target, inputs: Tensor, threat_model: ThreatModel) -> Tensor | None:
    """The target's first starting points, those outside the balls projected onto them, ``(N, ...)``; None without."""
    points = target.starting_points
    if points is None:
        return None
    if points.shape[:1] != inputs.shape[:1] or points.shape[2:] != inputs.shape[1:] or points.shape[1] == 0:
        expected = f"({len(inputs)}, S, {', '.join(map(str, inputs.shape[1:]))}), S at least 1"
        raise InvalidArgumentError("starting_points", f"shape {tuple(points.shape)}", expected)
    first = points[:, 0].to(inputs)
    # A projection rounds.
    inside = over_rows(threat_model.contains(first, inputs), first)
    return torch.where(inside, first, project(first, inputs, threat_model))


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


def hits(logits: Tensor, labels: Tensor, goal: Criterion = MISCLASSIFICATION) -> Tensor:
    """Return a mask of rows that are adversarial by a criterion, bool ``(N,)``.

    Where logits are not finite a model is not robust, but they are in no class that is aimed at.
    """
    found = goal.adversarial(logits, labels)
    return torch.where(torch.isfinite(logits).all(1), found, torch.full_like(found, not goal.aims))


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
