"""Any attack, adapted to what it attacks: through gradients that are of use, averaged where there is randomness.

Sources: Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018), section 4, for BPDA
and EoT; Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3, for the
gradients of test-time defenses; Tramer et al., "On Adaptive Attacks to Adversarial Example Defenses" (2020), section 8,
for the mean over noise where gradients are shattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.best import best_queried
from robust_ext.attacks._common.rows import project, runner_up
from robust_ext.attacks.base import Attack, check_attack, draw_seed
from robust_ext.attacks.running import map_points, run_attack
from robust_ext.core.cost import Cost
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.target import Counted, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_features import Bare, StandIn, binarized_defense
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.bpda import BACKWARDS, BPDA
from robust_ext.models.eot import EoT
from robust_ext.models.fitted_backward import COPIES, fit_backward
from robust_ext.models.forms import float_twin
from robust_ext.models.layer_backward import LAYER_BACKWARDS, Backward, find_layers, other_backward

_FLAGS = {
    "keep_best": "best point kept",
    "one_by_one": "one by one",
    "aimed": "aimed at the second class",
    "projected": "projected",
}
_OF_DEFENSES = BACKWARDS[len(LAYER_BACKWARDS) :]
FITTED, TWIN = "fitted", "float_twin"
_LAYERED = ("straight_through", FITTED, TWIN)


@settings_class
class AdaptedAttack(Settings, Attack):
    """Any attack, on its target with other gradients: BPDA, EoT, smoothing, logits that do not saturate.

    The target is a classifier, a test-time defense, a classifier with a detector, or the classifier of a binarization
    test of one of them: the same attack that is used on a model can be tested. Predictions are the target's, and
    candidates are judged on the target itself. A queried row is counted once, regardless of draws and retraced steps.

    Example:
        >>> from robust_ext.attacks.apgd import APGD
        >>> AdaptedAttack(attack=APGD(), bpda="net.quantise", eot=8).name
        'APGD-CE through BPDA net.quantise, EoT 8'
    """

    limits_entries = True  # It runs its attack by run_attack.

    attack: Attack = setting(help="What is run, see :func:`robust_ext.as_attack`.", check=check_attack)
    bpda: str | None = setting(
        default=None,
        help="Name of a layer that gets another backward pass, as in ``model.named_modules()``, or the end of it "
        '(``"net.quantise"``), or several with commas between them: that of the identity, or the one that '
        "``gradient_mode`` names.",
    )
    gradient_mode: str = setting(
        default="identity",
        help='A choice of ``backward`` of :class:`robust_ext.models.bpda.BPDA`. ``"straight_through"``: that of the '
        'layer, or of the whole target where none is named. ``"fitted"``: that of a small network that is fitted to '
        "what the layer, or the whole target, does near the inputs, see "
        ':func:`robust_ext.models.fitted_backward.fit_backward`. ``"float_twin"``: that of the quantised layer or '
        "target in float32, see :func:`robust_ext.models.forms.float_twin`. The others: that of a test-time defense, "
        'where the target is one; ``"plain"`` for its own gradients.',
        choices=("plain", *BACKWARDS, FITTED, TWIN),
    )
    steps: int | None = setting(
        default=None,
        help="Inner steps of a test-time defense that gradients are taken from; its own when left out.",
        minimum=0,
    )
    eot: int = setting(
        default=1,
        help="Draws over which logits and gradients are averaged, see :class:`robust_ext.models.eot.EoT`; 1 for none.",
        minimum=1,
    )
    noise: float = setting(
        default=0.0,
        help="Standard deviation of Gaussian noise, relative to epsilon (of linf, else of an input's value in a "
        "perturbation of size epsilon): gradients are the mean of those at ``eot`` noisy inputs, logits those of the "
        "input. 0 for none.",
        minimum=0,
    )
    temperature: float = setting(
        default=1.0, help="Divisor of the logits; above 1 where they saturate the attack's loss.", above=0
    )
    keep_best: bool = setting(
        default=False,
        help="Whether the queried misclassified point within ball and bounds of highest margin, if any, replaces the "
        "attack's result for a row.",
    )
    one_by_one: bool = setting(default=False, help="Whether rows are attacked one at a time.")
    aimed: bool = setting(
        default=False,
        help="Whether the attack is given the second most likely class at each input, for one that aims at its labels.",
    )
    projected: bool = setting(default=False, help="Whether its results are projected onto the ball and the bounds.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("name", f"{self.attack.name} through {adaptation_words(**self.adaptation)}")
        # Whoever runs it would pad the target, and a defense with padding around it is none.
        traits = replace(self.attack.traits, minimum_classes=2)
        traits = replace(traits, leaves_ball=True) if self.noise else traits
        self._set("traits", replace(traits, batching="single", batch_dependent=False) if self.one_by_one else traits)

    @property
    def adaptation(self) -> dict[str, Any]:
        """All settings but the attack, by name."""
        return {name: value for name, value in self.to_dict().items() if name != "attack"}

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """The attack's reason, if any; of attacks on a detector, that only layers are replaced beneath it."""
        reason = self.attack.refusal(threat_model=threat_model, detector=detector)
        if reason is None and self.attack.traits.detector and self._averages:
            return (
                f"{self.name}: {self.attack.name} queries classifier and detector apart, and draws, noise and "
                "temperature are of logits alone; use bpda alone, or an attack on logits"
            )
        return reason

    def pursues(self, criterion: Criterion) -> bool:
        """The attack's; one that is given the class that comes second takes no other criterion."""
        if self.aimed and (criterion.aims or criterion.ranks):
            raise AttackRefusedError(f"{self.name}: is aimed at the second most likely class; choose aimed=False")
        return self.attack.pursues(criterion)

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """See :meth:`Attack.cost`; each draw counts, and those of a gradient, where there are several, twice."""
        found = self.attack.cost(threat_model, classes=classes)
        if found is None:
            return None
        noisy = self.eot if self.noise else 0
        again = noisy + self.eot if self.eot > 1 else noisy
        fit = COPIES if self.gradient_mode == FITTED else 0
        return Cost(found.forward * self.eot + found.backward * again + fit, found.backward * self.eot)

    @property
    def _averages(self) -> bool:
        return self.eot > 1 or self.noise > 0 or self.temperature != 1

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run the attack on the target with the chosen gradients, see :meth:`Attack.search`.

        Raises:
            AttackRefusedError: The target is no test-time defense, where one is needed.
            InvalidArgumentError: The layer is not in the target.
        """
        seed, width = draw_seed(generator), _deviation(threat_model, inputs[:1].numel())
        size = 1 if self.one_by_one else max(len(inputs), 1)
        found = []
        with self._other_backward(target, inputs, threat_model, seed), seeded_globals(draw_seed(generator)):
            shown = self._shown(target, seed, deviation=self.noise * width)
            for start in range(0, max(len(inputs), 1), size):
                rows = slice(start, start + size)
                part = map_points(shown, itemgetter(rows))
                given = {"threat_model": threat_model, "generator": generator}
                found.append(self._attacked(part, inputs[rows], labels[rows], given))
        return torch.cat(found)

    def _attacked(self, target: Target, inputs: Tensor, labels: Tensor, given: dict[str, Any]) -> Tensor:
        aims, model = runner_up(target, inputs, labels) if self.aimed else labels, given["threat_model"]
        watch = best_queried(target, inputs, labels, model) if self.keep_best else nullcontext()
        with watch as best:
            found = run_attack(self.attack, target, inputs, aims, **given)
        if self.projected and found.shape == inputs.shape:
            found = project(found.to(inputs), inputs, model)
        return found if best is None else best.or_else(found)

    @contextmanager
    def _other_backward(self, target: Target, inputs: Tensor, threat_model: ThreatModel, seed: int) -> Iterator[None]:
        """The target's layers, or all of it, have another backward pass meanwhile, wherever they are called."""
        mode: Backward = self.gradient_mode if self.gradient_mode in LAYER_BACKWARDS else "identity"
        layers: dict[str, nn.Module] = {}
        if self.bpda is not None:
            whole = target.module if target.defended is None else nn.ModuleList([target.module, target.defended])
            layers = find_layers(whole, self.bpda, argument="bpda")
        elif mode != "identity" and binarized_defense(target.module) is None:
            layers = {"": target.module}
        elif self.gradient_mode in (FITTED, TWIN):
            # Of a binarized classifier, whose rows have readouts of their own, what all of them share.
            parts = [part.features for part in target.module.modules() if isinstance(part, BinarizedClassifier)]
            layers = {"": parts[0] if parts else target.module}
        if self.gradient_mode in (FITTED, TWIN) and len(inputs):
            if len(layers) != 1:
                raise AttackRefusedError(f"{self.name}: got several layers, and one at a time can be fitted")
            (layer,) = layers.values()
            twin = float_twin(layer) if self.gradient_mode == TWIN else None
            if twin is None and self.gradient_mode == TWIN:
                raise AttackRefusedError(f"{self.name}: {type(layer).__name__} has no quantised layers")
            mode = twin or fit_backward(target.module, layer, inputs, threat_model=threat_model, seed=seed)
        with other_backward(target.module, layers, mode) as check_called:
            yield
        check_called()

    def _shown(self, target: Target, seed: int, *, deviation: float) -> Target:
        """Return the target of the attack: the given one where only a layer of it has another backward pass."""
        module = target.module
        defense = binarized_defense(module)
        layered = self.bpda is not None or self.gradient_mode in _LAYERED
        if defense is None:
            others = layered or self._averages or self.keep_best or self.one_by_one or self.aimed or self.projected
            if self.steps is not None or self.gradient_mode in _OF_DEFENSES or not others:
                raise AttackRefusedError(
                    f"{self.name}: got {type(module).__name__}, which is no test-time defense and not made of one; run "
                    f"{self.attack.name} on it as it is, or name a layer (bpda) or draws (eot)"
                )
            if not self._averages:
                return target
        inside: nn.Module = Bare(module) if defense is None else self._of_defense(defense)
        plain = inside
        if self.eot > 1:
            inside = EoT(inside, draws=self.eot, seed=seed)
        if deviation:
            inside = BPDA(inside, backward=EoT(_Noisy(plain, deviation), draws=self.eot, seed=seed))
        # Of a defense, what its inner steps cost is counted where it is not counted as a whole.
        whole = defense is None or any(isinstance(part, Counted) for part in module.modules())
        counter = target.counter if whole else None
        shown = StandIn(module, inside, counter=counter, temperature=self.temperature)
        defended = None if target.defended is None else target.defended.over(shown)
        return replace(target, module=shown, defended=defended)

    def _of_defense(self, defense: AdaptiveDefense) -> nn.Module:
        if self.gradient_mode == "plain" or (self.gradient_mode in _LAYERED and self.bpda is not None):
            return Bare(defense if self.steps is None else defense.with_steps(self.steps))
        if self.gradient_mode == "straight_through" and self.steps is not None:
            defense = defense.with_steps(self.steps)
        return BPDA(defense, backward=self.gradient_mode, steps=self.steps)


def adaptation_words(
    *,
    bpda: str | None = None,
    gradient_mode: str = "identity",
    steps: int | None = None,
    eot: int = 1,
    noise: float = 0.0,
    temperature: float = 1.0,
    **flags: bool,
) -> str:
    """Settings of an :class:`AdaptedAttack` as text, for its name.

    Example:
        >>> adaptation_words(bpda="quantise", eot=8), adaptation_words(gradient_mode="trajectory")
        ('BPDA quantise, EoT 8', 'trajectory')
    """
    words = {
        gradient_mode: bpda is None and gradient_mode != "identity",
        f"BPDA {bpda}{'' if gradient_mode == 'identity' else f' {gradient_mode}'}": bpda is not None,
        f"{steps} steps": steps is not None,
        f"EoT {eot}": eot > 1,
        f"noise {noise:g}": noise > 0,
        f"temperature {temperature:g}": temperature != 1,
        **{_FLAGS[name]: chosen for name, chosen in flags.items()},
    }
    return ", ".join(word for word, chosen in words.items() if chosen) or gradient_mode


def adapted_text(attack: str, **settings: Any) -> str:
    """The text that names an attack, as :func:`robust_ext.as_attack` takes it, adapted.

    Example:
        >>> adapted_text("foolbox:LinfPGD(steps=20)", bpda="quantise", eot=8)
        "robust_ext:AdaptedAttack(attack='foolbox:LinfPGD(steps=20)', bpda='quantise', eot=8)"
    """
    given = ", ".join(f"{name}={value!r}" for name, value in {"attack": attack, **settings}.items())
    return f"robust_ext:AdaptedAttack({given})"


class _Noisy(nn.Module):
    """A module at noisy inputs; the noise is of the global generator, which EoT seeds."""

    def __init__(self, module: nn.Module, deviation: float) -> None:
        super().__init__()
        self.module = module
        self.deviation = deviation
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x + self.deviation * torch.randn_like(x))
        return out


def _deviation(threat_model: ThreatModel, values: int) -> float:
    """Epsilon as the size of the change of each of that many values."""
    return float(threat_model.epsilon / {"linf": 1.0, "l2": values**0.5, "l1": values}[threat_model.norm])
