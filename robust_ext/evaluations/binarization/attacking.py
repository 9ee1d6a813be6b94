"""The attack on a group of problems: planted points re-checked, the attack run, every candidate verified, canaries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Spent
from robust_ext.core.examples import Example
from robust_ext.core.random import derive_seed
from robust_ext.core.target import Counted, Target
from robust_ext.engine.progress import Phases
from robust_ext.engine.store import Store
from robust_ext.engine.task import Attempt, Check, Task, Work
from robust_ext.engine.verify import LOST
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.binarized import BinarizedClassifier, identifiable


@dataclass
class Attacked:
    """The results of an attack on a group of problems: records and verified candidates ``(...)``, by id."""

    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    candidates: dict[int, Tensor] = field(default_factory=dict)
    spent: dict[str, Spent] = field(default_factory=lambda: {"attack": Spent(), "verify": Spent()})
    curves: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)  # Of each call of the attack

    def add(self, spent: Mapping[str, Spent]) -> None:
        """Add what more was spent."""
        for phase, more in spent.items():
            self.spent[phase] = Spent.total([self.spent[phase], more])


@dataclass(frozen=True, kw_only=True)
class ProblemAttack:
    """An attack on planted problems, with a detector or without."""

    attack: Attack
    features: Counted
    settings: BinarizationSettings
    canaries: frozenset[int] = frozenset()  # Ids of samples that are also posed with the wrong label.
    defense: Defense | None = None
    depth: float | None = None  # Where the boundary lies beyond the planted points; None where the settings place it.

    def run(self, problems: Problems, *, together: bool = False) -> Work[Attacked]:
        """Run the attack on separable problems, together where its treatment of rows allows, and verify candidates.

        An ``outcome`` is one of :data:`robust_ext.engine.verify.OUTCOMES`, or ``"not_planted"`` where no planted
        point is adversarial through the whole model.
        """
        result, traits = Attacked(), self.attack.traits
        together = (
            together
            or traits.batching == "full"
            or (not traits.one_by_one and identifiable(problems.inputs, self.settings.threat_model))
        )
        everything = list(range(len(problems.samples)))
        for rows in [everything] if together else [[row] for row in everything]:
            if rows:
                yield from self._batch(problems.select(rows), result)
        return result

    def _batch(self, problems: Problems, result: Attacked) -> Work[None]:
        module, settings = self._posed(problems, judge=True), self.settings
        phases = Phases(self.features.counter)
        seed = derive_seed(settings.seed_of_judge, problems.samples[0], "recheck") // 2
        survivors = count_planted(module, problems, defense=self.defense, seed=seed).tolist()
        references = _count_adversarial(module, problems.references, self.defense, seed).tolist()
        phases.stop("verify")
        result.add(phases.spent)
        attempt = yield from self._attempt(problems, 0, self._purpose, result)
        checked = attempt.verified
        reach = 1 + (module.scores(checked.candidates, checked.logits) - problems.edge) / problems.gap
        # In one copy from the device.
        distances, reaches = torch.stack([checked.distances, reach]).tolist()
        traces = [None] * len(problems.samples) if attempt.trace is None else attempt.trace.rows()
        if attempt.trace is not None:
            result.curves.append(attempt.trace.curve)
        for row, sample in enumerate(problems.samples):
            usable = checked.outcomes[row] not in ("not_finite", "out_of_bounds", *LOST)
            result.records[sample] = {
                "outcome": checked.outcomes[row] if survivors[row] else "not_planted",
                "planted": survivors[row],
                "references": references[row],
                "distance": _plain(distances[row]),
                "reach": _plain(reaches[row]) if usable else None,
                "canary": None,
                "trace": traces[row],
                **({} if attempt.error is None else {"error": attempt.error}),
            }
            result.candidates[sample] = checked.candidates[row]
        chosen = [row for row, sample in enumerate(problems.samples) if sample in self.canaries and survivors[row]]
        if chosen:
            yield from self._pose_canaries(problems.select(chosen), result)

    def _pose_canaries(self, problems: Problems, result: Attacked) -> Work[None]:
        attempt = yield from self._attempt(problems, 1, "canary", result)
        for sample, outcome in zip(problems.samples, attempt.verified.outcomes, strict=True):
            found = "repaired" if outcome == "not_adversarial" else "kept"
            result.records[sample]["canary"] = found if attempt.error is None else "lost"

    @property
    def _purpose(self) -> str:
        """Names the random stream of the attack."""
        return "attack" if self.depth is None else f"depth {self.depth:g}"

    def _posed(self, problems: Problems, *, judge: bool = False) -> BinarizedClassifier:
        batching = "full" if self.attack.traits.batching == "full" else "any"
        return problems.classifier(self.features, self.settings, depth=self.depth, batching=batching, judge=judge)

    def _attempt(self, problems: Problems, label: int, purpose: str, result: Attacked) -> Work[Attempt]:
        """Run the attack on all problems at once, each with this label."""
        settings, defense = self.settings, self.defense
        module, judge = self._posed(problems), self._posed(problems, judge=True)
        defended = None if defense is None else defense.defended(module)
        shown, classes = (module, 2) if defense is None or defended is None else defense.exposed(defended)
        target = Target(
            module=shown,
            bounds=settings.threat_model.bounds,
            classes=classes,
            input_shape=tuple(problems.inputs.shape[1:]),
            device=problems.inputs.device,
            defended=defended,
            counter=self.features.counter,
            references=problems.references if problems.references.shape[1] else None,
        )
        task = Task(
            attack=self.attack,
            target=target,
            inputs=problems.inputs,
            labels=torch.full((len(problems.samples),), label, dtype=torch.int64, device=problems.inputs.device),
            threat_model=settings.threat_model,
            stream=(settings.seed, problems.samples[0], purpose, self.attack.name),
        )
        canary, rejects = purpose == "canary", None
        if defense is not None and not canary:
            seed = derive_seed(settings.seed_of_judge, problems.samples[0], "verdict", self.attack.name)
            rejects = partial(defense.rejects, seed=seed)
        # A canary judges only what the attack returns.
        attempt = yield task, Check(module=judge, name=self.attack.name, rejects=rejects, witnessed=not canary)
        result.add(attempt.spent)
        return attempt


def count_planted(
    module: BinarizedClassifier, problems: Problems, *, defense: Defense | None = None, seed: int = 0
) -> Tensor:
    """Count the planted points of each problem that are adversarial through the whole model in this batch, ``(B,)``.

    None counts where the clean sample itself is not class 0. With a detector, they must not be rejected either.
    """
    clean = _predicted(module, problems.inputs, 0)
    counts: Tensor = _count_adversarial(module, problems.planted, defense, seed) * clean
    return counts


def _count_adversarial(module: nn.Module, points: Tensor, defense: Defense | None, seed: int) -> Tensor:
    """Count the points ``(B, n, ...)`` of each row that are class 1 and not rejected, ``(B,)``."""
    counts = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    for number, column in enumerate(points.unbind(1)):
        adversarial = _predicted(module, column, 1)
        if defense is not None:
            adversarial &= ~defense.rejects(column, seed=seed + number)
        counts += adversarial
    return counts


def _predicted(module: nn.Module, points: Tensor, label: int) -> Tensor:
    """Return a mask of points of this class, bool ``(n,)``; False where logits are not finite."""
    with torch.no_grad():
        logits: Tensor = module(points)
    return (logits.argmax(1) == label) & torch.isfinite(logits).all(1)


def _plain(number: float) -> float | None:
    return number if number - number == 0 else None


# Samples of each attack that the report shows.
_EXAMPLES = 3


def example_arrays(problems: Problems, results: Mapping[str, Attacked], bounds: tuple[float, float]) -> dict[str, Any]:
    """Examples for the report, as arrays to be kept."""
    about: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for name, result in results.items():
        for row, sample in enumerate(problems.samples[:_EXAMPLES]):
            arrays[f"clean{len(about)}"] = problems.inputs[row].cpu().numpy()
            arrays[f"candidate{len(about)}"] = result.candidates[sample].cpu().numpy()
            arrays[f"planted{len(about)}"] = problems.planted[row, 0].cpu().numpy()
            outcome = result.records[sample]["outcome"]
            about.append({"attack": name, "sample": sample, "outcome": outcome, "bounds": bounds})
    return {"about": np.array(json.dumps(about)), **arrays}


def load_examples(store: Store) -> list[Example]:
    """The examples that are kept; none without any."""
    kept = store.load("examples")
    if kept is None:
        return []
    return [
        # Folders of versions before planted points were shown have none.
        Example(
            **about | {"bounds": tuple(about["bounds"])},
            clean=kept[f"clean{i}"],
            planted=kept.get(f"planted{i}"),
            candidate=kept[f"candidate{i}"],
        )
        for i, about in enumerate(json.loads(str(kept["about"])))
    ]
