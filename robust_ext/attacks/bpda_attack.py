"""An attack on a test-time defense through gradients that are of use: BPDA, and the mean over the defense's draws.

Source of the gradient modes: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses"
(2022), section 3.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, check_attack, draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.target import Counted, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.models.adaptive_features import binarized_defense
from robust_ext.models.bpda import BACKWARDS, BPDA
from robust_ext.models.eot import EoT


@settings_class
class BPDAAttack(Settings, Attack):
    """Any attack, on the test-time defense that is attacked with another backward pass.

    The target is a defense, or the classifier of a binarization test of one: the same attack that is used on a defense
    can be tested. A queried row is counted once, whatever is drawn and retraced for it.

    Example:
        >>> from robust_ext.attacks.apgd import APGD
        >>> BPDAAttack(attack=APGD(), gradient_mode="trajectory").name
        'APGD-CE through trajectory'
    """

    attack: Attack = setting(help="What is run, see :func:`robust_ext.as_attack`.", check=check_attack)
    gradient_mode: str = setting(
        default="identity",
        help='``"plain"`` for the defense\'s own gradients, or a choice of ``backward`` of '
        ":class:`robust_ext.models.bpda.BPDA`.",
        choices=("plain", *BACKWARDS),
    )
    steps: int | None = setting(
        default=None,
        help="Inner steps of the defense that gradients are taken from; the defense's own when left out.",
        minimum=0,
    )
    draws: int = setting(
        default=1,
        help="Draws that are averaged over, see :class:`robust_ext.models.eot.EoT`; 1 for none.",
        minimum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("name", f"{self.attack.name} through {self.gradient_mode}")
        # Whoever runs it would pad the defense, and a defense with padding around it is none.
        self._set("traits", replace(self.attack.traits, minimum_classes=2))

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """The attack's reason, if any."""
        return self.attack.refusal(threat_model=threat_model, detector=detector)

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Run the attack on the defense with the chosen backward pass, see :meth:`Attack.search`.

        Raises:
            AttackRefusedError: The target is no test-time defense.
        """
        module = self._differentiable(target.module, draw_seed(generator))
        with seeded_globals(draw_seed(generator)):
            return run_attack(
                self.attack,
                replace(target, module=module),
                inputs,
                labels,
                threat_model=threat_model,
                generator=generator,
            )

    def _differentiable(self, module: nn.Module, seed: int) -> nn.Module:
        defense = binarized_defense(module)
        if defense is None:
            raise AttackRefusedError(
                f"{self.name}: got {type(module).__name__}, which is no test-time defense and not made of one; run "
                f"{self.attack.name} on it as it is"
            )
        out: nn.Module = defense
        if self.gradient_mode != "plain":
            out = BPDA(defense, backward=self.gradient_mode, steps=self.steps)
        elif self.steps is not None:
            out = defense.with_steps(self.steps)
        if self.draws > 1:
            out = EoT(out, draws=self.draws, seed=seed)
        counter = next((part.counter for part in module.modules() if isinstance(part, Counted)), None)
        return out if counter is None else Counted(out, counter)
