"""The threat model: a norm, a budget and the bounds of valid inputs; distances, and random points in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import teaching
from robust_ext.core.sampling import BallSampling
from robust_ext.core.validation import check_bounds, check_choice, check_number

NORMS = ("linf", "l2", "l1")
# Of a number, at most, where float32 rounds it.
_ROUNDING = 2.0**-24


@teaching
@dataclass(frozen=True, kw_only=True)
class ThreatModel(BallSampling):
    """The allowed perturbations: ``||x' - x|| <= epsilon`` and ``x'`` in ``bounds``.

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
        """Return the distance beyond ``epsilon`` that still counts, for samples of ``values`` numbers.

        float32 rounds each value of ``x + d`` by at most 2 ** -24 of the largest magnitude a value in bounds can have,
        which adds up in the norm. Attacks round several times: 2e-7 of it is allowed, but no more than a hundredth of
        epsilon, or one rounding where that is larger; and 1e-5 of epsilon.
        """
        scale = self._scale(values)
        return 1e-5 * self.epsilon + min(2e-7 * scale, max(0.01 * self.epsilon, _ROUNDING * scale))

    def check_resolution(self, values: int) -> None:
        """Raise InvalidArgumentError where rounding samples of ``values`` numbers is not small against epsilon."""
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
        """Return a mask of candidates in the ball around their inputs, bool ``(N,)``, within :meth:`tolerance`."""
        limit = self.epsilon + self.tolerance(inputs[:1].numel())
        return self.distance(candidates, inputs) <= limit

    def _scale(self, values: int) -> float:
        """The largest norm of a sample of this many numbers in bounds."""
        growth: float = {"linf": 1.0, "l2": float(values) ** 0.5, "l1": float(values)}[self.norm]
        return max(abs(self.bounds[0]), abs(self.bounds[1])) * growth


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
