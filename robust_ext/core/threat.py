"""The threat model: a norm, a budget and the valid inputs; distances, and random points in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robust_ext.core.entries import Entries, Values, as_kinds, as_mask, as_numbers, is_array
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import teaching
from robust_ext.core.sampling import BallSampling
from robust_ext.core.validation import check_bounds, check_choice, check_integer, check_number

NORMS = ("linf", "l2", "l1")
# Of a number, at most, where float32 rounds it.
_ROUNDING = 2.0**-24


# Of a value, at most, by which float32 misses it, twice.
_MISSED = 2.0**-23


@teaching
@dataclass(frozen=True, kw_only=True, repr=False)
class ThreatModel(BallSampling):
    """The allowed perturbations: ``||x' - x|| <= epsilon`` and ``x'`` a valid input.

    Single entries of an input may have limits of their own, as arrays (of numpy or torch, or lists) that broadcast to
    one input. ``epsilon`` and ``bounds`` are then the largest budget and the outermost bounds, of a ball that holds
    what is allowed.

    Args:
        norm: ``"linf"``, ``"l2"`` or ``"l1"``, over all values of one sample.
        epsilon: Budget in the units of the inputs, above 0. With a budget for each entry the ball is
            ``||(x' - x) / epsilon|| <= 1``: in linf a limit of each entry, in l2 and l1 an ellipsoid and a diamond with
            these half axes. Entries of budget 0 are fixed.
        bounds: Lowest and highest valid input value, numbers or arrays.
        mask: True for entries that may change; all may when left out.
        kinds: ``"real"``, ``"integer"`` or ``"one-hot:NAME"`` for each entry; the entries of one NAME are 0 but for a
            single 1. All are real when left out.
        levels: Number of values that a real entry can have, evenly spaced between its bounds: 256 for images of 8 bits.
            Any when left out.
        weights: Budget of each entry relative to ``epsilon``, in [0, 1]; follows from an array of budgets.
        limits: Lowest and highest value of each entry, of shape ``(2, ...)``; follows from arrays of bounds.

    Example:
        >>> threat_model = ThreatModel(norm="linf", epsilon=8 / 255)
        >>> x = torch.zeros(2, 3)
        >>> threat_model.distance(x, x + 0.5)
        tensor([0.5000, 0.5000], dtype=torch.float64)
        >>> ThreatModel(norm="linf", epsilon=[0.1, 2.0], bounds=([0, 0], [1, 80]), kinds=["real", "integer"])
        ThreatModel(norm='linf', epsilon=2.0, bounds=(0.0, 80.0), kinds=(2,), weights=(2,), limits=(2, 2))
    """

    norm: str
    epsilon: float
    bounds: tuple[float, float] = (0.0, 1.0)
    mask: Entries | None = None
    kinds: Entries | None = None
    levels: int | None = None
    weights: Entries | None = None
    limits: Entries | None = None

    if TYPE_CHECKING:  # Arrays are taken too.

        def __init__(
            self,
            *,
            norm: str,
            epsilon: float | Values,
            bounds: tuple[float | Values, float | Values] = (0.0, 1.0),
            mask: Values | None = None,
            kinds: Values | None = None,
            levels: int | None = None,
            weights: Values | None = None,
            limits: Values | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        if is_array(self.epsilon):
            self._take_budgets()
        object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        if isinstance(self.bounds, (list, tuple)) and any(is_array(one) for one in self.bounds):
            self._take_bounds()
        object.__setattr__(self, "bounds", check_bounds(self.bounds))
        mask = None if self.mask is None else as_mask(self.mask)
        if self.weights is not None:
            weights = as_numbers("weights", self.weights)
            if weights.min() < 0 or weights.max() > 1:
                raise InvalidArgumentError("weights", f"from {weights.min():g} to {weights.max():g}", "from 0 to 1")
            if not weights.all():
                free = weights > 0
                mask = as_mask(free if mask is None else _together("mask", free, mask))
                weights = np.where(free, weights, 1.0)
            self._store("weights", None if (weights == 1).all() else weights)
        self._store("mask", mask)
        self._store("kinds", None if self.kinds is None else as_kinds(self.kinds))
        if self.levels is not None:
            object.__setattr__(self, "levels", check_integer("levels", self.levels, minimum=2, maximum=2**16))

    def _store(self, name: str, values: Any) -> None:
        object.__setattr__(self, name, None if values is None else Entries.of(values))

    def _take_budgets(self) -> None:
        """Split budgets of entries into the largest and weights."""
        budgets = as_numbers("epsilon", self.epsilon)
        if budgets.min() < 0 or not budgets.any():
            expected = "budgets of at least 0, one of them above 0"
            raise InvalidArgumentError("epsilon", f"budgets from {budgets.min():g} to {budgets.max():g}", expected)
        object.__setattr__(self, "epsilon", float(budgets.max()))
        self._store("weights", budgets / budgets.max())

    def _take_bounds(self) -> None:
        """Take the outermost bounds, and those of entries as limits."""
        if len(self.bounds) != 2:
            raise InvalidArgumentError("bounds", f"{len(self.bounds)} arrays", "a pair (lowest, highest)")
        low, high = (as_numbers("bounds", one) for one in self.bounds)
        both = np.stack(np.broadcast_arrays(low, high)) if _fits(low, high) else np.zeros((2, 1))
        if not (both[0] < both[1]).all():
            raise InvalidArgumentError(
                "bounds",
                f"arrays of shapes {low.shape} and {high.shape}",
                "one shape, and lower bounds below the upper ones; entries that may not change are those of mask",
            )
        for pair in zip(*both.reshape(2, -1), strict=True):
            check_bounds(tuple(map(float, pair)))
        object.__setattr__(self, "bounds", (float(low.min()), float(high.max())))
        same = (low == low.min()).all() and (high == high.max()).all()
        self._store("limits", None if same else both)

    def __repr__(self) -> str:
        parts = {"norm": repr(self.norm), "epsilon": repr(self.epsilon), "bounds": repr(self.bounds)}
        parts |= {name: f"{entries.shape}" for name, entries in self._entries.items()}
        parts |= {} if self.levels is None else {"levels": repr(self.levels)}
        return f"ThreatModel({', '.join(f'{name}={text}' for name, text in parts.items())})"

    @property
    def _entries(self) -> dict[str, Entries]:
        given = {name: getattr(self, name) for name in ("mask", "kinds", "weights", "limits")}
        return {name: entries for name, entries in given.items() if entries is not None}

    @property
    def plain(self) -> bool:
        """True if norm, epsilon and bounds define it."""
        return not (self.restricted or self.discrete)

    @property
    def scalar(self) -> ThreatModel:
        """The threat model of norm, epsilon and bounds alone, which holds this one."""
        return self if self.plain else ThreatModel(norm=self.norm, epsilon=self.epsilon, bounds=self.bounds)

    @property
    def described(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return {"norm": self.norm, "epsilon": self.epsilon, "bounds": list(self.bounds), **self.of_entries}

    @property
    def of_entries(self) -> dict[str, Any]:
        """Return what norm, epsilon and bounds leave open, as plain values under one key; empty for nothing."""
        found: dict[str, Any] = {name: entries.to_dict() for name, entries in self._entries.items()}
        found |= {} if self.levels is None else {"levels": self.levels}
        return {"entries": found} if found else {}

    @property
    def width(self) -> float:
        """Distance between the bounds."""
        return self.bounds[1] - self.bounds[0]

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances ``(N,)`` in float64 between the rows of two batches ``(N, ...)``, in units of ``epsilon``.

        With weights each difference is divided by its entry's, less what float32 may have missed of the values.
        """
        first, second = a.detach().double(), b.detach().double()
        difference: Tensor = (first - second).flatten(1)
        if self.weights is not None:
            missed = _MISSED * torch.maximum(first.abs(), second.abs()).flatten(1)
            difference = (difference.abs() - missed).clamp_min(0) / self.scale(second).flatten(1)
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
        if self.weights is not None or self.limits is not None:
            self._check_entries()
            return
        least = 10 * _ROUNDING * self._scale(values)
        if self.epsilon < least:
            low, high = self.bounds
            unit = 10.0 ** (math.floor(math.log10(least)) - 1)  # Of two figures, rounded up
            raise InvalidArgumentError(
                "epsilon",
                self.epsilon,
                f"at least {math.ceil(least / unit) * unit:g} in {self.norm}: float32 rounds inputs of {values} values "
                f"in [{low:g}, {high:g}] by up to {least / 10:.2g}, which would decide what is within epsilon; take a "
                "larger epsilon, or bounds and inputs in smaller units",
            )

    def contains(self, candidates: Tensor, inputs: Tensor) -> Tensor:
        """Return a mask of candidates in the ball around their inputs, bool ``(N,)``, within :meth:`tolerance`."""
        limit = self.epsilon + self.tolerance(inputs[:1].numel())
        return self.distance(candidates, inputs) <= limit

    def _check_entries(self) -> None:
        """Raise where rounding of an entry is not small against its own budget."""
        limits = np.array(self.bounds)[:, None] if self.limits is None else self.limits.array
        weights = np.ones(1) if self.weights is None else self.weights.array
        free = np.ones(1, dtype=bool) if self.mask is None else self.mask.array
        largest, weights, free = np.broadcast_arrays(np.abs(limits).max(0), weights, free)
        short = free & (self.epsilon * weights < 10 * _ROUNDING * largest)
        if short.any():
            place = tuple(map(int, np.argwhere(short)[0]))
            raise InvalidArgumentError(
                "epsilon",
                f"{float(self.epsilon * weights[place]):g} for entry {place}",
                f"at least {10 * _ROUNDING * float(largest[place]):.2g} for values of up to {float(largest[place]):g}: "
                "float32 would decide what is within epsilon; fix the entry by mask, or take smaller units",
            )

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


def _fits(*arrays: NDArray[Any]) -> bool:
    try:
        np.broadcast_shapes(*(one.shape for one in arrays))
    except ValueError:
        return False
    return True


def _together(argument: str, one: NDArray[np.bool_], other: NDArray[np.bool_]) -> NDArray[np.bool_]:
    if not _fits(one, other):
        raise InvalidArgumentError(argument, f"shape {other.shape}", f"one that fits the budgets, {one.shape}")
    return np.logical_and(one, other)


def check_epsilon(epsilon: object, *, argument: str = "epsilon") -> float:
    """Return a budget as a float when it is above 0 and float32 can hold it."""
    return check_number(argument, epsilon, minimum=0, maximum=1e20, open_minimum=True)
