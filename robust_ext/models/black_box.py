"""Classifiers that are a function of numpy arrays, without gradients: scores or labels of inputs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.validation import check_choice, check_integer, check_number

RETURNS = ("logits", "probabilities", "labels")
# A higher one hides differences between the scores of sure networks, see docs/evidence/frameworks.md.
FLOOR = 1e-30
# How far probabilities may be from 0 and 1, and their sum from 1.
_ROUNDING = 1e-3


class BlackBox(nn.Module):
    """A function of numpy arrays as a module without gradients; :func:`black_box` describes the arguments."""

    def __init__(
        self, predict: Callable[[Any], Any], *, returns: str, classes: int | None = None, floor: float = FLOOR
    ) -> None:
        super().__init__()
        self.returns = check_choice("returns", returns, RETURNS)
        self.classes = None if classes is None else check_integer("classes", classes, minimum=2)
        if self.labels_only and classes is None:
            raise InvalidArgumentError("classes", None, "the number of classes, as the model returns labels alone")
        self.floor = check_number("floor", floor, minimum=0, open_minimum=True)
        # In a tuple, so that a function that is a module is none of this one's.
        self._predict = (predict,)
        self.training = False

    @property
    def predict(self) -> Callable[[Any], Any]:
        """The function."""
        return self._predict[0]

    @property
    def labels_only(self) -> bool:
        """True if it returns nothing but labels."""
        return self.returns == "labels"

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)`` of ``(N, ...)``: scores, log-probabilities, or 1 for the label and -1 elsewhere."""
        with foreign_code("model", "the function of a black box", kind=ModelError):
            given = np.ascontiguousarray(x.detach().cpu().numpy(), dtype=np.float32)
            found = np.asarray(self._predict[0](given.copy()))
        values = self._of_labels(found, len(x)) if self.labels_only else self._of_scores(found, len(x))
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(x.device)

    def _of_labels(self, found: Any, rows: int) -> Any:
        assert self.classes is not None
        one_hot = found.ndim == 2 and found.shape[1] == self.classes > 1
        labels = found.argmax(1) if one_hot else found.reshape(-1)
        if len(labels) != rows or (rows and not (labels.min() >= 0 and labels.max() < self.classes)):
            raise ModelError(
                f"model: returned labels of shape {found.shape} for {rows} inputs, expected ({rows},) of whole numbers "
                f"from 0 to {self.classes - 1}"
            )
        return 2 * np.eye(self.classes)[labels.astype(np.int64)] - 1

    def _of_scores(self, found: Any, rows: int) -> Any:
        if found.ndim == 2 and found.shape[1] == 1:
            found = found[:, 0]
        if found.ndim not in (1, 2) or len(found) != rows or not np.issubdtype(found.dtype, np.floating):
            raise ModelError(
                f"model: returned {found.dtype} of shape {found.shape} for {rows} inputs, expected floats ({rows}, K), "
                f"or ({rows},) of class 1 of two; of one that returns labels, state returns='labels' and classes"
            )
        if self.returns == "logits":
            return found if found.ndim == 2 else np.stack([np.zeros_like(found), found], 1)
        found = found if found.ndim == 2 else np.stack([1 - found, found], 1)
        off = max(-found.min(), found.max() - 1, np.abs(found.sum(1) - 1).max()) if rows else 0.0
        if not off <= _ROUNDING:
            raise ModelError(
                f"model: returned scores from {found.min():.3g} to {found.max():.3g} that sum to between "
                f"{found.sum(1).min():.3g} and {found.sum(1).max():.3g}, expected probabilities; of other scores, "
                "state returns='logits'"
            )
        return np.log(np.maximum(found, self.floor))

    def extra_repr(self) -> str:
        """Return what the function returns."""
        return f"returns={self.returns!r}"


def black_box(
    predict: Callable[[Any], Any], *, returns: str, classes: int | None = None, floor: float = FLOOR
) -> BlackBox:
    """Return a function of numpy arrays as a model without gradients, for attacks that read scores or labels alone.

    Args:
        predict: From float32 arrays ``(N, ...)`` in the threat model's bounds to the kind of ``returns``; each row by
            itself, the same at each call.
        returns: ``"logits"``: any scores ``(N, K)``, the highest of which is the prediction, or ``(N,)`` of class 1 of
            two. ``"probabilities"``: likewise, of which the logarithms are taken. ``"labels"``: whole numbers ``(N,)``
            or one-hot ``(N, K)``.
        classes: Number of classes; needed for labels alone.
        floor: Least probability whose logarithm is taken: below it, scores tell nothing.

    Raises:
        InvalidArgumentError: ``returns`` or a number is not accepted, or ``classes`` is left out with labels.

    Example:
        >>> model = black_box(lambda x: np.stack([1 - x[:, 0], x[:, 0]], 1), returns="probabilities")
        >>> model(torch.tensor([[0.25], [1.0]]))
        tensor([[ -0.2877,  -1.3863],
                [-69.0776,   0.0000]])
    """
    return BlackBox(predict, returns=returns, classes=classes, floor=floor)


def black_box_in(module: nn.Module) -> BlackBox | None:
    """Return the black box that a module is, or holds; None without one."""
    return next((part for part in module.modules() if isinstance(part, BlackBox)), None)
