"""Robust accuracy under a recipe, measured by candidates alone, as its authors do, and with clean errors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.casestudies.base import Recipe
from robust_ext.core.cost import Cost, Costs
from robust_ext.core.random import derive_seed
from robust_ext.core.target import Target
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
        """Those of the samples and the module that judges, and the attack's code."""
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
