"""An attack on a test-time defense through a view of it that has useful gradients.

Source of the views: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022),
section 3.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_integer
from robust_ext.models.adaptive_features import binarized_defense
from robust_ext.models.bpda import BACKWARDS, BPDA
from robust_ext.models.eot import EoT
from robust_ext.registry.attack import as_attack

VIEWS = ("plain", *BACKWARDS)


class Through(Attack):
    """Any attack, on a view of the test-time defense that is attacked.

    The target is a defense, or the classifier of a binarization test of one: the same attack that is used on a defense
    can be tested. A row that is asked of the view is counted once, whatever is drawn and retraced for it.

    Args:
        attack: Anything :func:`robust_ext.as_attack` takes.
        view: ``"plain"`` for the defense's own gradients, or a choice of ``backward`` of
            :class:`robust_ext.models.bpda.BPDA`.
        steps: Inner steps of the defense that gradients are taken from; the defense's own when left out.
        draws: Draws that are averaged over, see :class:`robust_ext.models.eot.EoT`; 1 for none.
        name: How tables call it; made of attack and view when left out.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> def my_pgd(model, x, y):
        ...     return x
        >>> Through(my_pgd, view="trajectory").name
        'my_pgd through trajectory'
    """

    def __init__(
        self,
        attack: object,
        *,
        view: str = "identity",
        steps: int | None = None,
        draws: int = 1,
        name: str | None = None,
    ) -> None:
        self.attack = as_attack(attack)
        self.view = check_choice("view", view, VIEWS)
        self.steps = None if steps is None else check_integer("steps", steps, minimum=0)
        self.draws = check_integer("draws", draws, minimum=1)
        self.name = name or f"{self.attack.name} through {view}"
        # Whoever runs it would pad the defense, and a defense with padding around it is none.
        self.traits = replace(self.attack.traits, minimum_classes=2)

    @property
    def description(self) -> str:
        """The attack's, and the view."""
        return f"Through({self.attack.description}, view={self.view!r}, steps={self.steps}, draws={self.draws})"

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """The attack's reason, if any."""
        return self.attack.refusal(threat_model=threat_model, detector=detector)

    def generate(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Run the attack on the view, see :meth:`Attack.generate`.

        Raises:
            AttackRefusedError: The target is no test-time defense.
        """
        view = self._view(target.module, draw_seed(generator))
        with seeded_globals(draw_seed(generator)):
            return run_attack(
                self.attack,
                replace(target, module=view),
                inputs,
                labels,
                threat_model=threat_model,
                generator=generator,
            )

    def _view(self, module: nn.Module, seed: int) -> nn.Module:
        defense = binarized_defense(module)
        if defense is None:
            raise AttackRefusedError(
                f"{self.name}: got {type(module).__name__}, which is no test-time defense and not made of one; run "
                f"{self.attack.name} on it as it is"
            )
        view: nn.Module = defense
        if self.view != "plain":
            view = BPDA(defense, backward=self.view, steps=self.steps)
        elif self.steps is not None:
            view = defense.with_steps(self.steps)
        if self.draws > 1:
            view = EoT(view, draws=self.draws, seed=seed)
        counter = _counter(module)
        return view if counter is None else Counted(view, counter)


def _counter(module: nn.Module) -> PassCounter | None:
    return next((part.counter for part in module.modules() if isinstance(part, Counted)), None)
