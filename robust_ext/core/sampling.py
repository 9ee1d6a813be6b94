"""Random points in and on the ball of a threat model, from counted keys.

Sources: Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), equation 1 and
appendices A.2 and B, for inner and boundary points; they treat linf only, the l2 and l1 forms are this project's.

A point depends on the sample, the key and the point's index alone, and its bits on neither the device nor what else is
drawn: numbers are counted (:mod:`robust_ext.core.random`); elementwise operations are those that IEEE 754 rounds
correctly (sums, differences, products, quotients of tensors, square roots, conversions), each a kernel of its own, so
that none is contracted with the next; sums are of whole numbers, exact in any order. None of them waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from robust_ext.core.entries import EntryLimits
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import CountedRows
from robust_ext.core.validation import check_number

# A budget in whole parts, of which what values take up is summed.
_BUDGET = 2**40


Bound: TypeAlias = "float | Tensor"


class Ball:
    """Random displacements in a ball, from samples float64 ``(B, 1, D)``.

    ``bounds`` are numbers or tensors of the samples' shape; ``free`` is 1 for entries that may move and 0 for others.
    """

    def __init__(self, norm: str, epsilon: float, bounds: tuple[Bound, Bound], free: Tensor | None = None) -> None:
        self.norm, self.epsilon, self.bounds, self._free = norm, epsilon, bounds, free

    def inner(self, base: Tensor, rows: CountedRows, radius: float) -> Tensor:
        """See :meth:`BallSampling.sample_inner`; displacements ``(B, n, D)`` before they are clipped."""
        size, reach = base.shape[-1], radius * self.epsilon
        if self.norm == "linf":
            return rows.centred(size).float().mul_(reach * 2.0**-23)
        if self.norm == "l2":
            # D of D + 2 coordinates of a point uniform on the sphere are uniform in the ball (Barthe et al. 2005).
            drawn = self._where_free(rows.normals(size + 2))
            length = drawn.double().square_().sum(-1, keepdim=True).sqrt_()
        else:
            # D + 1 exponentials divided by their sum are uniform on the simplex; dropping one makes them uniform in it.
            drawn = self._where_free(rows.laplaces(size + 1))
            length = drawn.double().abs_().sum(-1, keepdim=True)
        return drawn[..., :size] * length.reciprocal_().mul_(reach).float()

    def _where_free(self, drawn: Tensor) -> Tensor:
        """Take fixed entries out of a norm; those beyond the entries of a sample stay."""
        if self._free is not None:
            drawn[..., : self._free.shape[-1]] *= self._free
        return drawn

    def surface(self, base: Tensor, rows: CountedRows) -> Tensor:
        """See :meth:`BallSampling.sample_surface`."""
        size = base.shape[-1]
        if self.norm == "linf":
            return self._stretched_cube(base, rows.centred(size).double())
        drawn = rows.normals(size) if self.norm == "l2" else rows.laplaces(size)
        return self._stretched(base, drawn.double(), self.epsilon)

    def corners(self, base: Tensor, rows: CountedRows, radius: float) -> Tensor:
        """See :meth:`BallSampling.sample_corners`."""
        size, reach = base.shape[-1], radius * self.epsilon
        if self.norm == "l1":
            return self._vertices(base, rows, reach)
        if self.norm == "l2":
            return self._stretched(base, rows.signs(size).double(), reach)
        if radius < 1:
            return rows.below(self._rising(base, radius)).float().mul_(2 * reach).sub_(reach)
        return rows.signs(size).mul_(reach)

    def _rising(self, base: Tensor, radius: float) -> Tensor:
        """Chances in 2**24, int32 ``(B, 1, D)``, that each value goes up in :meth:`sample_corners` of a smaller radius.

        With room for ``u`` up and ``d`` down at epsilon, and ``u_r``, ``d_r`` at ``radius`` x epsilon, the mean
        displacement ``p u_r - (1 - p) d_r`` is to be that of a fair coin at epsilon, ``(u - d) / 2``. It is half where
        nothing is clipped, and ``1 / (2 radius)`` away from a bound that the value lies at.
        """
        up, down = (self.bounds[1] - base).clamp_min_(0), (base - self.bounds[0]).clamp_min_(0)
        (u, d), (u_r, d_r) = (
            (up.clamp_max(size), down.clamp_max(size)) for size in (self.epsilon, radius * self.epsilon)
        )
        chances = ((u - d) * 0.5 + d_r) / (u_r + d_r)
        if self._free is not None:
            chances.nan_to_num_(0.5)  # Without any room
        return chances.clamp_(0, 1).mul_(2.0**24).round_().int()

    def _room(self, base: Tensor, d: Tensor) -> Tensor:
        """Return the room of each value along ``d`` before it meets a bound, float64 ``(B, n, D)``.

        As products and a maximum, of which at most one is above 0: choosing by a random mask takes a CPU longer.
        """
        up, down = (self.bounds[1] - base).clamp_min_(0), (base - self.bounds[0]).clamp_min_(0)
        signs = d.sign()
        return torch.maximum(signs * up, signs * -down).abs_()

    def _vertices(self, base: Tensor, rows: CountedRows, reach: float) -> Tensor:
        size = base.shape[-1]
        signs = rows.signs(size)
        order = _order(rows.words(size, skip=size).long().bitwise_left_shift_(32))
        room = self._room(base, signs)
        whole = _parts(room, reach)
        ordered = whole.gather(-1, order)
        before = ordered.cumsum(-1).sub_(ordered)
        taken = torch.minimum(ordered, (_BUDGET - before).clamp_min_(0))
        taken = torch.zeros_like(whole).scatter_(-1, order, taken)
        return torch.where(taken < whole, taken.double().mul_(reach / _BUDGET), room.clamp_max(reach)).mul_(signs)

    def _stretched_cube(self, base: Tensor, d: Tensor) -> Tensor:
        """Scale directions so that clipped points lie at distance epsilon in linf, as far as the bounds allow."""
        room, size = self._room(base, d), d.abs()
        # Values with less room than epsilon stop at their bound; the largest of the others decides the scale.
        free = torch.where(room >= self.epsilon, size, 0.0).amax(-1, keepdim=True)
        scale = torch.where(free == 0, 1e300, free.clamp_min(1).reciprocal_().mul_(self.epsilon))
        return torch.minimum(size * scale, room).clamp_max_(self.epsilon).mul_(d.sign())

    def _stretched(self, base: Tensor, d: Tensor, reach: float) -> Tensor:
        """Scale directions so that clipped points lie at distance ``reach`` in l2 or l1, as far as the bounds allow.

        ``d`` are whole numbers other than 0. ``sum(min(s * weight, limit))`` grows with ``s`` in straight pieces, which
        meet where a value gets to its limit: at the sorted ``limit / weight``. What is left of the budget there for the
        values that have not got to theirs decides ``s``.
        """
        room, size = self._room(base, d), d.abs()
        weight, limit, budget = (size.square(), room.square(), reach**2) if self.norm == "l2" else (size, room, reach)
        ends = limit / weight
        order = _order(ends.view(torch.int64))
        ends, none = ends.gather(-1, order), torch.zeros_like(order[..., :1])
        used = torch.cat([none, _parts(limit, budget).gather(-1, order).cumsum(-1)], -1)
        ahead = torch.cat([none, weight.long().gather(-1, order).cumsum(-1)], -1)
        ahead = ahead[..., -1:] - ahead
        unused = (_BUDGET - used).double().mul_(budget / _BUDGET)
        at = (ends * ahead[..., :-1] < unused[..., :-1]).sum(-1, keepdim=True)
        left = ahead.gather(-1, at)
        scale = torch.where(left == 0, torch.inf, unused.gather(-1, at) / left)
        # Not below the last end that was passed, where rounding decided which one that is.
        scale = scale.maximum(torch.cat([none, ends], -1).gather(-1, at))
        moved = weight * scale
        return torch.minimum(moved.sqrt_() if self.norm == "l2" else moved, room).mul_(d.sign())


class BallSampling(EntryLimits):
    """Random points of a ball, for :class:`robust_ext.core.threat.ThreatModel`.

    Where entries have limits of their own, points are drawn among the entries that may change, in units of their
    budgets, and rounded where entries are discrete: inner points towards the sample.
    """

    def sample_inner(
        self, x: Tensor, count: int, *, key: int | Sequence[int], start: int = 0, radius: float = 1.0
    ) -> Tensor:
        """Points uniform in the ball of ``radius`` x epsilon, then clipped to the bounds.

        Args:
            x: One sample of any shape, or with several keys a batch ``(B, ...)``.
            count: Number of points around each sample.
            key: A whole number in [0, 2**64), usually of :func:`robust_ext.core.random.derive_seed`; or one a sample.
            start: Index of the first point: points 5 to 9 are the same when they are drawn alone.
            radius: Relative radius, in (0, 1]; the paper's gap of .05 is a radius of .95 (appendix B).

        Returns:
            float32 ``(count, *x.shape)`` on the device of ``x``; with several keys ``(B, count, ...)``.

        Example:
            >>> from robust_ext import ThreatModel
            >>> ball, x = ThreatModel(norm="l2", epsilon=0.5), torch.full((3,), 0.5)
            >>> torch.equal(ball.sample_inner(x, 9, key=1)[5:], ball.sample_inner(x, 4, key=1, start=5))
            True
        """
        share = _share(radius)
        return self._points(x, count, key, start, lambda ball, base, rows: ball.inner(base, rows, share), inward=True)

    def sample_surface(self, x: Tensor, count: int, *, key: int | Sequence[int], start: int = 0) -> Tensor:
        """Random points at distance epsilon, inside the bounds.

        A direction is drawn (linf: uniform in the cube, l2: normal, l1: Laplace) and stretched until the *clipped*
        point lies at distance epsilon; where the bounds leave no room for that, the point goes as far as they allow.

        Arguments and points are those of :meth:`sample_inner`.
        """
        return self._points(x, count, key, start, Ball.surface)

    def sample_corners(
        self, x: Tensor, count: int, *, key: int | Sequence[int], start: int = 0, radius: float = 1.0
    ) -> Tensor:
        """Random extreme points: the hardest places to plant an adversarial example (section 4.3, appendix B).

        linf: corners of the cube, every value moved by epsilon up or down. l2: the points of the sphere in these
        directions. l1: vertices of ball and bounds together, one value after another moved as far as it can go until
        the budget is used up. All are clipped to the bounds, and lie at distance epsilon where the bounds leave room.

        With a smaller ``radius`` they are those of the ball of ``radius`` x epsilon. In linf they are balanced there: a
        value near a bound goes away from it so much more often that the mean of the clipped points is that of the
        corners at epsilon, which their mean does not tell apart from these.

        Arguments and points are those of :meth:`sample_inner`.
        """
        share = _share(radius)
        return self._points(
            x, count, key, start, lambda ball, base, rows: ball.corners(base, rows, share), inward=share < 1
        )

    def _points(
        self,
        x: Tensor,
        count: int,
        key: int | Sequence[int],
        start: int,
        moved: Callable[[Ball, Tensor, CountedRows], Tensor],
        *,
        inward: bool = False,
    ) -> Tensor:
        """Points ``x + d`` in the bounds, of the displacements of all B samples, float64 ``(B, 1, D)``."""
        keys, batch = (key, x) if isinstance(key, Sequence) else ([key], x[None])
        if len(keys) != len(batch):
            raise InvalidArgumentError("key", f"{len(keys)} keys", f"one for each of the {len(batch)} samples")
        base = batch.detach().reshape(len(batch), 1, math.prod(batch.shape[1:]))
        rows = CountedRows(keys, count, start=start, device=x.device)
        if self.restricted:
            points = self._among_entries(batch.detach(), rows, moved)
        else:
            d = moved(Ball(self.norm, self.epsilon, self.bounds), base.double(), rows).float()
            points = d.add_(base.float()).clamp_(*self.bounds)
        points = points.reshape(len(batch), count, *batch.shape[1:])
        if self.discrete:
            every = batch[:, None].expand_as(points).flatten(0, 1)
            points = self.snap(points.flatten(0, 1), every, inward=inward).view_as(points)
        return points if isinstance(key, Sequence) else points[0]

    def _among_entries(
        self, batch: Tensor, rows: CountedRows, moved: Callable[[Ball, Tensor, CountedRows], Tensor]
    ) -> Tensor:
        """Points ``(B, n, D)`` drawn in units of the entries' budgets."""
        x = batch.double().flatten(1)[:, None]
        low, high = (one.flatten(1)[:, None] for one in self.box(batch.double()))
        scale = self.scale(batch).flatten(1)[:, None]
        free = None if self.mask is None else self.mask.spread(batch).flatten(1)[:, None].float()
        ball = Ball(self.norm, self.epsilon, (low / scale, high / scale), free)
        d = moved(ball, x / scale, rows).double() * scale
        return torch.minimum(torch.maximum(x + d, low), high).float()


def _share(radius: float) -> float:
    return check_number("radius", radius, minimum=0, maximum=1, open_minimum=True)


def _parts(limit: Tensor, budget: float) -> Tensor:
    """Limits in parts of the budget, at most all of them, int64: their sums are exact."""
    return (limit * (_BUDGET / budget)).clamp_max_(_BUDGET).round_().long()


def _order(keys: Tensor) -> Tensor:
    """Indices that sort int64 keys, equal ones by index, up to the lowest bits, as many as an index has.

    The index takes their place. So all keys differ, and any way of sorting finds the same order.
    """
    size = keys.shape[-1]
    lowest = 2 ** (size - 1).bit_length() - 1
    keys = (keys & ~lowest) | torch.arange(size, device=keys.device)
    if keys.device.type == "cpu":
        # Of numbers alone, by vector instructions: PyTorch takes 17 times as long, since it moves indices too.
        keys.numpy().sort(axis=-1)
    else:
        keys = keys.sort(dim=-1).values
    return keys.bitwise_and_(lowest)


def evenly_mixed(
    share: float, count: int, start: int, first: Callable[[int, int], Tensor], second: Callable[[int, int], Tensor]
) -> Tensor:
    """Points ``start`` to ``start + count`` of two kinds, ``(B, count, ...)``, the first kind being ``share`` of them.

    Of the first n points, from 0 on, ``floor(n * share)`` are of the first kind, for any blocks.
    A kind is drawn by a function of the number of points and the index, among its own, of the first of them.
    """
    if share in (0, 1):
        return (first if share else second)(count, start)
    before, after = math.floor(start * share), math.floor((start + count) * share)
    drawn = torch.cat([first(after - before, before), second(count - after + before, start - before)], 1)
    place = torch.arange(count + 1, device=drawn.device)
    upto = (place + start).double().mul_(share).floor_().long() - before
    order = torch.where(upto.diff() > 0, upto[:-1], (after - before) + place[:-1] - upto[:-1])
    return drawn.index_select(1, order)
