"""AID-purifier: steps towards activations that a discriminator takes for those of a clean input.

Source: Hwang et al., "AID-Purifier: A Light Auxiliary Network for Boosting Adversarial Defense" (2021); the constants,
and how it is attacked, as in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses"
(2022), section 3.7.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class, positional
from robust_ext.core.settings import setting
from robust_ext.defenses._common import SignPurifier, layer_names, one_a_row
from robust_ext.defenses.training.discriminator import Discriminator, DiscriminatorTraining
from robust_ext.detectors.observation import observe


@module_class
class AIDPurifier(SignPurifier):
    """Sign steps that raise a discriminator's output at the classifier's layers (Hwang et al. 2021).

    Each row costs ``steps + 1`` forward and ``steps`` backward passes of the classifier, 11 and 10 by default, and
    ``steps`` of each of the discriminator.
    """

    name = "aid"
    building_blocks = ("IP", "IA", "AN")
    part_class = Discriminator
    training_class = DiscriminatorTraining

    discriminator: nn.Module = positional(
        "A module from the outputs of the layers, one argument each, to numbers ``(N,)`` or ``(N, 1)``, in eval mode: "
        "the higher, the more likely a clean input; their sigmoid is the probability of one. See "
        ":class:`~robust_ext.defenses.training.discriminator.DiscriminatorTraining`.",
        kw_only=False,
    )
    layers: Any = setting(
        default=None,
        help="Their names, as in ``classifier.named_modules()``, also separated by commas; the discriminator's "
        "attribute ``layers`` when left out.",
        check=lambda names: None if names is None else layer_names(names),
    )
    steps: int = setting(default=10, help="Number of steps.", minimum=0)
    radius: float = setting(default=0.031)
    step_size: float | None = setting(
        default=None, help="Step size in units of [0, 1]; a quarter of the radius when left out.", above=0
    )
    saturating: bool = setting(
        default=True,
        help="Whether the probability is raised, as in the paper: a row stays where float32 rounds it to 1. Else the "
        "number itself, whose gradient vanishes nowhere.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is None:
            self.step_size = self.radius / 4
        names = getattr(self.discriminator, "layers", ()) if self.layers is None else self.layers
        known = dict(self.classifier.named_modules())
        if not names or any(name not in known for name in names):
            expected = f"names of layers of the classifier (the last ones: {', '.join(list(known)[-8:]) or 'none'})"
            raise InvalidArgumentError("layers", names, expected)
        self.layers = tuple(names)

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """Return the discriminator of some layers of the classifier."""
        if not part.layers:
            raise InvalidArgumentError("weights", "a discriminator of logits", "one of layers, trained for aid")
        seen = observe(classifier, inputs, part.layers).layers
        part(*(seen[name] for name in part.layers))
        return {"discriminator": part}

    def loss(self, point: Tensor, **held: Any) -> Tensor:
        """Return how clean points are, ``(N,)``."""
        seen = observe(self.classifier, point, self.layers)
        value = one_a_row(self.discriminator(*(seen.layers[name] for name in self.layers)), len(point))
        return value.sigmoid() if self.saturating else value
