"""Robust accuracy of a case study under one of its recipes, measured as its authors do and as it should be."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.casestudies.base import Recipe
from robust_ext.core.cost import Cost, Costs
from robust_ext.core.random import derive_seed
from robust_ext.core.target import Target
from robust_ext.engine.code_digest import attack_code
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Block, Outcome, Probe, Run
from robust_ext.engine.store import Store
from robust_ext.engine.task import Check, Task, Work
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.references import draw_references, passed_inputs

# Samples attacked at once.
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class RecipeRun(Run):
    """One recipe on the samples of a case study, with its detector or without."""

    kind: ClassVar[str] = "case_study"

    given: EvaluationInputs  # With the module that judges
    shown: nn.Module  # The module that is attacked
    attack: Attack
    defense: Defense | None
    seed: int

    def costs(self) -> Costs:
        """The attack on a sample, and its verification; what a detector is queried for is measured."""
        found = self.attack.cost(self.given.threat_model, classes=self.given.logits.shape[1])
        known = found is not None and self.defense is None
        attack = (found or Cost()) + Cost(unknown=() if known else (self.title,))
        return {("attack", self.title): attack, ("verify", None): Cost(1)}

    def probe(self) -> Probe:
        """The module that is attacked, at the first inputs."""
        return self.shown, self.given.inputs, len(self.blocks[0])

    def place(self) -> torch.device:
        """The inputs' device."""
        return self.given.inputs.device

    def common(self) -> Sequence[object]:
        """The modules, the detector and the attack."""
        detector = () if self.defense is None else (self.defense.detector,)
        return (self.given.module, self.shown, *detector, self.attack)

    def samples(self) -> Sequence[Tensor]:
        """Those of the evaluation."""
        return self.given.samples

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """The rows, which of them are classified correctly, and the points that some attacks imitate."""
        given, references = self.given, None
        inputs, labels = given.rows(rows)
        if self.defense is not None and self.attack.traits.references:
            references = draw_references(given, rows, passed=self.passed, seed=self.seed)
        correct = given.correct[rows.start : rows.stop].tolist()
        return {"inputs": inputs, "labels": labels, "references": references, "correct": correct}

    @cached_property
    def passed(self) -> Tensor:
        """Which clean inputs the detector lets pass."""
        assert self.defense is not None
        return passed_inputs(self.given, detector=self.defense.detector, seed=self.seed)

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """One task: the attack on these rows."""
        given, defense, inputs = self.given, self.defense, needs["inputs"]
        target, module = self._target(inputs, needs["references"]), given.module
        rejects = None
        if defense is not None:
            rejects = partial(defense.rejects, seed=derive_seed(self.seed, given.ids[rows[0]], "case study verdict"))
        attempt = yield (
            Task(
                attack=self.attack,
                target=target,
                inputs=inputs,
                labels=needs["labels"],
                threat_model=given.threat_model,
                stream=(self.seed, given.ids[rows[0]], "case study", self.attack.name),
                counted=self.shown,
            ),
            Check(module=module, name=self.attack.name, rejects=rejects),
        )
        found = attempt.verified
        return Block.of(rows, given.ids, attempt, found.candidates, correct=needs["correct"])

    def _target(self, inputs: Tensor, references: Tensor | None) -> Target:
        given, defense = self.given, self.defense
        target = Target(
            module=self.shown,
            bounds=given.bounds,
            classes=given.logits.shape[1],
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
        )
        if defense is None:
            return target
        defended = defense.defended(self.shown)
        if defense.exposure == "reject":
            target = replace(target, module=defended, classes=target.classes + 1)
        return replace(target, defended=defended, references=references)


def plan_recipe(
    recipe: Recipe,
    attack: Attack,
    given: EvaluationInputs,
    *,
    module: nn.Module,
    defense: Defense | None,
    identity: Mapping[str, Any],
    key: str,
    seed: int,
) -> RecipeRun:
    """The run of a recipe; in train mode, where it states so, everything happens on a copy in that mode."""
    if recipe.train_mode:
        module = copy.deepcopy(module).train()
        with torch.no_grad():
            logits = module(given.inputs)
        given = replace(given, module=module, logits=logits)
    return RecipeRun(
        key=key,
        title=key,
        blocks=given.blocks(_BATCH),
        identity={**identity, "attack": describe(attack), "attack_code": attack_code(attack), "seed": seed},
        given=given,
        shown=module,
        attack=attack,
        defense=defense,
        seed=seed,
    )


def measured_accuracy(outcome: Outcome[RecipeRun]) -> dict[str, float]:
    """Robust accuracy of candidates alone (``"claimed"``), and with clean errors as not robust (``"verified"``).

    The first is what evaluations state that look at candidates only: an attack that corrects an error of the
    classifier raises it. With a detector, a candidate that is rejected counts as robust.
    """
    records: Sequence[Mapping[str, Any]] = outcome.records
    kept = [record["outcome"] != "found" for record in records]
    sound = [record["correct"] and held for record, held in zip(records, kept, strict=True)]
    return {"claimed": sum(kept) / len(kept), "verified": sum(sound) / len(sound)}
