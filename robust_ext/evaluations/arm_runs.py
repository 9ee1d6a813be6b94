"""Runs of arms: every attack once on the classifier, its candidates kept and scored by every detector."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Cost, Costs
from robust_ext.core.errors import AttackRefusedError, RobustExtError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors.base import Detector
from robust_ext.engine.code_digest import attack_code
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import RECORD, Block, candidates_name
from robust_ext.engine.store import Store
from robust_ext.engine.task import Check, Task, Work
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.detectors import NamedDetector, has_threshold
from robust_ext.evaluations.scored_runs import ScoredRun, pack_scores, score_points, scores_name
from robust_ext.models.defended import Defended

# Points for each row.
_REFERENCES = 4
# Rows that a detector decides at once.
_DECIDED = 250


def passed_inputs(given: EvaluationInputs, *, detector: Detector, seed: int) -> Tensor:
    """Return a mask of the clean inputs that a detector accepts, bool ``(N,)``."""
    with seeded_globals(derive_seed(seed, "arm references")):
        return ~torch.cat([detector.decide(batch) for batch in torch.split(given.inputs, _DECIDED)])


def draw_references(
    given: EvaluationInputs, rows: Sequence[int], *, passed: Tensor, seed: int, count: int = _REFERENCES
) -> Tensor | None:
    """Draw points that attacks imitate, ``(n, count, ...)``: inputs of other classes among those that ``passed``.

    A row's points depend on the seed and the row, not on the rows next to it. None where a row has too few.
    """
    predicted, drawn = given.logits.argmax(1), []
    for row in rows:
        others = (passed & (predicted != predicted[row])).nonzero().squeeze(1)
        if len(others) < count:
            return None
        order = torch.randperm(len(others), generator=stream(seed, row, "arm references"))[:count]
        drawn.append(given.inputs[others[order.to(others.device)]])
    return torch.stack(drawn)


@dataclass(frozen=True, kw_only=True)
class ArmRun(ScoredRun):
    """One run of an attack; minimum-norm attacks are run once for all the budgets they are judged by."""

    attack: Attack
    threat_model: ThreatModel  # What it is given
    arms: tuple[Arm, ...]  # The arms that are judged by its candidates
    adaptive_to: NamedDetector | None = None  # The detector that it attacks too

    @property
    def holds(self) -> dict[str, str]:
        """The run, every detector, and every budget."""
        return {**super().holds, **{f"arm {arm.name}": arm.name for arm in self.arms}}

    def costs(self) -> Costs:
        """The attack on a sample, and its verification; what a detector is queried for is measured."""
        given = self.given
        found = self.attack.cost(self.threat_model, classes=given.logits.shape[1])
        if found is None or self.adaptive_to is not None:
            found = (found or Cost()) + Cost(unknown=(self.title,))
        return {("attack", self.title): found, ("verify", None): Cost(1)}

    def digests(self) -> dict[str, Any]:
        """Return the digests of the evaluation and the attack's code."""
        return {**super().digests(), "attack_code": attack_code(self.attack)}

    def kept(self) -> int:
        """A candidate as it is, and its record."""
        return 4 * self.given.inputs[0].numel() + RECORD

    def points(self, rows: range, store: Store) -> Tensor:
        """The candidates of a block."""
        kept = store.load(candidates_name(rows[0]))
        assert kept is not None
        return torch.from_numpy(kept["candidates"]).to(self.given.inputs.device)

    def common(self) -> Sequence[object]:
        """The classifier, the detectors and the attack."""
        return (*super().common(), self.attack)

    def tolerates(self, error: RobustExtError) -> bool:
        """An attack may be refused by one detector and not by another, which goes into the result."""
        return self.adaptive_to is not None and isinstance(error, AttackRefusedError)

    def prepare(self, store: Store) -> Work[None]:
        """Raise where the attack does not fit the detector."""
        detector = self.adaptive_to
        if detector is not None and not has_threshold(detector.detector):
            raise AttackRefusedError(
                f"{self.title}: detector {detector.name} has no threshold, which attacks that are adaptive to it need; "
                "give clean inputs to calibrate it on"
            )
        self.attack.check(threat_model=self.threat_model, detector=detector is not None)
        yield from ()

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """The rows, and the points that some attacks imitate."""
        inputs, labels = self.given.rows(rows)
        references = None
        if self.adaptive_to is not None and self.attack.traits.references:
            references = draw_references(self.given, rows, passed=self.passed, seed=self.seed)
        return {"inputs": inputs, "labels": labels, "references": references}

    @cached_property
    def passed(self) -> Tensor:
        """A mask of the clean inputs that the attacked detector accepts."""
        assert self.adaptive_to is not None
        return passed_inputs(self.given, detector=self.adaptive_to.detector, seed=self.seed)

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """One task: the attack on these rows."""
        given, detector, inputs = self.given, self.adaptive_to, needs["inputs"]
        target = Target(
            module=given.module,
            bounds=given.bounds,
            classes=given.logits.shape[1],
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
            defended=None if detector is None else Defended(given.module, detector.detector),
            references=needs["references"],
        )
        model = self.threat_model
        # The same in any units of the inputs.
        budget = f"{model.epsilon / model.width:g}"
        keys = (self.arms[0].short, model.norm, budget, "" if detector is None else detector.name)
        attempt = yield (
            Task(
                attack=self.attack,
                target=target,
                inputs=inputs,
                labels=needs["labels"],
                threat_model=model,
                stream=(self.seed, given.ids[rows[0]], "arm", *keys),
                counted=given.module,
            ),
            Check(module=given.module, name=self.attack.name),
        )
        found = attempt.verified
        predicted = found.logits.argmax(1).tolist()
        block = Block.of(rows, given.ids, attempt, found.candidates, predicted=predicted)
        if not self.detectors:
            return block
        # Here, where the attack was: all workers score, and a block that is done is scored too.
        scores = score_points(self.detectors, found.candidates, seed=self.judge_seed, sample=given.ids[rows[0]])
        arrays = {**block.arrays, scores_name(rows[0]): pack_scores(self.detectors, scores)}
        return replace(block, arrays=arrays)


def plan_clean(
    given: EvaluationInputs,
    *,
    batch_size: int,
    seed: int,
    judge_seed: int | None = None,
    detectors: Sequence[NamedDetector] = (),
) -> ScoredRun:
    """The run of the clean inputs: their scores; the judge's seed is ``seed`` where none is given."""
    judge_seed = seed if judge_seed is None else judge_seed
    return ScoredRun(
        key="attacks/clean",
        title="clean",
        blocks=(),
        identity={"batch_size": batch_size, "seed": seed, "judge_seed": judge_seed},
        given=given,
        detectors=detectors,
        batch_size=batch_size,
        seed=seed,
        judge_seed=judge_seed,
    )


def plan_runs(arms: Sequence[Arm], clean: ScoredRun) -> list[ArmRun]:
    """The runs of arms: one each; one for all budgets of a minimum-norm attack; one a detector if adaptive.

    Raises where an attack does not fit. One that is adaptive may be refused by one detector and not by another, which
    goes into the result.
    """
    given = clean.given
    grouped: dict[tuple[str, str, ThreatModel], list[Arm]] = {}
    for arm in arms:
        values = given.inputs[0].numel()
        if arm.norm is not None and arm.epsilon is not None:
            ThreatModel(norm=arm.norm, epsilon=arm.epsilon, bounds=given.bounds).check_resolution(values)
        model = arm.threat_model(bounds=given.bounds, values=values)
        # By label too: two functions may have one description.
        grouped.setdefault((arm.short, describe(arm.resolved), model), []).append(arm)
    for (_, _, model), found in grouped.items():
        if not clean.detectors:
            # One that is adaptive to a detector would otherwise be run for none.
            found[0].resolved.check(threat_model=model)
    runs = [
        _arm_run(found, model, detector, clean)
        for (_, _, model), found in grouped.items()
        for detector in (clean.detectors if found[0].resolved.traits.detector else (None,))
    ]
    for run in runs:
        if run.adaptive_to is None:
            run.attack.check(threat_model=run.threat_model)
    return runs


def _arm_run(arms: Sequence[Arm], model: ThreatModel, detector: NamedDetector | None, clean: ScoredRun) -> ArmRun:
    arm, attack = arms[0], arms[0].resolved
    # The same whatever budgets a minimum-norm attack is judged by.
    title = arm.name if arm.epsilon is None or not attack.traits.minimum_norm else f"{arm.short} {arm.norm}"
    title = title if detector is None else f"{title}, knowing {detector.name}"
    # All that decides what it returns, besides model, inputs and seed.
    own = {
        "attack": describe(attack),
        "norm": model.norm,
        "epsilon": model.epsilon,
        "bounds": list(model.bounds),
        "adaptive_to": None if detector is None else detector.name,
    }
    # A name for files, the same for the same run in any suite.
    digest = hashlib.blake2b(repr([title, *sorted(own.items())]).encode(), digest_size=5).hexdigest()
    return ArmRun(
        key=f"attacks/{re.sub(r'[^A-Za-z0-9.]+', '-', title)[:60].strip('-.')}-{digest}",
        title=title,
        blocks=clean.given.blocks(clean.batch_size),
        identity={
            **clean.identity,
            **own,
            **({"detector": None} if detector is None else {"detector": detector.digest, **detector.described}),
        },
        long=attack.traits.minimum_norm or detector is not None,
        given=clean.given,
        detectors=clean.detectors,
        batch_size=clean.batch_size,
        seed=clean.seed,
        judge_seed=clean.judge_seed,
        attack=attack,
        threat_model=model,
        arms=tuple(arms),
        adaptive_to=detector,
    )
