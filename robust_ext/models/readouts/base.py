"""The contract of a readout, from features to a score and two logits, and checks of your own readouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.settings import Settings

Fitted: TypeAlias = Mapping[str, Tensor]
"""Parameters of readouts, by name."""


class Readout(Settings, ABC):
    """A two-class readout that is fitted for many problems at once (``TrainReadout`` of Zimmermann et al. 2022).

    A class of your own has :meth:`fit` and :meth:`score`; it has settings where it is a
    :func:`~robust_ext.core.settings.settings_class`. Its objects are pickled where attacks run in other processes.
    ``axes`` names the dimensions of one point's features, such as ``("members", "F")``; with them, features of another
    shape are refused before any work.
    """

    label: ClassVar[str] = "a readout"
    axes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """Fit one readout for each of B problems; return parameters by name, each float64 ``(B, ...)``.

        Args:
            features: ``(B, n, *F)``; the first of each are those of the clean sample.
            planted: bool ``(n,)``, which of the n points are class 1.
        """

    @abstractmethod
    def score(self, features: Tensor, parameters: Fitted) -> Tensor:
        """A number for each row, float64 ``(M,)``, differentiable: it is class 1 where that is above its threshold.

        Args:
            features: ``(M, *F)``.
            parameters: Of each row's problem, ``(M, ...)``.
        """

    def logits(self, features: Tensor, parameters: Fitted, threshold: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Logits ``(M, 2)`` of features ``(M, *F)``: ``offset -+ scale (score - threshold)``, each ``(M,)``.

        In logits of your own the second is the larger one exactly where the score is above the threshold.
        """
        signed = scale * (self.score(features, parameters) - threshold)
        return torch.stack([offset - signed, offset + signed], 1)

    def scores(self, features: Tensor, parameters: Fitted) -> Tensor:
        """Scores ``(B, n)`` of the features ``(B, n, *F)`` of B problems with parameters ``(B, ...)``."""
        rows = []
        for row, points in enumerate(features):
            own = {name: part[row].expand(len(points), *part.shape[1:]) for name, part in parameters.items()}
            rows.append(self.score(points, own))
        return torch.stack(rows) if rows else features.new_zeros(features.shape[:2], dtype=torch.float64)

    def anchored(self, parameters: dict[str, Tensor], edge: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The same readouts with scores that count from the planted points, and what ``edge`` is then.

        ``edge`` ``(B,)`` is the score of the planted point that is closest to inner ones. Linear readouts count from
        there, which keeps more digits of the boundary; others return what they are given.
        """
        return parameters, edge

    @property
    def shown(self) -> Readout:
        """The readout that attacks are shown: this one, unless the model is random."""
        return self

    def measured(self, features: nn.Module, *, seed: int) -> nn.Module:
        """The features that it reads, made of the model's: these, unless the model is random."""
        return features

    def check(self, shape: tuple[int, ...]) -> None:
        """InvalidArgumentError where it takes no features ``(N, *shape)``."""
        if self.axes and len(shape) != len(self.axes):
            expected = ", ".join(("N", *self.axes))
            got = f"{self.description} for features of shape ({', '.join(('N', *map(str, shape)))})"
            more = "give a pair (features, readout) of modules whose features have it, or another readout"
            raise InvalidArgumentError("readout", got, f"features of shape ({expected}); {more}")


# Points this close to the boundary, as a share of the gap, may fall on either side of it by rounding.
_CLOSE = 1e-6


def fitted(readout: Readout, features: Tensor, planted: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters ``(B, ...)`` of the readout fitted to features ``(B, n, *F)``, and the scores ``(B, n)`` of these.

    InvalidArgumentError: it returned something else; the text names the method. DataError: it raised.
    """
    with foreign_code("readout", readout.description):
        parameters = readout.fit(features, planted)
    if not isinstance(parameters, dict) or not all(isinstance(part, Tensor) for part in parameters.values()):
        raise _error(readout, f"fit() returned {type(parameters).__name__}", "a dict of tensors by name")
    for name, part in parameters.items():
        if part.shape[:1] != features.shape[:1]:
            expected = f"{len(features)} rows, one for each problem"
            raise _error(readout, f"fit() returned {name!r} of shape {tuple(part.shape)}", expected)
    with foreign_code("readout", readout.description):
        scores = readout.scores(features, parameters)
    if not isinstance(scores, Tensor) or scores.shape != features.shape[:2]:
        shown = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        expected = f"one number for each of M rows, a tensor of shape (M,), so {tuple(features.shape[:2])} in all"
        raise _error(readout, f"score() came to {shown} for the points of all problems", expected)
    return parameters, scores.double()


def check_logits(
    readout: Readout, features: Tensor, parameters: Fitted, scores: Tensor, threshold: Tensor, gap: Tensor
) -> None:
    """Raise where logits of your own make points ``(B, n, *F)`` another class than ``scores`` ``(B, n)`` do.

    ``threshold`` and ``gap`` are float64 ``(B,)``; problems without a gap are left out. InvalidArgumentError: they do,
    or are of another shape than ``(M, 2)``. DataError: it raised.
    """
    if type(readout).logits is Readout.logits:
        return
    count, found = features.shape[1], 0
    for row in (gap > 0).nonzero().flatten().tolist():
        points = features[row]
        own = {name: part[row].expand(count, *part.shape[1:]) for name, part in parameters.items()}
        limit = threshold[row].expand(count)
        with foreign_code("readout", readout.description), torch.no_grad():
            logits = readout.logits(points, own, limit, torch.ones_like(limit), torch.zeros_like(limit))
        if not isinstance(logits, Tensor) or logits.shape != (count, 2):
            shown = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise _error(readout, f"logits() returned {shown} for {count} rows", f"shape ({count}, 2)")
        beyond = scores[row] - limit
        other = (logits.argmax(1) == 1) != (beyond > 0)
        found = max(found, int((other & (beyond.abs() > _CLOSE * gap[row])).sum()))
    if found:
        raise _error(
            readout,
            f"logits() predicts another class than score() for {found} of {count} measured points",
            "the second logit to be the larger one exactly where the score is above the threshold",
        )


def _error(readout: Readout, got: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError("readout", f"{readout.description}, whose {got}", f"{expected}; correct the class")
