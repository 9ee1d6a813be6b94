"""Whether a gradient predicts how a function changes: gradients against finite differences in random directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]

# Steps in units of the root mean square of an input: nearly a tangent; what an attack makes; across a coarse step.
_SMALL, _BETWEEN, _LARGE, _WIDE = 1e-3, 1e-2, 0.1, 1.0
_SMALL_HALF, _LARGE_HALF = 0.1, 0.3
# Differences below this many roundings of the values are rounding.
_ROUNDINGS = 30
_WRONG, _AGREES, _STEEPER = 0.4, 0.25, 1.1


@dataclass(frozen=True, kw_only=True)
class Secants:
    """The gradient of a function beside its differences.

    For a difference ``v`` along a direction, ``r`` is the part of ``v`` that the gradient predicts (1 where it predicts
    all of it, 0 where it is zero, or has nothing to do with it), and the error ``|1 - r| / (1 + |r|)``: 0 for a right
    gradient, .33 for one twice too large, 1 for none or one of the wrong sign.

    Attributes:
        small: Error for a step of .001 of the input's root mean square.
        large: Error for a step of .1.
        wide: Error for a step of 1; None where the others need no third.
        steepness: Slope of the small step / slope of the large one: about 1 for a smooth function, more where values
            jump; None where the latter does not change the value.
        jumps: Whether values jump between points where the gradient is right: a step of .01 is steeper than both.
        silent: Whether the gradient is exactly zero, or there is none.
        flat: Whether no step changes the value.
    """

    small: float
    large: float
    wide: float | None
    steepness: float | None
    jumps: bool
    silent: bool
    flat: bool

    @property
    def fault(self) -> str | None:
        """A code of :data:`robust_ext.evaluations.diagnosis.finding.CODES`, or None."""
        if self.flat or (self.wide is not None and self.wide < _AGREES and not self.silent):
            # A quantiser whose gradient is that of the identity is steep nearby and right across its steps.
            return None
        if self.silent:
            return "zero_gradient"
        if self.large > _WRONG:
            return "wrong_gradient" if self.jumps or self.small > _WRONG else "saturated_layer"
        return None


def secants(
    function: Function, points: Sequence[Tensor], *, generator: torch.Generator, directions: int = 2
) -> Secants:
    """Compare gradient and differences of a function at a point.

    Args:
        function: From tensors to tensors of any shapes, the same ones at each call; it may change what it gets.
        points: Floating point tensors, where it is differentiated.
        generator: On the CPU, for directions.
        directions: How many.
    """
    leaves = [point.detach().clone().requires_grad_() for point in points]
    with torch.enable_grad():
        outputs = list(function([leaf.clone() for leaf in leaves]))
    probe = _Probe(function, leaves, outputs)
    drawn = [[_signs(point, generator) * _scale(point) for point in leaves] for _ in range(directions)]
    half = any(one.dtype in (torch.float16, torch.bfloat16) for one in (*leaves, *outputs))
    small = probe.measure(drawn, _SMALL_HALF if half else _SMALL)
    large = probe.measure(drawn, _LARGE_HALF if half else _LARGE)
    suspect = large.error > _WRONG
    wide = probe.measure(drawn, _WIDE) if suspect else None
    between = probe.measure(drawn, _BETWEEN).slope if suspect and not half else 0.0
    silent = not any(bool(one.any()) for one in probe.pull([_signs(output, generator) for output in outputs]))
    return Secants(
        small=small.error,
        large=large.error,
        wide=None if wide is None else wide.error,
        steepness=small.slope / large.slope if large.slope else None,
        jumps=between > _STEEPER * max(small.slope, large.slope),
        silent=silent,
        flat=not small.slope and not large.slope,
    )


@dataclass(frozen=True)
class _Measured:
    error: float
    slope: float


class _Probe:
    """A function with the graph of its value at one point."""

    def __init__(self, function: Function, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        self._function, self._leaves, self._outputs = function, leaves, outputs
        squares = [float(torch.finfo(one.dtype).eps * one.detach().double().norm()) ** 2 for one in outputs]
        self._rounding = _ROUNDINGS * sum(squares) ** 0.5

    def measure(self, drawn: list[list[Tensor]], step: float) -> _Measured:
        """Error and slope, over directions, for a step."""
        length, predicted = 0.0, 0.0
        for directions in drawn:
            change = self._change(directions, step)
            squared = sum(float(one.square().sum()) for one in change)
            if squared**0.5 <= self._rounding:
                continue
            gradients = self.pull([one.to(output) for one, output in zip(change, self._outputs, strict=True)])
            length += squared
            predicted += 2 * step * sum(_inner(g, d) for g, d in zip(gradients, directions, strict=True))
        if not length:
            return _Measured(0.0, 0.0)
        part = predicted / length
        return _Measured(abs(1 - part) / (1 + abs(part)), length**0.5 / step)

    def pull(self, weights: list[Tensor]) -> list[Tensor]:
        """The gradient at the point; zero where none comes back, or where it is not finite."""
        wanted = [
            (output, weight) for output, weight in zip(self._outputs, weights, strict=True) if output.requires_grad
        ]
        if not wanted:
            return [torch.zeros_like(leaf) for leaf in self._leaves]
        found = torch.autograd.grad(
            [output for output, _ in wanted],
            self._leaves,
            [weight for _, weight in wanted],
            allow_unused=True,
            retain_graph=True,
        )
        return [
            torch.zeros_like(leaf) if one is None else one.nan_to_num(0, 0, 0)
            for one, leaf in zip(found, self._leaves, strict=True)
        ]

    def _change(self, directions: list[Tensor], step: float) -> list[Tensor]:
        """How the value changes from a step back to a step ahead, in float64."""
        with torch.no_grad():
            behind, ahead = (
                self._function([leaf + size * one for leaf, one in zip(self._leaves, directions, strict=True)])
                for size in (-step, step)
            )
            return [(b.double() - a.double()).nan_to_num(0, 0, 0) for a, b in zip(behind, ahead, strict=True)]


def _inner(one: Tensor, other: Tensor) -> float:
    return float((one.double() * other.double()).sum())


def _scale(point: Tensor) -> float:
    return float(point.detach().double().square().mean().sqrt()) or 1.0


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randint(0, 2, like.shape, generator=generator).mul_(2).sub_(1)
    return drawn.to(like)
