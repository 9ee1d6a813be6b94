"""Random resizing and padding of images in front of a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.settings import setting
from robust_ext.core.validation import check_number
from robust_ext.defenses._common import check_images
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.rows import RowRNG, Solution, State

_PLACE = ("height", "width", "top", "left")


@module_class
class RandomResizePad(AdaptiveDefense):
    """Each image resized to a random size and put at a random place on a plain ground (Xie et al. 2018).

    The classifier gets images of ``largest`` times the size, in which the resized ones lie anywhere. It is part of the
    readout, so a trace's points are the input; its state holds the height and the place of each row. It has a gradient;
    one forward pass.

    Example:
        >>> defense = RandomResizePad(nn.Flatten(), smallest=0.5, largest=1.0, seed=0)
        >>> defense(torch.zeros(1, 1, 4, 4)).shape
        torch.Size([1, 16])
    """

    name = "resize-pad"
    building_blocks = ("IP", "R")
    random = True
    stretched = ("fill",)

    classifier: nn.Module = positional("From images of the new size to logits ``(N, K)``, in eval mode.", kw_only=False)
    smallest: float = setting(default=1.0, help="Least size, relative to the image's, above 0.", above=0)
    largest: float = setting(
        default=331 / 299,
        help="Relative size of what the classifier gets, and limit of the resized image, which is smaller unless "
        "``smallest`` is the same; at least ``smallest``.",
        above=0,
    )
    fill: float = setting(
        default=0.5, help="Value of the padding, in units of [0, 1]; 0.5 in the paper's code.", minimum=0, maximum=1
    )
    mode: str = setting(
        default="nearest",
        help='Of ``torch.nn.functional.interpolate``: ``"nearest"`` as in the paper\'s code, or ``"bilinear"``.',
        choices=("nearest", "bilinear"),
    )
    bounds: tuple[float, float] = given("Of the inputs.", default=(0.0, 1.0))
    seed: int | None = given("Of the sizes and places.", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("largest", self.largest, minimum=self.smallest)
        self.fill += self.bounds[0]

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Draw each row's size and place."""
        check_images(x)
        places = torch.tensor([self._place(rng.generator(row, "place"), x) for row in range(len(x))])
        return Solution(x, (x,), {name: places[:, column].to(x.device) for column, name in enumerate(_PLACE)})

    def readout(self, point: Tensor, state: State) -> Tensor:
        """Return logits ``(N, K)`` of the images in their places."""
        out: Tensor = self.classifier(self.place(point, state))
        return out

    def place(self, point: Tensor, state: State) -> Tensor:
        """Return the classifier's inputs for images ``(N, C, H, W)`` and a state."""
        _, full = self._limits(point)
        placed = []
        for row, values in enumerate(zip(*(state[name].tolist() for name in _PLACE), strict=True)):
            height, width, top, left = values
            align = {} if self.mode == "nearest" else {"align_corners": False}
            small = nn.functional.interpolate(point[row : row + 1], (height, width), mode=self.mode, **align)
            around = (left, full[1] - width - left, top, full[0] - height - top)
            placed.append(nn.functional.pad(small, around, value=self.fill))
        return torch.cat(placed)

    def _limits(self, x: Tensor) -> list[list[int]]:
        """Return least and greatest height and width."""
        return [[max(1, round(share * length)) for length in x.shape[-2:]] for share in (self.smallest, self.largest)]

    def _place(self, generator: torch.Generator, x: Tensor) -> tuple[int, int, int, int]:
        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        least, full = self._limits(x)
        rows = max(full[0] - least[0], 1)
        height = least[0] + draw(rows)
        width = round(least[1] + (height - least[0]) / rows * (full[1] - least[1]))
        return height, width, draw(full[0] - height + 1), draw(full[1] - width + 1)
