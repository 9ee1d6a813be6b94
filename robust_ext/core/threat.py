"""The threat model: a norm, a budget and the bounds of valid inputs; distances, projections and random points in it.

Sources: Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), equation 1 and
appendices A.2 and B, for inner and boundary points; they treat linf only, the l2 and l1 forms are this project's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from robust_ext.core.bounds import check_bounds
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_choice, check_number

NORMS = ("linf", "l2", "l1")
# Of a number, at most, where float32 rounds it.
_ROUNDING = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """What a perturbation may be: ``||x' - x|| <= epsilon`` and ``x'`` in ``bounds``.

    Args:
        norm: ``"linf"``, ``"l2"`` or ``"l1"``, over all values of one sample.
        epsilon: Budget in the units of the inputs, above 0.
        bounds: Lowest and highest valid input value.

    Example:
        >>> threat_model = ThreatModel(norm="linf", epsilon=8 / 255)
        >>> x = torch.zeros(2, 3)
        >>> threat_model.distance(x, x + 0.5)
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    norm: str
    epsilon: float
    bounds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        object.__setattr__(self, "bounds", check_bounds(self.bounds))

    @property
    def width(self) -> float:
        """Distance between the bounds."""
        return self.bounds[1] - self.bounds[0]

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances ``(N,)`` in float64 between the rows of two batches ``(N, ...)``."""
        difference: Tensor = (a.detach().double() - b.detach().double()).flatten(1)
        if self.norm == "linf":
            return difference.abs().amax(1) if difference.shape[1] else difference.sum(1)
        distances: Tensor = torch.linalg.vector_norm(difference, ord=2 if self.norm == "l2" else 1, dim=1)
        return distances

    def tolerance(self, values: int) -> float:
        """How far beyond ``epsilon`` a candidate may lie and still count, for samples of ``values`` numbers.

        float32 rounds each value of ``x + d`` by at most 2 ** -24 of the largest magnitude a value in bounds can have,
        which adds up in the norm. Attacks round several times: 2e-7 of it is allowed, but no more than a hundredth of
        epsilon, or one rounding where that is larger; and 1e-5 of epsilon.
        """
        scale = self._scale(values)
        return 1e-5 * self.epsilon + min(2e-7 * scale, max(0.01 * self.epsilon, _ROUNDING * scale))

    def check_resolution(self, values: int) -> None:
        """Raise InvalidArgumentError where rounding samples of ``values`` numbers is not small beside epsilon."""
        least = 10 * _ROUNDING * self._scale(values)
        if self.epsilon < least:
            low, high = self.bounds
            raise InvalidArgumentError(
                "epsilon",
                self.epsilon,
                f"at least {_rounded_up(least):g} in {self.norm}: float32 rounds inputs of {values} values in "
                f"[{low:g}, {high:g}] by up to {least / 10:.2g}, which would decide what is within epsilon; take a "
                "larger epsilon, or bounds and inputs in smaller units",
            )

    def contains(self, candidates: Tensor, inputs: Tensor) -> Tensor:
        """Which candidates lie in the ball around their inputs, ``(N,)`` bool, within :meth:`tolerance`."""
        limit = self.epsilon + self.tolerance(inputs[:1].numel())
        return self.distance(candidates, inputs) <= limit

    def sample_inner(self, x: Tensor, count: int, *, generator: torch.Generator, radius: float = 1.0) -> Tensor:
        """Points uniform in the ball of ``radius`` x epsilon around one sample, then clipped to the bounds.

        Args:
            x: One sample, any shape.
            count: Number of points.
            generator: CPU generator; the points depend on nothing else.
            radius: Relative radius, in (0, 1]; the paper's gap of .05 is a radius of .95 (appendix B).

        Returns:
            float32 ``(count, *x.shape)`` on the device of ``x``.
        """
        check_number("radius", radius, minimum=0, maximum=1, open_minimum=True)
        reach, shape = radius * self.epsilon, (count, x.numel())
        if self.norm == "linf":
            d = torch.rand(shape, generator=generator).mul_(2 * reach).sub_(reach)
        elif self.norm == "l2":
            # D of D + 2 coordinates of a point uniform on the sphere are uniform in the ball (Barthe et al. 2005).
            d = _rows(count, x.numel() + 2, lambda row: row.normal_(generator=generator))
            d = d[:, :-2] / d.norm(dim=1, keepdim=True) * reach
        else:
            # D + 1 exponentials divided by their sum are uniform on the simplex; dropping one makes them uniform in it.
            signed = _rows(count, x.numel() + 1, lambda row: _laplace(row, generator))
            d = signed[:, :-1] / signed.abs().sum(1, keepdim=True) * reach
        return self._add(x, d)

    def sample_surface(self, x: Tensor, count: int, *, generator: torch.Generator) -> Tensor:
        """Random points at distance epsilon from one sample, inside the bounds.

        A direction is drawn (linf: uniform in the cube, l2: normal, l1: Laplace) and stretched until the *clipped*
        point lies at distance epsilon; where the bounds leave no room for that, the point goes as far as they allow.

        Arguments and points are those of :meth:`sample_inner`.
        """
        shape = (count, x.numel())
        if self.norm == "linf":
            d = torch.rand(shape, generator=generator).mul_(2).sub_(1)
        elif self.norm == "l2":
            d = _rows(*shape, lambda row: row.normal_(generator=generator))
        else:
            d = _rows(*shape, lambda row: _laplace(row, generator))
        return self._stretch(x, d)

    def sample_corners(self, x: Tensor, count: int, *, generator: torch.Generator, radius: float = 1.0) -> Tensor:
        """Random extreme points: the hardest places to plant an adversarial example (section 4.3, appendix B).

        linf: corners of the cube, every value moved by epsilon up or down. l2: the points of the sphere in these
        directions. l1: vertices of ball and bounds together, one value after another moved as far as it can go until
        the budget is used up. All are clipped to the bounds, and lie at distance epsilon where the bounds leave room.

        With a smaller ``radius`` they are those of the ball of ``radius`` x epsilon. In linf they are balanced there: a
        value near a bound goes away from it so much more often that the mean of the clipped points is that of the
        corners at epsilon, which their mean does not tell apart from these.

        Arguments and points are those of :meth:`sample_inner`.
        """
        check_number("radius", radius, minimum=0, maximum=1, open_minimum=True)
        ball, shape = replace(self, epsilon=radius * self.epsilon), (count, x.numel())
        if self.norm == "l1":
            return ball._vertices(x, count, generator)
        if self.norm == "linf" and radius < 1:
            up = torch.rand(shape, generator=generator) < self._rising(x, radius)
            return self._add(x, torch.where(up, ball.epsilon, -ball.epsilon))
        signs = _signs(shape, generator)
        return self._add(x, signs.mul_(self.epsilon)) if self.norm == "linf" else ball._stretch(x, signs)

    def _scale(self, values: int) -> float:
        """The largest norm of a sample of so many numbers in bounds."""
        growth: float = {"linf": 1.0, "l2": float(values) ** 0.5, "l1": float(values)}[self.norm]
        return max(abs(self.bounds[0]), abs(self.bounds[1])) * growth

    def _rising(self, x: Tensor, radius: float) -> Tensor:
        """Probability with which each value goes up in :meth:`sample_corners` of a smaller radius, (D,) in linf.

        With room for ``u`` up and ``d`` down at epsilon, and ``u_r``, ``d_r`` at ``radius`` x epsilon, the mean
        displacement ``p u_r - (1 - p) d_r`` is to be that of a fair coin at epsilon, ``(u - d) / 2``. It is half where
        nothing is clipped, and ``1 / (2 radius)`` away from a bound that the value lies at.
        """
        up, down = (self._room(x, torch.tensor(sign)) for sign in (1.0, -1.0))
        (u, d), (u_r, d_r) = (
            (up.clamp_max(size), down.clamp_max(size)) for size in (self.epsilon, radius * self.epsilon)
        )
        return (((u - d) / 2 + d_r) / (u_r + d_r)).clamp_(0, 1).float()

    def _vertices(self, x: Tensor, count: int, generator: torch.Generator) -> Tensor:
        drawn = _rows(count, 2 * x.numel(), lambda row: row.uniform_(generator=generator))
        signs = torch.where(drawn[:, : x.numel()] < 0.5, -1.0, 1.0)
        room = self._room(x, signs)
        order = drawn[:, x.numel() :].argsort(1)
        ordered = room.gather(1, order)
        before = ordered.cumsum(1) - ordered
        taken = torch.minimum(ordered, (self.epsilon - before).clamp_min_(0))
        return self._add(x, torch.zeros_like(room).scatter_(1, order, taken) * signs)

    def _room(self, x: Tensor, d: Tensor) -> Tensor:
        """How far each value of ``x`` can go in the direction of ``d`` before it meets a bound, float64 (n, D)."""
        flat = x.detach().flatten().double().cpu()
        return torch.where(d > 0, self.bounds[1] - flat, flat - self.bounds[0]).clamp_min_(0)

    def _stretch(self, x: Tensor, d: Tensor) -> Tensor:
        """Scale each row of ``d`` so that the clipped point lies at distance epsilon, as far as the bounds allow."""
        room, size = self._room(x, d), d.double().abs()
        if self.norm == "linf":
            # Values with less room than epsilon stop at their bound; the largest of the others decides the scale.
            free = torch.where(room >= self.epsilon, size, 0.0).amax(1, keepdim=True)
            stuck = free == 0
            scale = torch.where(stuck, torch.inf, self.epsilon / free.clamp_min(1e-300))
            moved = torch.minimum(size * scale.nan_to_num(posinf=1e300), room).clamp_max_(self.epsilon)
            return self._add(x, moved * d.sign())
        power = 2 if self.norm == "l2" else 1
        weight, limit, budget = size**power, room**power, self.epsilon**power
        # sum(min(s * weight, limit)) is concave and piecewise linear in s: Newton from the left is monotone and exact.
        scale = budget / weight.sum(1, keepdim=True).clamp_min(1e-300)
        for _ in range(64):
            full = scale * weight >= limit
            rest = torch.where(full, 0.0, weight).sum(1, keepdim=True)
            left = budget - torch.where(full, limit, 0.0).sum(1, keepdim=True)
            following = torch.where(rest > 0, left / rest.clamp_min(1e-300), torch.inf).maximum(scale)
            if bool((following <= scale * (1 + 1e-12)).all()):
                break
            scale = following.nan_to_num(posinf=1e300)
        return self._add(x, torch.minimum(scale * weight, limit) ** (1 / power) * d.sign())

    def _add(self, x: Tensor, d: Tensor) -> Tensor:
        base = x.detach().to(torch.float32).flatten().cpu()
        points = d.to(torch.float32).add_(base).clamp_(*self.bounds)
        return points.view(d.shape[0], *x.shape).to(x.device)


def norm_name(norm: object, *, argument: str = "norm") -> str:
    """One of :data:`NORMS`, from any way in which libraries write it; InvalidArgumentError for anything else.

    Example:
        >>> [norm_name(norm) for norm in (math.inf, "inf", "Linf", 2, "l_2", 1.0)]
        ['linf', 'linf', 'linf', 'l2', 'l2', 'l1']
    """
    text = norm.strip().lower() if isinstance(norm, str) else ""
    if not isinstance(norm, bool) and isinstance(norm, Real):
        text = f"{float(norm):g}"
    found = "l" + text.removeprefix("l").removeprefix("_")
    if found not in NORMS:
        raise InvalidArgumentError(argument, repr(norm), "np.inf, 2 or 1, or 'linf', 'l2' or 'l1'")
    return found


def check_epsilon(epsilon: object, *, argument: str = "epsilon") -> float:
    """Return a budget as a float when it is above 0 and float32 can hold it."""
    return check_number(argument, epsilon, minimum=0, maximum=1e20, open_minimum=True)


def _rounded_up(number: float) -> float:
    """A number of two figures that is not below ``number``."""
    unit: float = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit


def _signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.float32).mul_(2).sub_(1)


def _rows(count: int, size: int, draw: Callable[[Tensor], object]) -> Tensor:
    """Random ``(count, size)`` drawn row by row: torch's draws of a whole tensor depend on how many rows it has."""
    rows = torch.empty(count, size)
    for row in rows:
        draw(row)
    return rows


def _laplace(row: Tensor, generator: torch.Generator) -> Tensor:
    signs = _signs(row.shape, generator)
    return row.exponential_(generator=generator).mul_(signs)
