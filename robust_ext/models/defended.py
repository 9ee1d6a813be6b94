"""A classifier and a detector as one module, and what of it attacks see that use logits alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.modules import SettingsModule, module_class, positional
from robust_ext.core.settings import setting
from robust_ext.detectors.base import Detector, rejected
from robust_ext.detectors.observation import observe, observing

# Of the threshold, as logits show a score that is infinite or no number.
_FAR = 1e6
EXPOSURES = ("classifier", "reject")


@module_class
class Defended(SettingsModule):
    """A classifier whose inputs a detector may reject.

    Where the classifier runs the detector's network on the input itself, as a binarized classifier on that network's
    features does, one forward pass serves both.
    """

    classifier: nn.Module = positional("From inputs ``(N, ...)`` to logits ``(N, K)``.", kw_only=False)
    detector: Detector = positional("With a threshold.", kw_only=False)
    inverted: bool = setting(
        default=False,
        help="Reject what the detector lets pass, and let pass what it detects (the inverted binarization test, "
        "Zimmermann et al. 2022, section 3.2).",
    )
    exposure: str = setting(
        default="classifier",
        help='What of the detector :meth:`forward` shows. ``"classifier"``: nothing, the logits alone, for attacks '
        'that ignore it. ``"reject"``: one more column, above all others exactly where an input is rejected: the '
        "largest logit plus ``weight`` times the score margin. Untargeted attacks take being rejected for a success "
        "there; aim them at a class, or give them a :class:`SuccessMargin`.",
        choices=EXPOSURES,
    )
    weight: float = setting(default=1.0, help="Logits a unit of the detector's score margin, above 0.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training = False

    def over(self, classifier: nn.Module) -> Defended:
        """Return the detector beside another view of the classifier."""
        shown: dict[str, Any] = {name: getattr(self, name) for name in ("inverted", "exposure", "weight")}
        return Defended(classifier, self.detector, **shown)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(N, K)`` and score margins ``(N,)`` of inputs ``(N, ...)``: rejected above 0; inverted, negated."""
        logits, margin = self._run(x)
        return logits, -margin if self.inverted else margin

    def decide(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted classes, int64 ``(N,)``, and which inputs are rejected, bool ``(N,)``; scores of NaN always are."""
        with torch.no_grad():
            logits, margin = self._run(x)
        return logits.argmax(1), rejected(margin, inverted=self.inverted)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``, or ``(N, K + 1)`` with the column of rejection, by ``exposure``."""
        if self.exposure == "classifier":
            out: Tensor = self.classifier(x)
            return out
        logits, margin = self.both(x)
        return torch.cat([logits, (logits.amax(1) + self.weight * _finite(margin))[:, None]], 1)

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        network = self.detector.classifier
        with observing(network, self.detector.layers) as passes:
            logits: Tensor = self.classifier(x)
        # A defense shows the network other points than those that the detector looks at.
        if len(passes) == 1 and _is_same(passes[0].inputs, x):
            return logits, self.detector.score_margin_of(passes[0])
        return logits, self.detector.score_margin_of(observe(network, x, self.detector.layers))


class SuccessMargin(nn.Module):
    """Two columns by which an attack on a defended classifier succeeds or not, for untargeted attacks.

    The first column is 0, the second ``min(largest other logit - true logit, -weight x score margin)``: it is above 0
    exactly where an input is misclassified and not rejected, so that an attack on label 0 has to achieve both.
    ``labels`` are the true class of every row, int64 ``(N,)``, for batches of these rows in order, or one for all rows.
    """

    def __init__(self, defended: Defended, labels: Tensor | int) -> None:
        super().__init__()
        self.defended = defended
        self.register_buffer("labels", torch.as_tensor(labels))
        self.training = False

    labels: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, 2)``."""
        logits, margin = self.defended.both(x)
        true = self.labels.expand(len(x))[:, None]
        others = logits.scatter(1, true, -torch.inf).amax(1)
        gained = others - logits.gather(1, true).squeeze(1)
        success = torch.minimum(gained, -self.defended.weight * _finite(margin))
        return torch.stack([torch.zeros_like(success), success], 1)


def _is_same(seen: Tensor, x: Tensor) -> bool:
    """Return whether a network saw a tensor itself, or all of it as a view that gradients pass."""
    whole = seen.shape == x.shape and seen.stride() == x.stride()
    return seen is x or (seen._base is x and whole)


def _finite(margin: Tensor) -> Tensor:
    """Score margins whose NaN are rejected and whose infinities are large, so that logits made of them are finite."""
    return margin.nan_to_num(nan=_FAR, posinf=_FAR, neginf=-_FAR)
