"""The cascade: which step is run next, and on which samples.

As AutoAttack does (Croce and Hein 2020, section 5), a step is run on what those before it left. Naive attacks and
transfer come first, then steps that cost next to nothing, then others that come after no other; among these the one
that promises most losses a pass: those of its kind so far, over what it costs. They may take a quarter of the passes of
every attack on every sample, less what was spent; all others share what they leave: the same number of samples for
each, at any cost, and at least one where that is enough. These are the samples nearest to being broken: in a
fixed number of passes, a long search of few samples breaks more than a short one of many. All of it follows from
records and counted passes, so a resumed run takes the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robust_ext.core.cost import Cost
from robust_ext.engine.context import current_context
from robust_ext.engine.run import Outcome, candidates_name
from robust_ext.evaluations.adaptive.plan import Step
from robust_ext.evaluations.adaptive.protocol import StepRun

Outcomes = Sequence[Outcome[StepRun]]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

OVER = "The time that was given was over"
_SPENT = "More would take the cascade beyond a quarter of the passes of every attack on every sample"

_FIRST = ("clean", "naive", "transfer")
# What a step is taken to break of a sample before any of its kind was run.
_PROMISE, _USUAL = {"black-box": 0.05}, 0.5
# A step that takes at most this share of the cascade's passes, on all samples that it is for, comes before others.
_CHEAP = 0.05


def highest_margins(done: Outcomes) -> Floats:
    """The highest margin of each sample, ``(N,)``, over the candidates of all steps."""
    found = np.full(len(done[0].run.given.ids), -np.inf)
    for record in (record for one in done for record in one.records):
        found[record["index"]] = max(found[record["index"]], record["margin"])
    return found


def best_points(done: Outcomes) -> Tensor:
    """The candidate of the highest margin of each sample, ``(N, ...)``."""
    given = done[0].run.given
    points, best = given.inputs.clone(), np.full(len(given.ids), -np.inf)
    for one in done:
        records = {record["index"]: record for record in one.records}
        for block in one.run.blocks:
            rows = [row for row in block if row in records]
            # Under the first row that the step was run on, which need not be the block's.
            arrays = one.store.load(candidates_name(rows[0])) if rows else None
            for row, point in zip(rows, [] if arrays is None else arrays["candidates"], strict=arrays is not None):
                if records[row]["margin"] > best[row]:
                    best[row], points[row] = records[row]["margin"], torch.from_numpy(point).to(points)
    return points


@dataclass(frozen=True)
class Standing:
    """The samples that steps left.

    Args:
        static: Which samples the static model still gets right, bool ``(N,)``.
        defended: On which at least one of the defense's predictions that choose attacks is right; never those that
            count.
        broken: By the name of each step, of how many samples that stood it was run on, and how many it broke.
    """

    static: Bools
    defended: Bools
    broken: Mapping[str, tuple[int, int]]

    def under(self, step: Step | None) -> Bools:
        """The samples that a step is for: points that are made on the static model are tried on both."""
        if step is None:
            return np.ones_like(self.defended)
        return self.defended | self.static if step.exposure == "static" else self.defended


def standing_after(outcomes: Outcomes) -> Standing:
    """Return the samples left by steps in this order, the clean inputs first."""
    run = outcomes[0].run
    deciding = run.settings.repeats if run.defense.random else None
    static, defended = np.ones((2, len(run.given.ids)), dtype=bool)
    broken = dict[str, tuple[int, int]]()
    for one in outcomes:
        step, before = one.run.step, Standing(static.copy(), defended.copy(), broken)
        for record in one.records:
            static[record["index"]] &= record["static"]
            defended[record["index"]] &= any(record["right"][:deciding])
        if step is not None and one.refusal is None:
            stood = before.under(step)
            lost = before.defended & ~defended | (step.exposure == "static") & before.static & ~static
            tried = sum(bool(stood[record["index"]]) for record in one.records)
            broken[step.name] = tried, int((stood & lost).sum())
    return Standing(static, defended, broken)


@dataclass
class Cascade:
    """Chooses what :func:`robust_ext.engine.running.run_all` runs next; ``not_run``: why others were not."""

    not_run: dict[str, str] = field(default_factory=dict)

    def __call__(self, left: Sequence[StepRun], outcomes: Mapping[str, Outcome[StepRun]]) -> StepRun | None:
        """The next run with the samples that it is for; None without one."""
        done = list(outcomes.values())
        if not done:
            return left[0]
        full, stands, waiting = left[0].settings.full, standing_after(done), {run.title for run in left}
        (rest, first, little), in_time = _rest(left, done), _passes_in_time(done)
        cheap = {run.title for run in left if _passes(run) * int(stands.under(run.step).sum()) <= little}
        last = {run.title for run in left if _after(run)} - cheap
        # What one sample takes of all that share them.
        shared = sum(cost for run in left if run.title in last and not run.twin and (cost := _passes(run)) < inf)
        ready, reasons = list[tuple[StepRun, int]](), dict[str, str]()
        for run in left:
            wanted = stands.under(None if full else run.step)
            groups = _affordable(run, *((rest, shared) if run.title in last else (first, 0)))
            rows = _nearest(run, wanted, done, groups)
            if reason := _reason(run, wanted, rows, in_time):
                reasons[run.title] = reason
            elif _after(run) not in waiting:
                ready.append((replace(run, standing=rows.tolist()), int(wanted.sum())))
        if not ready:
            self.not_run |= {run.title: reasons.get(run.title) or reasons[_after(run)] for run in left}
            return None
        best, stood = ready[0] if full else max(ready, key=lambda one: _promise(one[0], done, stands, cheap))
        if (count := sum(best.standing or ())) < stood:
            self.not_run[best.title] = f"{_SPENT}; it was run on the nearest {count} of {stood} samples."
        return replace(best, starts=best_points(done) if best.step and best.step.warm and not full else None)

    def stated(self, attacked: Outcomes) -> list[dict[str, str]]:
        """The steps that were not run, or not on all samples that they were for, and why."""
        cut = {one.run.title: f"{OVER}; it was run on {len(one.records)} samples." for one in attacked if one.cut}
        return [{"name": name, "reason": reason} for name, reason in {**self.not_run, **cut}.items()]


def _after(run: StepRun) -> str:
    """The step that is run before this one; empty without one, or all are run."""
    return run.step.after if run.step and not run.settings.full else ""


def _rest(left: Sequence[StepRun], done: Outcomes) -> tuple[float, float, float]:
    """The passes that are left of a quarter of those of every attack on every sample, and for steps that come first.

    Judging is paid for from the quarter and adds nothing to it: random defenses are judged by many predictions. Steps
    that come first have half of it in any case, however much naive attacks and transfer took, and all that they need
    where no step comes after another. The third are what a cheap step takes at most.
    """
    runs = [*left, *(one.run for one in done)]
    # Without those that are in a cascade alone.
    short = {_after(run) for run in runs if run.category == "black-box"}
    own = [run for run in runs if run.title not in short and not (run.step and run.step.warm)]
    costs = [_total(run.costs().get(("attack", run.title), Cost())) for run in own]
    everything = len(runs[0].given.ids) * sum(cost for cost in costs if cost < inf)
    rest, little = everything / 4 - _spent(done), _CHEAP * everything / 4
    if not any(map(_after, runs)):
        return rest, inf, little
    others = [one for one in done if one.run.category not in _FIRST]
    return rest, max(rest, everything / 8 - _spent(others)), little


def _spent(done: Outcomes) -> int:
    """The passes of steps, and of judging them."""
    phases = [one.spent(phase) for one in done for phase in ("attack", "verify")]
    return sum(phase.forward + phase.backward for phase in phases)


def _affordable(run: StepRun, rest: float, shared: float) -> float:
    """Return the affordable number of groups for a step: its share of the remaining passes, rounded up.

    ``shared`` is what one sample costs all of these.
    """
    size, cost = run.defense.group_size or 1, _passes(run)
    if run.settings.full or run.category in _FIRST or inf in (cost, rest):
        return inf
    return max(min(ceil(rest / (max(shared, cost) * size)), rest // (cost * size)), 0)


def _nearest(run: StepRun, wanted: Bools, done: Outcomes, count: float) -> Bools:
    """Return a mask ``(N,)`` of a step's samples in the affordable groups of highest margins.

    They are those of the step that it comes after, as what is near by one way may be far by another; of all steps where
    it begins at their best points, or comes after none.
    """
    before = [one for one in done if run.step and one.run.title == run.step.after and not run.step.warm]
    margins, groups = highest_margins(before or done), np.arange(len(wanted)) // (run.defense.group_size or 1)
    best = np.full(groups[-1] + 1, -np.inf)
    np.maximum.at(best, groups[wanted], margins[wanted])
    return wanted & np.isin(groups, np.argsort(-best, kind="stable")[: int(min(count, len(best)))])


def _passes_in_time(done: Outcomes) -> float:
    """Return how many passes fit into the remaining time, at the present pace."""
    deadline = current_context().deadline
    seconds = inf if deadline is None else deadline - time.monotonic()
    known = [one for one in done if one.run.step and one.records and _passes(one.run) < inf]
    passes = sum(_passes(one.run) * len(one.records) for one in known)
    taken = sum(one.spent("attack").seconds for one in known)
    return seconds * (passes / taken if taken else inf)


def _reason(run: StepRun, wanted: Bools, rows: Bools, in_time: float) -> str | None:
    """Why a step is not run: on none of the samples that it is for, or not on those that there are passes for."""
    if not wanted.any():
        return "No sample was left standing."
    if run.twin and not run.settings.full:
        return f"Its gradients are those of {run.twin}."
    # A first block of it.
    count = next((count for block in run.blocks if (count := int(rows[block.start : block.stop].sum()))), 0)
    if in_time <= (_passes(run) * count if _passes(run) < inf else 0):
        return f"{OVER}."
    return None if rows.any() else f"{_SPENT}."


def _passes(run: StepRun) -> float:
    """Return the cost of a sample, with judging it."""
    return _total(run.cost())


def _total(cost: Cost) -> float:
    """Rows forward and back; infinity where they are unknown."""
    return inf if cost.unknown else cost.forward + cost.backward


def _promise(run: StepRun, done: Outcomes, stands: Standing, cheap: Set[str]) -> tuple[bool, bool, bool, float]:
    """Rank a step: first steps, cheap ones, those after no other, and the expected gain for each pass."""
    step, tried, lost = run.step, 0, _PROMISE.get(run.category, _USUAL)
    assert step is not None
    for one in done:
        other = one.run.step
        if other and (other.category, other.exposure) == (step.category, step.exposure):
            more = stands.broken.get(other.name, (0, 0))
            tried, lost = tried + more[0], lost + more[1]
    return run.category in _FIRST, run.title in cheap, not step.after, lost / (tried + 1) / _passes(run)
