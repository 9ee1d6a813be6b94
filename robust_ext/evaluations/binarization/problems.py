"""Binarized problems: points are drawn and measured, readouts fitted, and classifiers made of them.

Zimmermann et al. 2022, algorithm 1: inner and boundary points of each sample go through the features; a linear
readout separates them; its bias is placed by the closeness kappa, and its logits are scaled to the network's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor, nn

from robust_ext.core.random import stream
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.readouts import fit_directions

# Float64 copies of the features that are solved together stay below this many bytes.
_SOLVE_BYTES = 256 * 2**20
# Points are drawn in blocks with a stream of their own, so that the first n do not depend on how many follow.
_BLOCK = 256


@dataclass(frozen=True)
class Measured:
    """Features of the drawn points of B samples, beside what :class:`Problems` keep of them."""

    samples: tuple[int, ...]
    inputs: Tensor
    planted: Tensor
    references: Tensor
    features: Tensor  # (B, 1 + N_i + N_b + N_r, F): the clean sample, inner points, planted points, references.


@dataclass(frozen=True)
class Problems:
    """B fitted problems. Positions along a direction, float64, count from the planted point closest to inner ones."""

    samples: tuple[int, ...]  # Ids.
    inputs: Tensor  # Clean samples (B, ...).
    planted: Tensor  # (B, N_b, ...).
    references: Tensor  # Points of class 1 outside the ball, (B, N_r, ...).
    weight: Tensor  # Unit directions, float64 (B, F).
    anchor: Tensor  # Where that closest planted point lies along the direction from the clean sample, float64 (B, F).
    gap: Tensor  # Distance along the direction from the closest inner point to it, (B,); above 0 when separable.
    lowest: Tensor  # Lowest and highest position of any point, (B,).
    highest: Tensor
    logit_low: Tensor  # Lowest and highest logit of the original network on these points, float64 (B,).
    logit_high: Tensor

    @property
    def separable(self) -> Tensor:
        """Whether a linear readout separates the points, bool ``(B,)``."""
        return self.gap > 0

    def reach(self, features: Tensor, index: Tensor | Sequence[int]) -> Tensor:
        """How close to the planted points features ``(M, F)`` of problems ``index`` get, float64 ``(M,)``.

        It is 0 at the closest inner point and 1 at the closest planted one, along the direction. A point is adversarial
        exactly where its reach is above the boundary's position, so it is also the largest kappa at which it would be.
        """
        along = ((features.double() - self.anchor[index]) * self.weight[index]).sum(1)
        return 1 + along / self.gap[index]

    def select(self, rows: Sequence[int]) -> Problems:
        """Some of the problems, in this order."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.inputs.device)
        parts = {name: getattr(self, name)[index] for name in _COLUMNS}
        return Problems(samples=tuple(self.samples[i] for i in rows), **parts)

    @staticmethod
    def join(parts: Sequence[Problems]) -> Problems:
        """The problems of several batches, at least one, as one."""
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in _COLUMNS}
        return Problems(samples=tuple(sample for part in parts for sample in part.samples), **columns)

    def classifier(
        self,
        features: nn.Module,
        *,
        position: float,
        logit_scale: str = "original",
        batching: str = "any",
        norm: str = "l2",
    ) -> BinarizedClassifier:
        """The binarized classifier, its boundary between the closest inner (0) and the closest planted point (1)."""
        threshold = -(1 - position) * self.gap
        largest = torch.maximum((self.lowest - threshold).abs(), (self.highest - threshold).abs())
        if logit_scale == "original":
            spread, offset = (self.logit_high - self.logit_low) / 2, (self.logit_high + self.logit_low) / 2
        else:
            spread, offset = torch.ones_like(largest), torch.zeros_like(largest)
        return BinarizedClassifier(
            features,
            references=self.inputs,
            weight=self.weight,
            anchor=self.anchor,
            threshold=threshold,
            scale=spread / largest.clamp_min(torch.finfo(torch.float64).tiny),
            offset=offset,
            batching=batching,
            norm=norm,
        )


_COLUMNS = tuple(entry.name for entry in fields(Problems) if entry.name != "samples")


def measure(
    forward: Forward,
    inputs: Tensor,
    samples: Sequence[int],
    settings: BinarizationSettings,
    *,
    planted: Tensor | None = None,
    references: Tensor | None = None,
) -> Measured:
    """Draw the points of each sample ``(B, ...)`` and send them through the features.

    Ids and seed decide every draw; ``planted`` ``(B, N_b, ...)`` and ``references`` ``(B, N_r, ...)`` may be given.
    """
    if planted is None:
        planted = torch.stack([draw_planted(x, sample, settings) for x, sample in zip(inputs, samples, strict=True)])
    if references is None:
        references = inputs[:, None][:, :0]
    features = []
    for x, sample, corners, outside in zip(inputs, samples, planted, references, strict=True):
        # Block by block, so that large images and many points do not fill the memory; what is left joins the last.
        blocks = list(_inner_blocks(x, sample, settings, settings.inner_points))
        rows = [forward(draw()) for draw in blocks[:-1]]
        rest = forward(torch.cat([blocks[-1](), x[None], corners, outside]))
        clean = len(rest) - 1 - len(corners) - len(outside)
        features.append(torch.cat([rest[clean : clean + 1], *rows, rest[:clean], rest[clean + 1 :]]))
    return Measured(tuple(samples), inputs, planted, references, torch.stack(features))


def draw_planted(x: Tensor, sample: int, settings: BinarizationSettings) -> Tensor:
    """The points planted for a sample, ``(N_b, ...)``."""
    draw = settings.threat_model.sample_corners if settings.corners else settings.threat_model.sample_surface
    key, blocks = (settings.seed_of_judge, sample, "boundary"), _blocks(settings.boundary_points)
    return torch.cat([draw(x, size, generator=stream(*key, block)) for block, size in blocks])


def draw_inner(x: Tensor, sample: int, settings: BinarizationSettings, count: int) -> Tensor:
    """The first ``count`` inner points of a sample, ``(count, ...)``."""
    return torch.cat([draw() for draw in _inner_blocks(x, sample, settings, count)])


def _inner_blocks(x: Tensor, sample: int, settings: BinarizationSettings, count: int) -> Iterator[Callable[[], Tensor]]:
    """Functions that draw the blocks of a sample's inner points."""
    draw = partial(settings.threat_model.sample_inner, x, radius=1 - settings.gap)
    for block, size in _blocks(count):
        yield partial(draw, count=size, generator=stream(settings.seed_of_judge, sample, "inner", block))


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """``(index, size)`` of the blocks that make up ``count`` points."""
    for block in range(-(-count // _BLOCK)):
        yield block, min(_BLOCK, count - block * _BLOCK)


def fit(
    measured: Measured, readout: nn.Module, settings: BinarizationSettings, *, inner_points: int | None = None
) -> Problems:
    """Fit the readouts of measured samples, with the first ``inner_points`` alone where so many are given.

    The network's own readout gives the range of its logits.
    """
    samples, total, size = measured.features.shape
    outer = measured.planted.shape[1] + measured.references.shape[1]
    last = total - outer if inner_points is None else 1 + inner_points
    first, count = last + measured.planted.shape[1], last + outer
    classes = torch.arange(count, device=measured.features.device) >= last
    step = max(1, _SOLVE_BYTES // (8 * count * max(size, 1)))
    columns: list[list[Tensor]] = []
    for start in range(0, samples, step):
        rows = measured.features[start : start + step]
        # A copy in any case: a readout may change its input.
        rows = torch.cat([rows[:, :last], rows[:, total - outer :]], 1)
        direction = _separate(rows, classes, settings)
        along = _along(rows, direction)
        # From what lies in the ball alone: a boundary that heeds the references too would leave out what is planted.
        edge = along[:, last:first].amin(1)
        # The readout is all that an attack sees of the planted point: its position along the direction, no more.
        anchor = rows[:, 0].double() + edge[:, None] * direction
        with torch.no_grad():
            logits = readout(rows.flatten(0, 1)).double().view(len(rows), -1)
        gap, lowest, highest = edge - along[:, :last].amax(1), along.amin(1) - edge, along.amax(1) - edge
        columns.append([direction, anchor, gap, lowest, highest, logits.amin(1), logits.amax(1)])
    fitted = [torch.cat(column) for column in zip(*columns, strict=True)]
    return Problems(measured.samples, measured.inputs, measured.planted, measured.references, *fitted)


def _along(rows: Tensor, direction: Tensor) -> Tensor:
    """Positions of features ``(B, n, F)`` along directions ``(B, F)``, float64 ``(B, n)``, from the first row's."""
    return ((rows.double() - rows[:, :1].double()) @ direction[:, :, None]).squeeze(2)


def _separate(rows: Tensor, planted: Tensor, settings: BinarizationSettings) -> Tensor:
    """Directions ``(B, F)``; where the penalty keeps one from separating what can be separated, it is lowered."""
    direction = fit_directions(rows, planted, kind=settings.readout, C=settings.C).weight
    if settings.readout != "logistic":
        return direction
    for factor in (1e3, 1e6):
        along = _along(rows, direction)
        mixed = along[:, planted].min(1).values <= along[:, ~planted].max(1).values
        if not bool(mixed.any()):
            break
        direction[mixed] = fit_directions(rows[mixed], planted, C=settings.C * factor).weight
    return direction
