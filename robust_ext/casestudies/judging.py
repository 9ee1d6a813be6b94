"""The judgement of one case study: its mechanism, and robust accuracy and the binarization test of both recipes."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.casestudies.base import CaseStudy, Recipe, Trained
from robust_ext.casestudies.training import CaseData, fitted_detector, trained_defense
from robust_ext.core.cost import Cost, Costs, Spent
from robust_ext.core.errors import InconsistentModelError
from robust_ext.core.random import derive_seed
from robust_ext.core.target import Target
from robust_ext.detectors.base import Detector
from robust_ext.engine.code_digest import attack_code
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.progress import Progress
from robust_ext.engine.run import Block, Outcome, Probe, Run
from robust_ext.engine.running import run_all
from robust_ext.engine.store import Store
from robust_ext.engine.task import Check, Task, Work, Worker, drive
from robust_ext.evaluations.binarization import binarization_test
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.verdict import REPAIRED
from robust_ext.evaluations.caveats import Part, parts_of
from robust_ext.registry.attack import as_attack

# Samples attacked at once, and queries of a random detector for each of its decisions.
_BATCH, _DRAWS = 32, 5
_TEST = ("score", "score_interval", "random_score", "random_score_interval", "samples", "canaries", "depth", "depths")


@dataclass(frozen=True, kw_only=True)
class _RecipeRun(Run):
    """One recipe on the samples of a case study, with its detector or without."""

    kind: ClassVar[str] = "case_study"

    given: EvaluationInputs  # With the module that decides
    shown: nn.Module  # The module to attack
    attack: Attack
    defense: Defense | None
    seed: int

    def digests(self) -> dict[str, Any]:
        return {**self.given.digests, "attack_code": attack_code(self.attack)}

    def costs(self) -> Costs:
        # What a detector is queried for is unknown.
        found = self.attack.cost(self.given.threat_model, classes=self.given.logits.shape[1])
        known = found is not None and self.defense is None
        attack = (found or Cost()) + Cost(unknown=() if known else (self.title,))
        return {("attack", self.title): attack, ("verify", None): Cost(1)}

    def probe(self) -> Probe:
        return self.shown, self.given.inputs, len(self.blocks[0])

    def place(self) -> torch.device:
        return self.given.inputs.device

    def common(self) -> Sequence[object]:
        detector = () if self.defense is None else (self.defense.detector,)
        return (self.given.module, self.shown, *detector, self.attack)

    def samples(self) -> Sequence[Tensor]:
        return self.given.samples

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        inputs, labels = self.given.rows(rows)
        return {"inputs": inputs, "labels": labels, "correct": self.given.correct[rows.start : rows.stop].tolist()}

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
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


def _plan(
    recipe: Recipe, attack: Attack, given: EvaluationInputs, module: nn.Module, detector: Detector | None, *, seed: int
) -> _RecipeRun:
    """Return the run of a recipe on a module; a recipe in train mode attacks and judges a copy in that mode."""
    if recipe.train_mode:
        module = copy.deepcopy(module).train()
        with torch.no_grad():
            given = replace(given, module=module, logits=module(given.inputs))
    return _RecipeRun(
        key=f"{attack.name}-accuracy",
        title=f"{attack.name}-accuracy",
        blocks=given.blocks(_BATCH),
        identity={"attack": describe(attack), "seed": seed},
        given=given,
        shown=module,
        attack=attack,
        defense=None if detector is None else Defense(detector=detector, inverted=False, draws=_DRAWS),
        seed=seed,
    )


def measured_accuracy(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return robust accuracy by candidates alone (``"claimed"``), and with clean errors not robust (``"verified"``).

    Evaluations that look at candidates only report the first: an attack that corrects an error of the classifier
    raises it. With a detector, a rejected candidate counts as robust.
    """
    kept = [record["outcome"] != "found" for record in records]
    sound = [record["correct"] and held for record, held in zip(records, kept, strict=True)]
    return {"claimed": sum(kept) / len(kept), "verified": sum(sound) / len(sound)}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The work on one case study after another, and the time that it took."""

    data: CaseData
    device: torch.device
    seed: int
    worker: Worker
    isolation: Mapping[str, Any]
    bar: Progress | None
    outcomes: list[Outcome[_RecipeRun]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def entry(self, name: str, study: CaseStudy[Any], folder: Path | None) -> dict[str, Any]:
        """Train a defense, measure its mechanism, judge both recipes; return the entry of ``result.json``."""
        data, seed, begun, threat_model = self.data, self.seed, time.perf_counter(), study.threat_model(self.data.name)
        self._show(f"{study.title}: training")
        module = trained_defense(study, data, seed=seed, folder=folder)
        self.parts.append(Part("training", None, Spent(seconds=time.perf_counter() - begun)))
        self._show(f"{study.title}: mechanism", done=1)
        case = Trained(module=module, inputs=data.inputs, labels=data.labels, threat_model=threat_model, seed=seed)
        measurement = study.measure(case)
        detector = fitted_detector(study, module, data, threat_model, seed=seed)
        judged = study.judged(module, seed=seed)
        for part in (module, judged, detector):
            if part is not None:
                part.to(self.device)
        inputs, labels = data.inputs.to(self.device), data.labels.to(self.device)
        with torch.no_grad():
            logits = judged(inputs)
        given = EvaluationInputs(
            module=judged, inputs=inputs, labels=labels, logits=logits, ids=data.ids, threat_model=threat_model
        )
        recipes = {}
        for kind, recipe in (("weak", study.weak), ("right", study.right)):
            self._show(f"{study.title}: {kind} recipe", done=1)
            recipes[kind] = self._judged(kind, recipe, study, given, module, detector, folder)
        self._show(f"{study.title}: done", done=1)
        return {
            "name": name,
            "title": study.title,
            "source": study.source,
            "notes": study.notes,
            "epsilon": threat_model.epsilon,
            "clean_accuracy": float(given.correct.mean()),
            "mechanism": asdict(measurement),
            "published": {**asdict(study.published), "source": study.published_in},
            "causes": list(study.causes),
            "recipes": recipes,
            "seconds": time.perf_counter() - begun,
        }

    def _judged(
        self,
        kind: str,
        recipe: Recipe,
        study: CaseStudy[Any],
        given: EvaluationInputs,
        module: nn.Module,
        detector: Detector | None,
        folder: Path | None,
    ) -> dict[str, Any]:
        """Run a recipe on the samples and in the binarization test; return its entry."""
        attack = as_attack(recipe.attack, name=kind)
        run = _plan(recipe, attack, given, module, detector, seed=self.seed)
        outcome = drive(run_all([run], out=folder, progress=False, title=kind, whole=False), self.worker)[run.key]
        self.outcomes.append(outcome)
        model = module.train() if recipe.train_mode else study.parts(module)
        settings = {**study.settings, **self.isolation, "detector": detector, "sample_ids": given.ids}
        out = folder and folder / kind
        try:
            content = binarization_test(
                model, {kind: attack}, self.data.inputs, given.threat_model, out=out, seed=self.seed, **settings
            ).content
            self.parts.extend(parts_of(content))
            entry = entry_of(content)
        except InconsistentModelError as error:
            entry = {"refused": str(error), "verdict": "refused", "reason": "", "findings": [], "hardness": None}
            entry |= {"tests": {}, **dict.fromkeys(_TEST)}
        module.eval()
        return {
            "attack": attack.description,
            "words": recipe.words,
            "robust_accuracy": measured_accuracy(outcome.records),
            **entry,
            "flagged_by": flagged_by(entry, study.causes),
        }

    def _show(self, step: str, *, done: int = 0) -> None:
        if self.bar is not None:
            self.bar.advance(done)
            self.bar.phase(step)


def entry_of(content: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """Return the entry of a recipe from its binarization test; with a detector, from the worse of both tests.

    It is the attack with this ``number`` in the test.
    """
    attack = content["attacks"][number]
    tests = attack.get("tests", {})
    worst = min(tests.values(), key=lambda test: -1.0 if test["score"] is None else test["score"]) if tests else attack
    shown = {name: worst.get(name) for name in _TEST}
    if tests:
        shown["random_score"] = max((test["random_score"] or 0.0) for test in tests.values())
    return {
        "refused": None,
        "verdict": attack["verdict"],
        "reason": attack["reason"],
        "findings": content["findings"],
        "hardness": worst["hardness"],
        "tests": {name: {key: test.get(key) for key in ("verdict", *_TEST)} for name, test in tests.items()},
        **shown,
    }


def flagged_by(entry: Mapping[str, Any], causes: Sequence[str]) -> str | None:
    """Return the evidence against a recipe: a refusal, canaries, the score, or a finding of one of the causes."""
    if entry["refused"] is not None:
        return "refused"
    if (entry["canaries"] or {}).get("repaired", 0) >= REPAIRED:
        return "canaries"
    if entry["verdict"] == "failed":
        return "score"
    found = [finding["code"] for finding in entry["findings"] if finding["weight"] != "low"]
    return next((f"diagnosis: {code}" for code in found if code in causes), None)
