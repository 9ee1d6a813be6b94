"""Arrays with a value for each entry of an input, and what threat models make of them: masks, limits, valid values."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError

# Of steps of a grid: rounding may put a value of the grid so far off it, and a limit of the ball so far below it.
OFF_GRID, _SLACK = 1e-2, 1e-6
REAL, INTEGER, _FIRST_GROUP = 0, 1, 2


@dataclass(frozen=True)
class Entries:
    """An immutable array that broadcasts to one input, equal and hashed by its values."""

    dtype: str  # "bool", "float64" or "int16"
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, values: NDArray[Any]) -> Entries:
        """Copy an array."""
        return cls(values.dtype.name, values.shape, np.ascontiguousarray(values).tobytes())

    @property
    def array(self) -> NDArray[Any]:
        """The values, not to be changed."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    def spread(self, inputs: Tensor) -> Tensor:
        """The values of every entry, ``(1, *inputs.shape[1:])``, on the inputs' device."""
        values = torch.from_numpy(self.array.copy()).to(inputs.device)
        return values.expand(inputs.shape[1:])[None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, from which the array follows exactly; bools take a bit each.

        ``data`` is base64 of little-endian numbers, or of ``numpy.packbits`` for bools.
        """
        values = self.array
        raw = np.packbits(values) if self.dtype == "bool" else values.astype(values.dtype.newbyteorder("<"))
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data": base64.b64encode(raw.tobytes()).decode("ascii"),
        }


Values: TypeAlias = "ArrayLike | Tensor | Entries"
"""What threat models take for each entry."""


def is_array(value: object) -> bool:
    """Return whether a value is of entries: an array of at least one dimension, or a list of numbers."""
    return isinstance(value, (Entries, list)) or (hasattr(value, "__array__") and np.ndim(value) > 0)


def _as_array(value: object) -> NDArray[Any]:
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return value.array if isinstance(value, Entries) else np.asarray(value)


def as_numbers(argument: str, value: object) -> NDArray[np.float64]:
    """Return finite numbers as an array of float64."""
    try:
        found = np.array(_as_array(value), dtype=np.float64)
    except (TypeError, ValueError) as error:
        expected = "numbers, as an array that broadcasts to one input"
        raise InvalidArgumentError(argument, f"values of type {type(value).__name__}", expected) from error
    if not np.isfinite(found).all() or not found.size:
        raise InvalidArgumentError(argument, "NaN, infinite or no values", "finite numbers for each entry")
    return found


def as_mask(value: object) -> NDArray[np.bool_] | None:
    """Return which entries may change; None where all may."""
    found = _as_array(value)
    if found.dtype != bool and not (np.issubdtype(found.dtype, np.number) and np.isin(found, (0, 1)).all()):
        raise InvalidArgumentError("mask", f"dtype {found.dtype}", "bools, True where an entry may change")
    found = found.astype(bool)
    if not found.any():
        raise InvalidArgumentError("mask", "no True", "at least one entry that may change")
    return None if found.all() else found


def as_kinds(value: object) -> NDArray[np.int16] | None:
    """Return kinds as codes: real, integer, or the number of a one-hot group from 2 on; None where all are real."""
    words, groups = _as_array(value), dict[str, int]()
    expected = "'real', 'integer' or 'one-hot:NAME' for each entry, with the same NAME for the entries of one group"
    if isinstance(value, Entries):
        return words
    if words.dtype.kind != "U":
        raise InvalidArgumentError("kinds", f"dtype {words.dtype}", expected)
    codes = np.zeros(words.shape, dtype=np.int16)
    for place, word in np.ndenumerate(words):
        kind, _, name = str(word).partition(":")
        if word in ("real", "integer"):
            codes[place] = REAL if word == "real" else INTEGER
        elif kind == "one-hot" and name:
            codes[place] = groups.setdefault(name, _FIRST_GROUP + len(groups))
        else:
            raise InvalidArgumentError("kinds", repr(str(word)), expected)
    alone = [name for name, code in groups.items() if (codes == code).sum() < 2]
    if alone:
        raise InvalidArgumentError("kinds", f"one entry in group {alone[0]!r}", "at least two entries in each group")
    return codes if codes.any() else None


class EntryLimits:
    """Limits of single entries, for :class:`robust_ext.core.threat.ThreatModel`; tensors are ``(N, ...)``."""

    norm: str
    epsilon: float
    bounds: tuple[float, float]
    mask: Entries | None
    weights: Entries | None
    limits: Entries | None
    kinds: Entries | None
    levels: int | None

    @property
    def discrete(self) -> bool:
        """True if entries have to take values of a grid."""
        return self.levels is not None or self.kinds is not None

    @property
    def restricted(self) -> bool:
        """True if limits differ between entries."""
        return self.mask is not None or self.weights is not None or self.limits is not None

    def scale(self, inputs: Tensor) -> Tensor:
        """The budget of each entry relative to epsilon, in (0, 1], float64 ``(1, ...)``."""
        if self.weights is None:
            return torch.ones((1, *inputs.shape[1:]), dtype=torch.float64, device=inputs.device)
        return self.weights.spread(inputs)

    def box(self, inputs: Tensor, *, ball: bool = False) -> tuple[Tensor, Tensor]:
        """Lowest and highest values around inputs, of their shape and dtype; fixed entries have those of the inputs.

        With ``ball``, also those at which one entry alone uses up the budget.
        """
        x = inputs.double()
        if self.limits is None:
            low, high = (torch.full_like(x[:1], bound) for bound in self.bounds)
        else:
            low, high = (Entries.of(one).spread(x) for one in self.limits.array)
        if ball:
            reach = self.epsilon * self.scale(x)
            low, high = torch.maximum(low, x - reach), torch.minimum(high, x + reach)
        if self.mask is not None:
            free = self.mask.spread(x)
            low, high = torch.where(free, low, x), torch.where(free, high, x)
        return low.expand_as(x).to(inputs.dtype), high.expand_as(x).to(inputs.dtype)

    def check_samples(self, inputs: Tensor, *, argument: str = "inputs") -> None:
        """Raise InvalidArgumentError where samples ``(N, ...)`` do not have the shape, limits or values of entries."""
        shape = tuple(inputs.shape[1:])
        given = {"mask": self.mask, "epsilon": self.weights, "kinds": self.kinds, "bounds": self.limits}
        for name, entries in given.items():
            own = () if entries is None else entries.shape[1:] if name == "bounds" else entries.shape
            if len(own) > len(shape) or any(
                one not in (1, size) for one, size in zip(own[::-1], shape[::-1], strict=False)
            ):
                raise InvalidArgumentError(name, f"shape {own}", f"one that broadcasts to one input, {shape}")
        if not len(inputs):
            return
        low, high = self.box(inputs)
        slack = 1e-6 * torch.maximum(low.abs(), high.abs())
        outside = ((inputs < low - slack) | (inputs > high + slack)).flatten(1).any(0).nonzero().flatten()
        if len(outside):
            first = np.unravel_index(int(outside[0]), shape)
            raise InvalidArgumentError(
                argument,
                f"values outside the bounds of {len(outside)} entries, the first at {tuple(map(int, first))}",
                "values in the bounds of each entry",
            )
        if self.discrete:
            self._check_values(inputs, argument)

    def _check_values(self, inputs: Tensor, argument: str) -> None:
        origin, step = self.grid(inputs)
        off = ((inputs - origin) / step.where(step > 0, torch.inf)).flatten(1)
        if bool(((off - off.round()).abs() > OFF_GRID).any()):
            kind = "integers, or for levels on the grid between the bounds; round them first"
            raise InvalidArgumentError(argument, "values off the grid", f"entries that are {kind}")
        for group in self.groups(inputs):
            found = inputs.flatten(1)[:, group]
            if not bool(((found == 1).sum(1).eq(1) & (found == 0).sum(1).eq(len(group) - 1)).all()):
                raise InvalidArgumentError(argument, "a one-hot group without a single 1", "one 1 beside zeros in each")

    def snap(self, points: Tensor, inputs: Tensor, *, inward: bool = False) -> Tensor:
        """Move points to valid values in the ball of their inputs; unchanged where no entry is discrete.

        Discrete entries are rounded, as far as budget and limits allow, one-hot groups to their largest entry. In l2
        and l1 entries are rounded towards the input at first, and away from it while the budget lasts, those nearest to
        the next value first. ``inward`` rounds all towards the input. Points that continuous entries put outside the
        ball stay outside.
        """
        if not self.discrete:
            return points
        x, p = inputs.double().flatten(1), points.double().flatten(1)
        origin, step = (one.flatten(1) for one in self.grid(inputs))
        low, high = (one.double().flatten(1) for one in self.box(inputs))
        weight, order = self.scale(inputs).flatten(1), {"linf": None, "l2": 2, "l1": 1}[self.norm]
        grid = step > 0
        unit = step.where(grid, 1.0)
        # In steps from the input.
        reach = (self.epsilon * weight / unit + _SLACK).floor()
        up = torch.minimum(((high - x) / unit + _SLACK).floor(), reach).clamp_min(0)
        down = torch.minimum(((x - low) / unit + _SLACK).floor(), reach).clamp_min(0)
        moved = ((p - x) / unit).nan_to_num(0.0)
        near = torch.minimum(torch.maximum(moved.trunc() if inward or order else moved.round(), -down), up)
        left = torch.full_like(x[:, :1], torch.inf)
        groups = self.groups(inputs)
        if order is not None:
            plain = torch.ones_like(grid)
            for group in groups:
                plain[:, group] = False
            used = torch.where(grid, near * unit, p - x) / weight
            left = self.epsilon**order * (1 + _SLACK) - (used.abs() ** order * plain).sum(1, keepdim=True)
        found = torch.where(grid, (origin + ((x - origin) / unit).round() * unit + near * unit), p)
        found = torch.where(grid & (near == 0), x, found)
        for group in groups:
            left = self._choose(found, x, p, group, (low < high) & (reach >= 1), weight, order, left)
        if order is not None and not inward:
            signs = moved.sign()
            cost = ((near.abs() + 1) ** order - near.abs() ** order) * (unit / weight) ** order
            room = torch.where(signs > 0, up, down) > near.abs()
            rest = torch.where(grid & plain & room, (moved - near).abs(), 0.0)
            ranked = rest.sort(stable=True, dim=1, descending=True)
            taken = (cost.expand_as(rest).gather(1, ranked.indices).cumsum(1) <= left) & (ranked.values >= 0.5)
            further = torch.zeros_like(taken).scatter(1, ranked.indices, taken)
            found = torch.where(further, origin + ((x - origin) / unit).round() * unit + (near + signs) * unit, found)
        return found.view(points.shape).to(points.dtype)

    def _choose(
        self,
        found: Tensor,
        x: Tensor,
        p: Tensor,
        group: Tensor,
        free: Tensor,
        weight: Tensor,
        order: int | None,
        left: Tensor,
    ) -> Tensor:
        """Write a one-hot group of each row into ``found``; returns the budget that is left, ``(N, 1)``."""
        clean = x[:, group]
        now = clean.argmax(1, keepdim=True)
        mutable = free[:, group].expand_as(clean)
        allowed = (mutable & mutable.gather(1, now)).scatter(1, now, True)
        if order is not None:
            price = weight[:, group].expand_as(clean) ** -order
            price = (price + price.gather(1, now)).scatter(1, now, 0.0)
            allowed &= (price <= left).scatter(1, now, True)
        chosen = p[:, group].masked_fill(~allowed, -torch.inf).argmax(1, keepdim=True)
        found[:, group] = torch.zeros_like(clean).scatter(1, chosen, 1.0)
        return left if order is None else left - price.gather(1, chosen)

    def grid(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """First value and step of each entry's grid, float64 ``(1, ...)``; the step is 0 where there is none."""
        sample = inputs[:1].double()
        low, high = (torch.full_like(sample, bound) for bound in self.bounds)
        if self.limits is not None:
            low, high = (Entries.of(one).spread(sample) for one in self.limits.array)
        step = torch.zeros_like(low) if self.levels is None else (high - low) / (self.levels - 1)
        if self.kinds is not None:
            codes = self.kinds.spread(sample)
            step = torch.where(codes == REAL, step, (codes == INTEGER).double())
            low = torch.where(codes == REAL, low, 0.0)
        return low, step

    def groups(self, inputs: Tensor) -> Sequence[Tensor]:
        """Places of the entries of each one-hot group, among the flattened entries."""
        if self.kinds is None:
            return []
        codes = self.kinds.spread(inputs).flatten()
        last = int(self.kinds.array.max())
        return [(codes == code).nonzero().flatten() for code in range(_FIRST_GROUP, last + 1)]
