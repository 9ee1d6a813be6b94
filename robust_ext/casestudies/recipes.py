"""Recipes: attacks around other attacks, and robust accuracy under a recipe."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.rows import query
from robust_ext.attacks.base import Attack, check_attack
from robust_ext.attacks.running import run_attack
from robust_ext.casestudies.base import Recipe
from robust_ext.core.cost import Cost, Costs
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import derive_seed
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors.base import Detector
from robust_ext.engine.code_digest import attack_code
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Block, Outcome, Probe, Run
from robust_ext.engine.store import Store
from robust_ext.engine.task import Check, Task, Work
from robust_ext.evaluations.binarization.defense import Defense

# Samples attacked at once, and queries of a random detector for each of its decisions.
_BATCH, _DRAWS = 32, 5


@dataclass(frozen=True, kw_only=True)
class RecipeRun(Run):
    """One recipe on the samples of a case study, with its detector or without."""

    kind: ClassVar[str] = "case_study"

    given: EvaluationInputs  # With the module that decides
    shown: nn.Module  # The module to attack
    attack: Attack
    defense: Defense | None
    seed: int

    def digests(self) -> dict[str, Any]:
        """Return the digests of the samples, the judging module and the attack's code."""
        return {**self.given.digests, "attack_code": attack_code(self.attack)}

    def costs(self) -> Costs:
        """Return the cost of the attack on a sample, and of its verification; a detector's queries are unknown."""
        found = self.attack.cost(self.given.threat_model, classes=self.given.logits.shape[1])
        known = found is not None and self.defense is None
        attack = (found or Cost()) + Cost(unknown=() if known else (self.title,))
        return {("attack", self.title): attack, ("verify", None): Cost(1)}

    def probe(self) -> Probe:
        """Return the attacked module with the first inputs."""
        return self.shown, self.given.inputs, len(self.blocks[0])

    def place(self) -> torch.device:
        """Return the inputs' device."""
        return self.given.inputs.device

    def common(self) -> Sequence[object]:
        """Return the modules, the detector and the attack."""
        detector = () if self.defense is None else (self.defense.detector,)
        return (self.given.module, self.shown, *detector, self.attack)

    def samples(self) -> Sequence[Tensor]:
        """Return the tensors of the evaluation."""
        return self.given.samples

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """Return the rows, and whether each is classified correctly."""
        inputs, labels = self.given.rows(rows)
        return {"inputs": inputs, "labels": labels, "correct": self.given.correct[rows.start : rows.stop].tolist()}

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """Attack these rows in one task."""
        given, defense, inputs, sample = self.given, self.defense, needs["inputs"], self.given.ids[rows[0]]
        target = Target(
            module=self.shown,
            bounds=given.bounds,
            classes=given.logits.shape[1],
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
            defended=None if defense is None else defense.defended(self.shown),
        )
        task = Task(
            attack=self.attack,
            target=target,
            inputs=inputs,
            labels=needs["labels"],
            threat_model=given.threat_model,
            stream=(self.seed, sample, "case study", self.attack.name),
            counted=self.shown,
        )
        seed = derive_seed(self.seed, sample, "case study verdict")
        rejects = None if defense is None else partial(defense.rejects, seed=seed)
        attempt = yield task, Check(module=given.module, name=self.attack.name, rejects=rejects)
        return Block.of(rows, given.ids, attempt, attempt.verified.candidates, correct=needs["correct"])


def plan_recipe(
    recipe: Recipe, attack: Attack, given: EvaluationInputs, module: nn.Module, detector: Detector | None, *, seed: int
) -> RecipeRun:
    """Return the run of a recipe on a module; a recipe in train mode attacks and judges a copy in that mode."""
    identity = {"attack": describe(attack), "seed": seed}
    defense = None if detector is None else Defense(detector=detector, inverted=False, draws=_DRAWS)
    if recipe.train_mode:
        module = copy.deepcopy(module).train()
        with torch.no_grad():
            given = replace(given, module=module, logits=module(given.inputs))
    return RecipeRun(
        key=f"{attack.name}-accuracy",
        title=f"{attack.name}-accuracy",
        blocks=given.blocks(_BATCH),
        identity=identity,
        given=given,
        shown=module,
        attack=attack,
        defense=defense,
        seed=seed,
    )


def measured_accuracy(outcome: Outcome[RecipeRun]) -> dict[str, float]:
    """Return robust accuracy by candidates alone (``"claimed"``), and with clean errors not robust (``"verified"``).

    Evaluations that look at candidates only report the first: an attack that corrects an error of the classifier
    raises it. With a detector, a rejected candidate counts as robust.
    """
    kept = [record["outcome"] != "found" for record in outcome.records]
    sound = [record["correct"] and held for record, held in zip(outcome.records, kept, strict=True)]
    return {"claimed": sum(kept) / len(kept), "verified": sum(sound) / len(sound)}


@settings_class
class _Wrapped(Settings, Attack):
    """An attack with a change around it.

    Attributes:
        words: The change, for the name.
    """

    words: ClassVar[str]

    attack: Attack = setting(help="The attack to run, see :func:`robust_ext.as_attack`.", check=check_attack)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("name", f"{self.attack.name} {self.words}")
        self._set("traits", self.attack.traits)

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """Return the attack's reason, if any."""
        return self.attack.refusal(threat_model=threat_model, detector=detector)


@settings_class
class PredictedLabels(_Wrapped):
    """Any attack, given the predicted classes of its inputs instead of their labels.

    It moves a misclassified input away from the wrong class, and may correct the error. Many attacks do so when they
    get no labels.

    Example:
        >>> from robust_ext.attacks.apgd import APGD
        >>> PredictedLabels(attack=APGD()).name
        'APGD-CE on predicted labels'
    """

    words: ClassVar[str] = "on predicted labels"

    def search(self, target: Target, inputs: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """Query the whole batch once, then run the attack; see :meth:`Attack.search`."""
        return run_attack(self.attack, target, inputs, query(target, inputs).argmax(1), **given)


@settings_class
class ThroughOtherLogits(_Wrapped):
    """Any attack, run on other logits of a defense than those that decide; a subclass defines them.

    The attack sees another module, which shares all parts with the target except the exchanged ones; the target
    decides and does not change. A target without such parts refuses the attack.
    """

    @abstractmethod
    def other(self, part: nn.Module) -> nn.Module | None:
        """Return the module to show instead of a part of the target, or None to keep the part."""

    def search(self, target: Target, inputs: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """See :meth:`Attack.search`."""
        shown = self._exchanged(target.module)
        if shown is None:
            raise AttackRefusedError(
                f"{self.name}: got {type(target.module).__name__}, in which there is nothing to exchange; run "
                f"{self.attack.name} on it instead"
            )
        return run_attack(self.attack, replace(target, module=shown), inputs, labels, **given)

    def _exchanged(self, module: nn.Module) -> nn.Module | None:
        """Return the module with its parts exchanged, which shares all others and its hooks; None if it has none."""
        made = self.other(module)
        if made is not None:
            return made
        parts = {name: self._exchanged(part) for name, part in module.named_children()}
        if all(part is None for part in parts.values()):
            return None
        made = copy.copy(module)
        children = {name: part or module._modules[name] for name, part in parts.items()}
        vars(made)["_modules"] = {**module._modules, **children}
        return made
