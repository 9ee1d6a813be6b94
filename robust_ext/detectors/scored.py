"""A score of someone else's as a detector."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from robust_ext.core.errors import ModelError
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation


class ScoreDetector(Detector):
    """A detector whose score is a callable.

    Args:
        classifier: The network it watches, for predicted classes; the score may run it once more.
        score: From inputs ``(N, ...)`` to scores ``(N,)``, higher for more adversarial inputs. A module becomes a part
            of this detector and moves with it.
        name: What error messages call it; left out, its own name.
        differentiable: Whether gradients flow from the score to the input; where not, it gets inputs without.
        random: Whether two calls may give different scores.

    Example:
        >>> import torch
        >>> detector = ScoreDetector(nn.Flatten(), lambda x: x.flatten(1).mean(1))
        >>> detector.score(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
        tensor([0.5000, 1.0000])
    """

    def __init__(
        self,
        classifier: nn.Module,
        score: Callable[[Tensor], Tensor],
        *,
        name: str | None = None,
        differentiable: bool = True,
        random: bool = False,
    ) -> None:
        super().__init__(classifier)
        self.scorer = score
        self.name = name or str(getattr(score, "__name__", type(score).__name__))
        self.differentiable, self.random = differentiable, random

    def score_of(self, observed: Observation) -> Tensor:
        """The callable's score of the inputs, ``(N,)``."""
        return self.scorer(observed.inputs if self.differentiable else observed.inputs.detach())

    def extra_repr(self) -> str:
        """The name."""
        return self.name

    def packed(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Raise ModelError: code cannot be saved."""
        raise ModelError(f"detector {self.name}: wraps code of yours, which no file can hold; {self.remake()}")
