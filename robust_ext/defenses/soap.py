"""SOAP with label consistency: change the input until a view of it gets the same logits.

Source: Shi et al., "Online Adversarial Purification based on Self-Supervision" (2021); the constants, and how it is
attacked, as in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section
3.5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import given, module_class
from robust_ext.core.settings import setting
from robust_ext.defenses._common import keep_in, over_rows
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.rows import RowRNG, Solution
from robust_ext.models.vjp import row_gradient


def flipped_crop(x: Tensor, *, crop: int = 2, flip: bool = True) -> Tensor:
    """Return the case study's view of images ``(N, C, H, W)``: mirrored, cropped, stretched by nearest neighbours.

    ``crop`` pixels are cut off at each side: 2 of 32 in the case study, 4 in the authors' last code. ``flip=False`` is
    for images whose mirror images are no such images, as digits. Too small ones raise InvalidArgumentError.
    """
    if x.dim() != 4 or 2 * crop >= min(x.shape[2:]):
        expected = f"images (N, C, H, W) of more than {2 * crop} pixels; or choose another view"
        raise InvalidArgumentError("x", f"shape {tuple(x.shape)}", expected)
    height, width = x.shape[2:]
    part = (x.flip(3) if flip else x)[:, :, crop : height - crop, crop : width - crop]
    return nn.functional.interpolate(part, size=(height, width), mode="nearest")


@module_class
class SOAP(AdaptiveDefense):
    """Sign steps that lower the label consistency loss in balls of growing radius; the best radius stays (Shi 2021).

    The loss is the mean squared difference between the logits of an input and of a view of it. For each radius
    ``e * radius``, e from 0 to ``radii - 1``, ``steps`` steps start at the input; of the points they end at, the one of
    lowest loss is classified, the smallest radius where several are. The iterates are those of the chosen radius, which
    is the state ``"radius"`` ``(N,)`` in the units of the inputs.

    Each row costs ``2 radii (steps + 1) + 1`` forward and ``2 radii steps`` backward passes of the classifier, by
    default 133 and 110. (The case study counts 111 and 110, without those that choose the radius.) A classifier should
    be trained with the same loss besides its own; others may lose accuracy.

    Example:
        >>> defense = SOAP(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
        >>> trace = defense.trace(torch.rand(2, 1, 8, 8))
        >>> len(trace.iterates), trace.state["radius"].shape
        (6, torch.Size([2]))
    """

    name = "soap"
    building_blocks = ("IP", "IA", "AN")
    needs_gradients = True
    stretched = ("radius", "step_size")

    steps: int = setting(default=5, help="Steps for each radius.", minimum=0)
    radius: float = setting(
        default=4 / 255,
        help="Unit of the radii, for inputs in [0, 1]; follows the width of other bounds.",
        minimum=0,
    )
    step_size: float = setting(default=4 / 255, help="Likewise, above 0.", above=0)
    radii: int = setting(default=11, help="How many, at least 1; the first is 0.", minimum=1)
    choice: str = setting(
        default="row",
        help='Whether the radius is chosen for each ``"row"``, as in the paper, or for a ``"batch"`` by its mean '
        "loss, as in the public code; then rows depend on the others in their group, see ``group_size``.",
        choices=("row", "batch"),
    )
    crop: int = setting(default=2, help="Pixels that :func:`flipped_crop` cuts off, where it is the view.", minimum=0)
    flip: bool = setting(default=True, help="Whether :func:`flipped_crop` flips the images.")
    view: Any = given(
        "A function from inputs ``(N, ...)`` to inputs that are meant to get the same logits, each row on its own and "
        "differentiable; :func:`flipped_crop` when left out, which is for images.",
        default_factory=lambda: None,
    )
    bounds: tuple[float, float] = given("Of the inputs.", default=(0.0, 1.0))
    group_size: int | None = setting(
        default=None, help='Rows of a group; for ``choice="batch"`` alone, and needed there.', minimum=1
    )
    pad: bool = setting(default=False, help="See :class:`~robust_ext.models.adaptive.AdaptiveDefense`.")

    def __post_init__(self) -> None:
        self.batch_level = self.choice == "batch"
        super().__post_init__()
        if self.view is None:
            self.view = partial(flipped_crop, crop=self.crop, flip=self.flip)

    def loss(self, point: Tensor) -> Tensor:
        """Return the mean over classes of the squared difference of logits, ``(N,)``."""
        difference: Tensor = self.classifier(point) - self.classifier(self.view(point))
        return difference.square().mean(1)

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Try all radii, see :meth:`~robust_ext.models.adaptive.AdaptiveDefense.solve`."""
        path, lowest = self._tried(x, 0.0, record)
        chosen = torch.zeros_like(lowest)
        for radius in (number * self.radius for number in range(1, self.radii)):
            other, loss = self._tried(x, radius, record)
            better = loss < lowest
            path = [torch.where(over_rows(better, x), b, a) for a, b in zip(path, other, strict=True)]
            lowest, chosen = torch.where(better, loss, lowest), torch.where(better, radius, chosen)
        return Solution(path[-1], tuple(path), {"radius": chosen})

    def _tried(self, x: Tensor, radius: float, record: bool) -> tuple[list[Tensor], Tensor]:
        """Return the path of the steps in one ball, its last point alone unless recorded, and the loss there."""
        path = [x]
        for _ in range(self.steps):
            gradient = row_gradient(self.loss, path[-1])
            moved = path[-1] - self.step_size * gradient.sign()
            if not record:
                path.clear()
            path.append(keep_in(moved, x=x, radius=radius, bounds=self.bounds))
        with torch.no_grad():
            loss = self.loss(path[-1])
        return path, loss.mean().expand_as(loss) if self.batch_level else loss
