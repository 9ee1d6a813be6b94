"""Checks of gradients against finite differences in random directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Tensors = list[Tensor]

# Steps in units of the root mean square of an input: nearly a tangent; what an attack makes; across a coarse step.
_SMALL, _LARGE, _WIDE = 1e-3, 0.1, 1.0
_SMALL_HALF, _LARGE_HALF = 0.1, 0.3
_JITTER = 0.1
# Of a value, where none is below 0: how far a large step goes at most is a tenth of it.
_INSIDE = 5.0
# Differences below this many roundings of the values are rounding.
_ROUNDINGS = 30
# Errors of healthy layers are below .3, even where they are clamped; those of layers at fault above .5.
_WRONG, _SATURATED, _AGREES = 0.4, 0.5, 0.2
# k winners: .62 to .83; steep sigmoids: up to .24, softmax: .45.
_ALIKE = 0.53
_SMOOTH = (0.8, 1.25)
_TRANSPOSED = 0.01
# Cosine of the steps of a module and of its values from which it is like the identity, over that many steps.
_NEAR, _TRIES = 0.8, 4


@dataclass(frozen=True, kw_only=True)
class Secants:
    """The gradient of a function next to its differences.

    The error of a step is ``|p - v| / (|p| + |v|)`` for the differences ``v`` along directions and what the gradient
    predicts, ``p``: 0 for a right gradient, .33 for one twice too large, 1 for none or one of the wrong sign.

    Attributes:
        small: Error for a step of .001 of the input's root mean square.
        large: Error for a step of .1.
        wide: Error for a step of 1; None where the others need no third.
        alike: Cosine of ``p`` and ``v`` for that step.
        steepness: Slope of the small step / slope of the large one: about 1 for a smooth function, more where values
            jump; None where the latter does not change the value.
        silent: Whether the gradient is exactly zero, or there is none.
        flat: Whether no step changes the value.
    """

    small: float
    large: float
    wide: float | None
    alike: float | None
    steepness: float | None
    silent: bool
    flat: bool

    @property
    def fault(self) -> str | None:
        """A code of :data:`robust_ext.evaluations.causes.finding.CODES`, or None."""
        if self.flat or (self.wide is not None and self.wide < _AGREES and not self.silent):
            # A quantiser whose gradient is that of the identity is steep nearby and right across its steps.
            return None
        if self.silent:
            return "zero_gradient"
        if self.alike is None or self.large <= (_WRONG if self.small > _WRONG else _SATURATED):
            return None
        smooth = self.steepness is not None and _SMOOTH[0] < self.steepness < _SMOOTH[1]
        if smooth and self.small > _WRONG:
            # The differences agree, with one another and not with the gradient.
            return "wrong_gradient"
        # Where values jump (k winners), the gradient is right nearby and of some use from afar, not where it saturates.
        return "wrong_gradient" if self.alike > _ALIKE else "saturated_layer"


def secants(
    function: Function, points: Sequence[Tensor], *, generator: torch.Generator, directions: int = 2
) -> Secants:
    """Compare gradient and differences of a function at a point.

    Args:
        function: From tensors to tensors of any shapes, the same ones at each call; it may change what it gets.
        points: Floating point tensors, near which it is differentiated.
        generator: On the CPU, for directions.
        directions: How many.
    """
    probe = _Probe(function, points, generator, directions)
    half = any(one.dtype in (torch.float16, torch.bfloat16) for one in (*probe.leaves, *probe.outputs))
    small = probe.measure(_SMALL_HALF if half else _SMALL)
    large = probe.measure(_LARGE_HALF if half else _LARGE)
    wide = probe.measure(_WIDE) if large.error > _WRONG else None
    return Secants(
        small=small.error,
        large=large.error,
        wide=None if wide is None else wide.error,
        alike=None if wide is None else wide.alike,
        steepness=small.slope / large.slope if large.slope else None,
        silent=probe.silent,
        flat=not small.slope and not large.slope,
    )


def near_identity(function: Function, points: Sequence[Tensor], *, generator: torch.Generator) -> bool:
    """Return whether values move with the points over such large steps, so that the identity's gradient is of use.

    Quantisers, steep sigmoids and compression have a cosine of .84 and more; k winners and transforms below .8.
    """
    leaves = [_jittered(point, generator) for point in points]
    shared = moved = way = 0.0
    for _ in range(_TRIES):
        steps = [_direction(point, generator) for point in leaves]
        change = _change(function, leaves, steps, 1)
        shared, moved = shared + _inner(change, steps), moved + _inner(change, change)
        way += _inner(steps, steps)
    return bool(shared > _NEAR * (moved * way) ** 0.5)


class _Measured(NamedTuple):
    error: float
    slope: float
    alike: float = 0.0


class _Probe:
    """A function with the graph of its value at one point, and directions from there."""

    def __init__(
        self, function: Function, points: Sequence[Tensor], generator: torch.Generator, directions: int
    ) -> None:
        self._function = function
        self.leaves = [_jittered(point, generator).requires_grad_() for point in points]
        with torch.enable_grad():
            self.outputs = list(function([leaf.clone() for leaf in self.leaves]))
        self._drawn = [[_direction(point, generator) for point in self.leaves] for _ in range(directions)]
        squares = [float(torch.finfo(one.dtype).eps * one.detach().double().norm()) ** 2 for one in self.outputs]
        self._rounding = _ROUNDINGS * sum(squares) ** 0.5
        weights = [_signs(output, generator) for output in self.outputs]
        gradients = self._pull(weights)
        self.silent = not any(bool(one.any()) for one in gradients)
        self._tangents = self._pushed(weights, gradients)

    def measure(self, step: float) -> _Measured:
        """Error, slope and cosine, over directions, for a step."""
        shared = predicted = found = 0.0
        for number, directions in enumerate(self._drawn):
            change = _change(self._function, self.leaves, directions, step)
            length = _inner(change, change)
            if length**0.5 <= self._rounding:
                continue
            found += length
            if self._tangents is None:
                # The gradient in the direction of the change: what it has across it is not seen.
                pulled = self._pull([one.to(output) for one, output in zip(change, self.outputs, strict=True)])
                product = 2 * step * _inner(pulled, directions)
                shared, predicted = shared + product, predicted + product**2 / length
            else:
                tangents = [2 * step * one for one in self._tangents[number]]
                shared, predicted = shared + _inner(tangents, change), predicted + _inner(tangents, tangents)
        if not found:
            return _Measured(0.0, 0.0)
        apart, together = max(predicted - 2 * shared + found, 0.0) ** 0.5, (predicted * found) ** 0.5
        error = apart / (predicted**0.5 + found**0.5)
        return _Measured(error, found**0.5 / step, shared / together if together else 0.0)

    def _pushed(self, weights: Tensors, gradients: Tensors) -> list[Tensors] | None:
        """Derivatives along the directions, by differentiating the backward pass, which is linear in what it gets.

        None where it cannot be differentiated, as where it leaves the graph itself.
        """
        cotangents, pushed = [torch.zeros_like(output, requires_grad=True) for output in self.outputs], []
        try:
            pulled = self._pull(cotangents, create_graph=True)
            if not any(one.requires_grad for one in pulled):
                return None
            for directions in self._drawn:
                tangents = [one.double() for one in _grad(pulled, directions, cotangents)]
                one, other = _inner(tangents, weights), _inner(gradients, directions)
                if abs(one - other) > _TRANSPOSED * (_inner(tangents, tangents) * _inner(weights, weights)) ** 0.5:
                    return None
                pushed.append(tangents)
        except RuntimeError:
            return None
        return pushed

    def _pull(self, weights: Tensors, *, create_graph: bool = False) -> Tensors:
        """The gradient at the point; zero where none comes back, or where it is not finite."""
        return _grad(self.outputs, weights, self.leaves, create_graph=create_graph)


def _change(function: Function, points: Tensors, directions: Tensors, step: float) -> Tensors:
    """Return the change of the value from a step back to a step ahead, in float64."""
    with torch.no_grad():
        behind, ahead = (
            function([point + size * one for point, one in zip(points, directions, strict=True)])
            for size in (-step, step)
        )
        return [(b.double() - a.double()).nan_to_num(0, 0, 0) for a, b in zip(behind, ahead, strict=True)]


def _grad(outputs: Tensors, weights: Tensors, inputs: Tensors, *, create_graph: bool = False) -> Tensors:
    """The gradient of weighted outputs; zero where none comes back, or where it is not finite.

    It is that of a sum, as for ``grad_outputs`` torch imports a second's worth of sympy.
    """
    pairs = [(one, weight) for one, weight in zip(outputs, weights, strict=True) if one.requires_grad]
    if not pairs:
        return [torch.zeros_like(one) for one in inputs]
    value = torch.stack([(one * weight.conj()).real.sum() for one, weight in pairs]).sum()
    found = torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=True, create_graph=create_graph)
    pulled = zip(found, inputs, strict=True)
    return [torch.zeros_like(like) if one is None else one.nan_to_num(0, 0, 0) for one, like in pulled]


def _inner(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return sum(float((one.double() * other.double()).sum()) for one, other in zip(some, others, strict=True))


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator).mul_(2).sub_(1).to(like)


def _direction(point: Tensor, generator: torch.Generator) -> Tensor:
    """Signs of the size of the point's values; those that are not finite, as in a mask, do not count."""
    signs, values = _signs(point, generator), point.detach()
    finite = values[values.isfinite()].double()
    scale = float(finite.square().mean().sqrt()) if len(finite) else 0.0
    if scale and bool((finite >= 0).all()):
        # A logarithm or root may follow: values stay above 0.
        return signs * (_INSIDE * values.nan_to_num(0, 0, 0)).clamp(max=scale)
    return signs * (scale or 1.0)


def _jittered(point: Tensor, generator: torch.Generator) -> Tensor:
    """A point next to it, as inputs often lie on kinks (zeros in front of a ReLU), where there is no one gradient."""
    share = torch.rand(point.shape, generator=generator).to(point)
    return point.detach() + _JITTER * share * _direction(point, generator)
