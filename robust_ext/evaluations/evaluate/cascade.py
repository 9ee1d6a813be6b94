"""The cascade: each member of a suite attacks the samples that still stand, and its records join the others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from robust_ext.core.cost import Spent
from robust_ext.core.errors import AttackError, AttackRefusedError, ModelError, RobustExtError
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Block, Outcome, candidates_name
from robust_ext.engine.store import Record, Store
from robust_ext.engine.task import Check, Work
from robust_ext.engine.verify import BROKEN
from robust_ext.evaluations.arms import Arm, ArmRun, plan_runs
from robust_ext.evaluations.detectors import NamedDetector, flagged
from robust_ext.evaluations.evaluate.suite import Member
from robust_ext.evaluations.scored_runs import ScoredRun, plan_clean

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class MemberRun(ArmRun):
    """A member of the suite on the samples that stand; records hold the ``margin`` of each candidate too."""

    partial = True

    member: Member
    standing: Sequence[bool] | None = None  # The samples that it attacks; None before that is known
    starts: Tensor | None = None  # The best points so far (N, ...), where the member begins at them

    @classmethod
    def of(cls, run: ArmRun, member: Member) -> Self:
        """The run of a member, from the run of its arm."""
        return cls(**run.__getstate__(), member=member)

    def tolerates(self, error: RobustExtError) -> bool:
        """A model may give no gradients: that is for the report, not the end of the evaluation."""
        return isinstance(error, (AttackError, AttackRefusedError, ModelError))

    def samples(self) -> Sequence[Tensor]:
        """Return the samples, and the points that it begins at."""
        return self.given.samples if self.starts is None else (*self.given.samples, self.starts)

    def run_on(self, rows: range) -> list[int]:
        """Return the rows of a block that stand."""
        return [row for row in rows if self.standing is None or self.standing[row]]

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """The rows that stand, the points that it begins at, and those that attacks on a detector imitate."""
        (inputs, labels), run_on = self.given.rows(rows), self.run_on(rows)
        own = [row - rows[0] for row in run_on]
        starts = None if self.starts is None else self.starts[rows.start : rows.stop][own].to(inputs)[:, None]
        imitates = run_on and self.adaptive_to is not None and self.attack.traits.references
        references = self.references(run_on) if imitates else None
        return {"inputs": inputs[own], "labels": labels[own], "references": references, "starts": starts}

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """One task: the attack on the rows that stand, each with the draws that it would have among all."""
        run_on = self.run_on(rows)
        left_out = {"left_out": [row for row in rows if row not in run_on]} if len(run_on) < len(rows) else {}
        if not run_on:
            return Block(
                records=[], timing={"block": rows[0], "phases": {"attack": Spent(), "verify": Spent()}, **left_out}
            )
        task = self.task(rows, needs)
        task = replace(
            task,
            target=replace(task.target, starting_points=needs["starts"]),
            rows=[row - rows[0] for row in run_on],
        )
        attempt = yield task, Check(module=self.given.module, name=self.attack.name)
        found = attempt.verified
        margins = self.given.criterion.margin(found.logits.cpu(), task.labels.cpu()).nan_to_num(0.0, 1e30, -1e30)
        columns = {"predicted": found.logits.argmax(1).tolist(), "margin": margins.tolist()}
        for one in self.detectors:
            columns["detected"] = flagged(
                one, found.candidates, seed=self.judge_seed, sample=self.given.ids[run_on[0]]
            ).tolist()
        block = Block.of(run_on, self.given.ids, attempt, found.candidates, **columns)
        return replace(block, timing={**block.timing, "block": rows[0], **left_out})

    def finish(self, store: Store) -> tuple[Sequence[Record], Sequence[Record]]:
        """Records have the detector's decisions already."""
        return super(ScoredRun, self).finish(store)


def plan_members(
    members: Sequence[Member],
    given: EvaluationInputs,
    *,
    batch_size: int,
    seed: int,
    judge_seed: int,
    detectors: Sequence[NamedDetector] = (),
) -> list[MemberRun]:
    """The run of each member on samples, in order; raises where one does not fit the threat model.

    With a detector, candidates that it flags break nothing.
    """
    model, runs = given.threat_model, list[MemberRun]()
    clean = plan_clean(given, batch_size=batch_size, seed=seed, judge_seed=judge_seed, detectors=detectors)
    judges = {"judged_by": [one.digest for one in detectors]} if detectors else {}
    for one in members:
        arm = Arm(attack=one.attack, norm=model.norm, epsilon=model.epsilon, label=one.attack.name)
        (run,) = plan_runs([arm], clean)
        runs.append(MemberRun.of(replace(run, identity={**run.identity, **judges}), one))
    return runs


def within(run: ArmRun, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records whose candidate breaks its sample inside the ball: longer perturbations do not count.

    Nor do those that a detector flags.
    """
    given = run.given
    limit = given.threat_model.epsilon + given.threat_model.tolerance(given.inputs[0].numel())
    broken = (one for one in records if one["outcome"] in BROKEN and not one.get("detected"))
    return [one for one in broken if (one["distance"] or 0.0) <= limit]


def standing_after(given: EvaluationInputs, outcomes: Sequence[Outcome[MemberRun]]) -> Bools:
    """Return which samples stand: classified right, and broken by no verified candidate, bool ``(N,)``."""
    stands = given.correct.copy()
    for one in outcomes:
        for record in within(one.run, one.records):
            stands[record["index"]] = False
    return stands


def best_points(given: EvaluationInputs, outcomes: Sequence[Outcome[MemberRun]]) -> Tensor:
    """The points ``(N, ...)`` at which warm members begin.

    They are the nearest adversarial points of each sample, of members that search for them outside the ball too; where
    none was found, the candidate of the highest margin inside the ball, and the input without one.
    """
    points, best = given.inputs.clone(), [(False, -np.inf)] * len(given.ids)
    limit = given.threat_model.epsilon + given.threat_model.tolerance(given.inputs[0].numel())
    for one in outcomes:
        records = {record["index"]: record for record in one.records}
        for block in one.run.blocks:
            rows = [row for row in block if row in records]
            arrays = one.store.load(candidates_name(rows[0])) if rows else None
            for row, point in zip(rows, [] if arrays is None else arrays["candidates"], strict=arrays is not None):
                record = records[row]
                far, broken = (record["distance"] or 0.0) > limit, record["outcome"] in BROKEN
                value = (True, -record["distance"]) if far else (False, record["margin"])
                if value > best[row] and (broken or (record["outcome"] == "not_adversarial" and not far)):
                    best[row], points[row] = value, torch.from_numpy(point).to(points)
    return points


def next_member(left: Sequence[MemberRun], done: Sequence[Outcome[MemberRun]]) -> MemberRun | None:
    """Return the next run with the samples that stand; None where none does, or no member is left."""
    run = left[0]
    stands = standing_after(run.given, done)
    if not stands.any():
        return None
    return replace(run, standing=stands.tolist(), starts=best_points(run.given, done) if run.member.warm else None)
