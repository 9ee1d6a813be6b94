"""AID-purifier: steps towards activations that a discriminator takes for those of a clean input.

Source: Hwang et al., "AID-Purifier: A Light Auxiliary Network for Boosting Adversarial Defense" (2021); the constants,
and how it is attacked, as in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses"
(2022), section 3.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_number
from robust_ext.defenses.imf import one_a_row
from robust_ext.defenses.sign_steps import keep_in
from robust_ext.detectors.observation import observe
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient


class AIDPurifier(Purifier):
    """Sign steps that raise what a discriminator says of the classifier's layers (Hwang et al. 2021).

    Each row costs ``steps + 1`` forward and ``steps`` backward passes of the classifier, 11 and 10 by default, and
    ``steps`` of each of the discriminator.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        discriminator: From the outputs of the layers, one argument each, to numbers ``(N,)`` or ``(N, 1)``, in eval
            mode: the higher, the more likely a clean input; their sigmoid is the probability of one. See
            :func:`robust_ext.defenses.auxiliary.fit_discriminator`.
        layers: Their names, as in ``classifier.named_modules()``; the discriminator's attribute ``layers`` when left
            out.
        steps: At least 0.
        radius: Of the linf ball around the input, for inputs in [0, 1]; follows the width of other bounds.
        step_size: Likewise, above 0; a quarter of the radius when left out.
        saturating: Whether the probability is raised, as in the paper: a row stays where float32 rounds it to 1. Else
            the number itself, whose gradient vanishes nowhere.
        bounds: Of the inputs.
        checkpoint: See :class:`~robust_ext.models.purifier.Purifier`.

    Raises:
        InvalidArgumentError: A setting is not accepted, or there is no such layer.
    """

    needs_gradients = True

    def __init__(
        self,
        classifier: nn.Module,
        discriminator: nn.Module,
        *,
        layers: Sequence[str] | None = None,
        steps: int = 10,
        radius: float = 0.031,
        step_size: float | None = None,
        saturating: bool = True,
        bounds: Sequence[float] = (0.0, 1.0),
        checkpoint: bool = False,
    ) -> None:
        super().__init__(classifier, steps=steps, checkpoint=checkpoint)
        self.discriminator = discriminator
        names = getattr(discriminator, "layers", ()) if layers is None else layers
        known = dict(classifier.named_modules())
        if isinstance(names, str) or not names or any(name not in known for name in names):
            expected = f"names of layers of the classifier (the last ones: {', '.join(list(known)[-8:]) or 'none'})"
            raise InvalidArgumentError("layers", names, expected)
        self.layers = tuple(names)
        self.bounds = check_bounds(bounds)
        width = self.bounds[1] - self.bounds[0]
        self.radius = check_number("radius", radius, minimum=0) * width
        step = radius / 4 if step_size is None else check_number("step_size", step_size, minimum=0, open_minimum=True)
        self.step_size = step * width
        self.saturating = saturating

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """One sign step up, back into ball and bounds."""
        gradient = row_gradient(self.cleanness, point)
        return keep_in(point + self.step_size * gradient.sign(), x=x, radius=self.radius, bounds=self.bounds)

    def cleanness(self, point: Tensor) -> Tensor:
        """What is raised, ``(N,)``."""
        seen = observe(self.classifier, point, self.layers)
        value = one_a_row(self.discriminator(*(seen.layers[name] for name in self.layers)), len(point))
        return value.sigmoid() if self.saturating else value
