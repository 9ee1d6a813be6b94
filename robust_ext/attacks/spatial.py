"""Small rotations and translations of whole images, which no norm measures.

Source: Engstrom et al., "Exploring the Landscape of Spatial Robustness" (2019), sections 3 and 4: the attacker model of
equation 1, and the two searches that use no gradients, over a grid and over random transformations.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.best import BestPoints
from robust_ext.attacks._common.rows import check_batch, check_images, query
from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.core.cost import Cost
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice

_PADDING_MODES = {"zero": "zeros", "edge": "border", "reflect": "reflection"}


def transform(images: Tensor, transforms: Tensor, *, pad: str = "zero", lowest: float = 0.0) -> Tensor:
    """Rotate images about their centre, then move them; bilinear interpolation.

    Args:
        images: float32 ``(N, C, H, W)``.
        transforms: float64 ``(N, 3)``, one for each image, or ``(1, 3)``, one for all: pixels down, pixels to the
            right, and degrees counter-clockwise.
        pad: What is seen beyond the border. ``"zero"``: ``lowest``. ``"edge"``: the nearest pixel of the border.
            ``"reflect"``: the mirror image.
        lowest: Lowest valid value, which ``"zero"`` fills with; 0 for inputs in [0, 1].

    Returns:
        float32 ``(N, C, H, W)``; images with the transform (0, 0, 0) come back exactly as they are.

    Example:
        >>> transform(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), torch.tensor([[0.0, 1.0, 0.0]]).double())
        tensor([[[[0., 1.],
                  [0., 3.]]]])
    """
    if len(images) == 0:
        return images.clone()
    height, width = images.shape[2:]
    down, right, degrees = transforms.unbind(1)
    cosine, sine = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    # Where each pixel comes from, as torch counts: both sides of an image go from -1 to 1, at any length.
    across = [cosine, -sine * (height / width), (sine * down - cosine * right) * (2 / width)]
    along = [sine * (width / height), cosine, (-sine * right - cosine * down) * (2 / height)]
    theta = torch.stack([torch.stack(across, 1), torch.stack(along, 1)], 1)
    grid = nn.functional.affine_grid(theta, [len(theta), *images.shape[1:]], align_corners=False)
    moved = nn.functional.grid_sample(
        images - lowest,
        grid.to(images.device, images.dtype).expand(len(images), -1, -1, -1),
        mode="bilinear",
        padding_mode=_PADDING_MODES[check_choice("pad", pad, _PADDING_MODES)],
        align_corners=False,
    )
    still = (transforms == 0).all(1).to(images.device)
    return torch.where(still.view(-1, 1, 1, 1), images, moved + lowest)


@settings_class
class SpatialTransformation(NativeAttack):
    """Rotates and translates each image, and keeps the transformation of highest loss that is misclassified.

    Where none is misclassified it returns the one of highest loss. Every transformation sends the whole batch, in row
    order, through the target once. No norm measures how far it goes, so the threat model's epsilon plays no part, and
    its norm neither: only the bounds do. To count all that it finds, judge it by a ball that holds every image, such
    as linf with epsilon the width of the bounds.

    ``"random"`` is the worst of k in the paper: each row draws one seed from the generator, in order, and its
    transformations from that seed, uniform in the allowed range. ``"grid"`` tries the same transformations for each
    row, the smaller rotations first. With the defaults these are 775, as in the paper.

    Example:
        >>> attack = SpatialTransformation(translation=3, mode="random")
        >>> attack.queries
        10
    """

    name = "SpatialTransformation"
    ranks = True
    traits = AttackTraits(
        batching="full", gradients=False, normless=True, leaves_ball=True, failure="best", seeds="generator"
    )

    translation: float = setting(default=8.0, help="Most pixels moved up, down, left or right.", minimum=0, trial=2)
    rotation: float = setting(default=30.0, help="Most degrees turned either way.", minimum=0, maximum=180)
    translation_steps: int = setting(
        default=5,
        help="Values on each axis of the grid, from ``-translation`` to ``translation``; odd, so that 0 is among them.",
        minimum=1,
        trial=3,
    )
    rotation_steps: int = setting(default=31, help="The same for rotations; odd.", minimum=1, trial=5)
    mode: str = setting(default="grid", help='``"grid"`` or ``"random"``.', choices=("grid", "random"))
    samples: int = setting(
        default=10, help='How many transformations ``"random"`` tries; the default is the paper\'s.', minimum=1
    )
    pad: str = setting(
        default="zero",
        help='Padding beyond the border, see :func:`transform`; the paper\'s is ``"zero"``, which here is '
        "the lowest bound.",
        choices=tuple(_PADDING_MODES),
    )
    loss: str = setting(default="ce", help='``"ce"``, as in the paper, or ``"margin"``.', choices=("ce", "margin"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("translation_steps", "rotation_steps"):
            steps = getattr(self, name)
            if steps % 2 == 0:
                expected = f"an odd integer, as {steps - 1} or {steps + 1}, so that 0 is tried"
                raise InvalidArgumentError(name, steps, expected)
        self._set("traits", replace(type(self).traits, seeds="generator" if self.mode == "random" else "none"))

    @property
    def queries(self) -> int:
        """The number of transformations for each row."""
        return self.samples if self.mode == "random" else len(self._grid())

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost:
        """See :meth:`Attack.cost`."""
        return Cost(self.queries)

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`; an AttackRefusedError where inputs are no images ``(N, C, H, W)``."""
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        check_images(self.name, inputs, "an attack without a notion of pixels")
        if len(inputs) == 0:
            return inputs.clone()
        transforms = self._draw(len(inputs), batch.generator) if self.mode == "random" else self._grid()[:, None]
        best = BestPoints(inputs, labels, loss=self.loss, goal=batch.goal)
        for number, each in enumerate(transforms):
            moved = transform(inputs, each, pad=self.pad, lowest=batch.threat_model.bounds[0])
            moved = moved.clamp(*batch.threat_model.bounds)
            batch.show(number, len(transforms), moved, best.update(moved, query(batch.target, moved)))
        return best.points

    def _grid(self) -> Tensor:
        """All transformations of the grid ``(K, 3)``, each once; by the size of rotation, then of translation."""
        turns = _values(self.rotation, self.rotation_steps)
        moves = _values(self.translation, self.translation_steps)
        ordered = sorted(product(moves, moves, turns), key=lambda each: (abs(each[2]), math.hypot(each[0], each[1])))
        return torch.tensor(ordered, dtype=torch.float64)

    def _draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random transformations ``(samples, rows, 3)``; the first of a row are the same however many there are."""
        most = torch.tensor([self.translation, self.translation, self.rotation], dtype=torch.float64)
        streams = [stream(draw_seed(generator), "spatial") for _ in range(rows)]
        drawn = [torch.rand(self.samples, 3, generator=each, dtype=torch.float64) for each in streams]
        return torch.stack(drawn, 1).mul_(2).sub_(1).mul_(most)


def _values(most: float, steps: int) -> list[float]:
    """Evenly spaced from ``-most`` to ``most``, exactly 0 in the middle; only 0 where there is one."""
    half = steps // 2
    return [most * step / half for step in range(-half, half + 1)] if half and most else [0.0]
