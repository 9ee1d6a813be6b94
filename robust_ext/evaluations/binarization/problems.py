"""Binarized problems: points are drawn and measured, readouts fitted, and classifiers made of them.

Zimmermann et al. 2022, algorithm 1: inner and boundary points of each sample go through the features; a readout
separates them; its bias is placed by the closeness kappa, and its logits are scaled to the network's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.random import derive_seed
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.points import draw_candidates, draw_inner, farthest
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.readouts import Readout
from robust_ext.models.readouts.base import check_logits, fitted
from robust_ext.models.readouts.majority import Majority

# Float64 copies of the features that are solved together stay below this many bytes.
_SOLVE_BYTES = 256 * 2**20
# By how much float32 features differ between batches and copies of a network, as a share of their size (up to three
# roundings of each were measured); and how far in reach the boundary that candidates are judged by may move for it.
_ROUNDING, _MOST_TOLERANCE = 2.0**-21, 5e-4
# Inner points of a sample that are drawn at once: as many as are sent through the network at once, but no fewer.
_BLOCK = 64


@dataclass(frozen=True)
class Measured:
    """Features of the drawn points of B samples, next to what :class:`Problems` keep of them."""

    samples: tuple[int, ...]
    inputs: Tensor
    planted: Tensor
    references: Tensor
    features: Tensor  # (B, 1 + N_i + N_b + N_r, *F): the clean sample, inner points, planted points, references.
    # Of a random model: of further draws of the planted points, (B, N_b, R, *F); where rows are defended together, of
    # each planted point next to clean samples.
    again: Tensor | None = None


@dataclass(frozen=True)
class Problems:
    """B fitted problems, with scores in float64, see :class:`robust_ext.models.readouts.Readout`."""

    samples: tuple[int, ...]  # Ids.
    inputs: Tensor  # Clean samples (B, ...).
    planted: Tensor  # (B, N_b, ...).
    references: Tensor  # Points of class 1 outside the ball, (B, N_r, ...).
    readout: Readout
    parameters: Mapping[str, Tensor]  # Of the readout, each (B, ...).
    edge: Tensor  # Score of the planted point closest to inner ones, (B,).
    gap: Tensor  # How far above the score of the closest inner point that is, (B,); above 0 when separable.
    lowest: Tensor  # Lowest and highest score of any point, (B,), from the edge.
    highest: Tensor
    logit_low: Tensor  # Lowest and highest logit of the original network on these points, float64 (B,).
    logit_high: Tensor
    rounding: Tensor  # By how much float32 features leave a score open at the boundary, (B,).

    @property
    def separable(self) -> Tensor:
        """True if a readout separates the points, bool ``(B,)``."""
        return self.gap > 0

    @property
    def tolerance(self) -> Tensor:
        """The shortfall from the boundary, in reach, at which a candidate still counts, float64 ``(B,)``.

        The nearest adversarial point lies on the boundary, and float32 decides on which side of it a candidate comes
        out. It is a few roundings of the features; no more than half of what lies between the boundary and the planted
        point by default.
        """
        return (self.rounding / self.gap).clamp(0, _MOST_TOLERANCE)

    def reach(self, features: Tensor, index: Tensor | Sequence[int]) -> Tensor:
        """Return the reach of features ``(M, *F)`` of problems ``index`` towards the planted points, float64 ``(M,)``.

        It is 0 at the closest inner point and 1 at the closest planted one, by the score. A point is adversarial
        exactly where its reach is above the boundary's position, so it is also the largest kappa at which it would be.
        """
        index = torch.as_tensor(index, device=self.edge.device)
        # Some readouts have many parameters, which every row gets a copy of.
        size = sum(part[:1].numel() for part in self.parameters.values())
        step = max(1, _SOLVE_BYTES // (8 * max(size, 1)))
        scores = [
            self.readout.score(rows, {name: part[own] for name, part in self.parameters.items()})
            for rows, own in zip(torch.split(features, step), torch.split(index, step), strict=True)
        ]
        return 1 + (torch.cat(scores) - self.edge[index]) / self.gap[index]

    def select(self, rows: Sequence[int]) -> Problems:
        """Some of the problems, in this order."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.inputs.device)
        return self._of(tuple(self.samples[i] for i in rows), [self], lambda parts: parts[0][index])

    @staticmethod
    def join(parts: Sequence[Problems]) -> Problems:
        """The problems of several batches, at least one, as one."""
        return parts[0]._of(tuple(sample for part in parts for sample in part.samples), parts, torch.cat)

    def _of(
        self, samples: tuple[int, ...], given: Sequence[Problems], made: Callable[[list[Tensor]], Tensor]
    ) -> Problems:
        """Problems each of whose columns is made of those of the given problems."""
        columns: dict[str, Any] = {name: made([getattr(one, name) for one in given]) for name in _COLUMNS}
        parameters = {name: made([one.parameters[name] for one in given]) for name in self.parameters}
        return Problems(samples=samples, readout=self.readout, parameters=parameters, **columns)

    def classifier(
        self,
        features: nn.Module,
        settings: BinarizationSettings,
        *,
        depth: float | None = None,
        batching: str = "any",
        judge: bool = False,
    ) -> BinarizedClassifier:
        """The binarized classifier with its boundary where the settings place it, or at a depth beyond.

        ``features`` are the model's. With ``judge``, it is the one that candidates are judged by: its boundary lies by
        the :attr:`tolerance` farther in, and of a random model it decides by the majority over several draws, where
        attacks are shown single ones.
        """
        kind = self.readout if judge else self.readout.shown
        if judge:
            features = kind.measured(features, seed=derive_seed(settings.seed_of_judge, "judged"))
        position = settings.boundary_position if depth is None else depth
        boundary = -(1 - position) * self.gap
        largest = torch.maximum((self.lowest - boundary).abs(), (self.highest - boundary).abs())
        if settings.logit_scale == "original":
            spread, offset = (self.logit_high - self.logit_low) / 2, (self.logit_high + self.logit_low) / 2
        else:
            spread, offset = torch.ones_like(largest), torch.zeros_like(largest)
        return BinarizedClassifier(
            features,
            references=self.inputs,
            threshold=self.edge + boundary - (self.tolerance * self.gap if judge else 0),
            scale=spread / largest.clamp_min(torch.finfo(torch.float64).tiny),
            offset=offset,
            readout=kind,
            batching=batching,
            norm=settings.threat_model.norm,
            **self.parameters,
        )


_COLUMNS = tuple(entry.name for entry in fields(Problems) if entry.type == "Tensor")


def measure(
    forward: Forward,
    inputs: Tensor,
    samples: Sequence[int],
    settings: BinarizationSettings,
    *,
    candidates: Sequence[Tensor] | None = None,
    references: Tensor | None = None,
) -> Measured:
    """Draw the points of each sample ``(B, ...)``, send them through the features, and choose the planted points.

    Ids and seed decide every draw. May be given: of each sample the points ``(n, ...)``, at least N_b, among which what
    is planted is chosen, and ``references`` ``(B, N_r, ...)``.
    """
    if references is None:
        references = inputs[:, None][:, :0]
    # As many samples at once as fill a batch; those of a detector have different numbers of candidates.
    total = 1 + settings.inner_points + settings.boundary_points * settings.planted_candidates + references.shape[1]
    step = len(samples) if forward.together else max(1, forward.rows // total)
    step = step if candidates is None else 1
    parts = []
    for start in range(0, len(samples), step):
        some = slice(start, start + step)
        given = None if candidates is None else candidates[start][None]
        parts.append(_measured(forward, inputs[some], samples[some], settings, given, references[some]))
    planted, features = (torch.cat(column) for column in zip(*parts, strict=True))
    again = None
    if settings.draws > 1:
        batches = [planted] if forward.together else torch.split(planted, 1)
        again = torch.cat([_further_draws(forward, points) for points in batches])
    elif forward.together:
        again = torch.stack([forward(points) for points in planted])[:, :, None]
    return Measured(tuple(samples), inputs, planted, references, features, again)


def _measured(
    forward: Forward,
    inputs: Tensor,
    samples: Sequence[int],
    settings: BinarizationSettings,
    candidates: Tensor | None,
    references: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return planted points ``(B, N_b, ...)`` of some samples, and the features of all points, see :class:`Measured`.

    Nothing here waits for the device.
    """
    if candidates is None:
        candidates = draw_candidates(inputs, samples, settings)

    def features(*points: Tensor) -> Tensor:
        return forward.of_points(torch.cat(points, 1))

    # Block by block, so that large images and many points do not fill the memory; what is left joins the last.
    count, size = settings.inner_points, max(_BLOCK, forward.rows)
    starts = range(0, count, size)
    blocks = (draw_inner(inputs, samples, settings, min(size, count - start), start=start) for start in starts)
    rows = [features(next(blocks)) for _ in starts[1:]]
    rest = features(next(blocks), inputs[:, None], candidates, references)
    sizes = [rest.shape[1] - 1 - candidates.shape[1] - references.shape[1], 1, candidates.shape[1], references.shape[1]]
    last, clean, far, further = torch.split(rest, sizes, 1)
    inner = torch.cat([clean, *rows, last], 1)
    # Of a random model, by the means over its draws: one far draw does not make a point far.
    means = (inner, far) if settings.draws == 1 else (inner.mean(2), far.mean(2))
    chosen = farthest(*means, settings.boundary_points)
    own = torch.arange(len(inputs), device=inputs.device)[:, None]
    planted, outer = candidates[own, chosen], far[own, chosen]
    if forward.together:
        # The chosen ones have not been in one batch yet.
        outer = forward.of_points(planted)
    return planted, torch.cat([inner, outer, further], 1)


def _further_draws(forward: Forward, points: Tensor) -> Tensor:
    """Features ``(B, n, 7 draws, *F)`` of points ``(B, n, ...)`` of a random model."""
    found = list[Tensor]()
    for copies in (1, 2, 4):
        # Every batch draws again.
        features = forward.of_points(points.repeat(1, copies, *[1] * (points.dim() - 2)))
        found += features.view(len(points), copies, -1, *features.shape[2:]).unbind(1)
    return torch.cat(found, 2)


def fit(
    measured: Measured, readout: nn.Module, settings: BinarizationSettings, *, inner_points: int | None = None
) -> Problems:
    """Fit the readouts of measured samples, with the first ``inner_points`` alone where that many are given.

    The network's own readout gives the range of its logits.
    """
    kind = settings.fitting
    samples, total, *shape = measured.features.shape
    kind.check(tuple(shape))
    outer = measured.planted.shape[1] + measured.references.shape[1]
    last = total - outer if inner_points is None else 1 + inner_points
    first, count = last + measured.planted.shape[1], last + outer
    classes = torch.arange(count, device=measured.features.device) >= last
    step = max(1, _SOLVE_BYTES // (8 * count * max(math.prod(shape), 1)))
    parts: list[Problems] = []
    for start in range(0, max(samples, 1), step):
        some = slice(start, start + step)
        rows = measured.features[some]
        # A copy in any case: a readout may change its input.
        rows = torch.cat([rows[:, :last], rows[:, total - outer :]], 1)
        parameters, scores = fitted(kind, rows, classes)
        # From what lies in the ball alone: a boundary that heeds the references too would leave out the planted points.
        certain = scores[:, last:first]
        if measured.again is not None:
            again = measured.again[some]
            lasting = kind.lasting if isinstance(kind, Majority) else partial(_beside_others, kind, certain)
            certain = lasting(again, parameters)
        edge = certain.amin(1)
        gap, lowest, highest = edge - scores[:, :last].amax(1), scores.amin(1) - edge, scores.amax(1) - edge
        check_logits(kind, rows, parameters, scores, edge - (1 - settings.boundary_position) * gap, gap)
        parameters, edge = kind.anchored(parameters, edge)
        with torch.no_grad():
            # With draws, each point has several logits.
            logits = readout(rows.flatten(0, 1 if kind.shown is kind else 2)).double().view(len(rows), -1)
        points = measured.inputs[some], measured.planted[some], measured.references[some]
        rounding = _rounding(kind, rows[:, last:first], parameters)
        columns = edge, gap, lowest, highest, logits.amin(1), logits.amax(1), rounding
        parts.append(Problems(measured.samples[some], *points, kind, parameters, *columns))
    return Problems.join(parts)


def _beside_others(kind: Readout, scores: Tensor, features: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Lower the scores ``(B, n)`` of planted points to those of their features ``(B, n, R, *F)`` next to other rows."""
    others = kind.scores(features.flatten(1, 2), parameters).view(features.shape[:3])
    return torch.minimum(scores, others.amin(2))


def _rounding(kind: Readout, features: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Bound the effect of rounding of planted points' features ``(B, n, *F)`` on their scores, float64 ``(B,)``.

    Each feature is off by a share of its size, and the score by the sum of what each does to it.
    """
    with torch.enable_grad():
        points = features.detach().clone().requires_grad_(True)
        scores = kind.scores(points, parameters)
        if not scores.requires_grad:
            return scores.new_zeros(len(features), dtype=torch.float64)
        (slopes,) = torch.autograd.grad(scores.sum(), points)
    return _ROUNDING * (slopes * points).detach().double().abs().flatten(2).sum(2).amax(1).nan_to_num(0, 0, 0)
