"""The cascade: which step is run next, and on which samples.

As AutoAttack does (Croce and Hein 2020, section 5), a step is run on what those before it left. Naive attacks and
transfer come first, then steps that come after no other; among these the one that promises most losses a pass: those
of its kind so far, over what it costs. All others share a quarter of the passes of every attack on every sample, less
what was spent, and spend it on the samples nearest to being broken: in a fixed number of passes, a long search of few
samples breaks more than a short one of many. All of it follows from records and counted passes, so a run that is gone
on with takes the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from robust_ext.engine.context import current_context
from robust_ext.engine.run import Outcome
from robust_ext.evaluations.adaptive.nearest import best_points, highest_margins
from robust_ext.evaluations.adaptive.plan import Step
from robust_ext.evaluations.adaptive.protocol import StepRun

Outcomes = Sequence[Outcome[StepRun]]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

OVER = "The time that was given was over"

SHARE = 0.25
"""Of the passes of every attack on every sample: what steps that come after others may add to."""

SPENT = "More would take the cascade beyond a quarter of the passes of every attack on every sample"

_FIRST = ("naive", "transfer")
# What a step is taken to break of a sample before any of its kind was run.
_PROMISE, _USUAL = {"black-box": 0.05}, 0.5


@dataclass(frozen=True)
class Standing:
    """What steps left.

    Args:
        static: Which samples the static model still gets right, bool ``(N,)``.
        defended: On which at least one of the defense's predictions that choose attacks is right; never those that
            count.
        broken: By the name of each step, of how many samples that stood it was run on, and how many it broke.
    """

    static: NDArray[np.bool_]
    defended: NDArray[np.bool_]
    broken: Mapping[str, tuple[int, int]]

    def under(self, step: Step | None) -> NDArray[np.bool_]:
        """The samples that a step is for: points that are made on the static model are tried on both."""
        if step is None:
            return np.ones_like(self.defended)
        return self.defended | self.static if step.exposure == "static" else self.defended


def standing_after(outcomes: Outcomes) -> Standing:
    """What is left after steps in this order, the clean inputs first."""
    run = outcomes[0].run
    static, defended = np.ones((2, len(run.given.ids)), dtype=bool)
    broken = dict[str, tuple[int, int]]()
    for one in outcomes:
        step, before = one.run.step, Standing(static.copy(), defended.copy(), broken)
        for record in one.records:
            static[record["index"]] &= record["static"]
            defended[record["index"]] &= survives(record, run)
        if step is not None and one.refusal is None:
            stood, left = before.under(step), Standing(static, defended, broken)
            tried = sum(bool(stood[record["index"]]) for record in one.records)
            lost = before.defended & ~defended | (step.exposure == "static") & before.static & ~left.static
            broken[step.name] = tried, int((stood & lost).sum())
    return Standing(static, defended, broken)


def survives(record: Mapping[str, list[bool]], run: StepRun) -> bool:
    """Whether a sample stands: any of the predictions that choose attacks is right."""
    return any(record["right"][: run.settings.repeats] if run.defense.random else record["right"])


@dataclass
class Cascade:
    """Chooses what :func:`robust_ext.engine.running.run_all` runs next; ``not_run`` says why others were not."""

    not_run: dict[str, str] = field(default_factory=dict)

    def __call__(self, left: Sequence[StepRun], outcomes: Mapping[str, Outcome[StepRun]]) -> StepRun | None:
        """The next run with the samples that it is for; None where there is none."""
        done = list(outcomes.values())
        if not done:
            return left[0]
        deadline, full = current_context().deadline, left[0].settings.full
        stands, pace = standing_after(done), _seconds_a_pass(done)
        seconds = None if deadline is None else deadline - time.monotonic()
        waiting = {run.title for run in left}
        room = SHARE * _of_full([*left, *(one.run for one in done)]) - sum(map(_spent, done))
        # Steps that come after others share alike what is left.
        room /= max(sum(bool(run.step and run.step.after and not run.twin) for run in left), 1)
        best, most, nearest = None, (False, False, -1.0), highest_margins(done)
        for run in left:
            self.not_run.pop(run.title, None)
            reason = _reason(run, stands, full=full) or _no_time(run, stands, seconds, pace)
            if reason is None and not full and not _within(run, stands, nearest, room).any():
                reason = f"{SPENT}."
            if reason is not None:
                self.not_run[run.title] = reason
            elif full:
                return run
            elif (promise := _promise(run, done, stands)) > most and run.step and run.step.after not in waiting:
                best, most = run, promise
        if best is None:
            for run in left:
                if run.step and run.step.after in waiting:
                    self.not_run.setdefault(run.title, self.not_run[run.step.after])
            return None
        rows, wanted = _within(best, stands, nearest, room), stands.under(best.step)
        if rows.sum() < wanted.sum():
            self.not_run[best.title] = f"{SPENT}; it was run on the nearest {rows.sum()} of {wanted.sum()} samples."
        assert best.step is not None
        return replace(best, standing=rows.tolist(), starts=best_points(done) if best.step.warm else None)

    def stated(self, attacked: Outcomes) -> list[dict[str, str]]:
        """The steps that were not run, or not on all samples that they were for, and why."""
        cut = {one.run.title: f"{OVER}; it was run on {len(one.records)} samples." for one in attacked if one.cut}
        return [{"name": name, "reason": reason} for name, reason in {**self.not_run, **cut}.items()]


def _reason(run: StepRun, stands: Standing, *, full: bool) -> str | None:
    """Why a step is not needed."""
    step = run.step
    if full or step is None:
        return None
    if not stands.under(step).any():
        return "No sample was left standing."
    return f"Its gradients are those of {run.twin}." if run.twin else None


def _of_full(runs: Sequence[StepRun]) -> float:
    """Passes of every attack on every sample, without those that are in a cascade alone."""
    short = {run.step.after for run in runs if run.step and run.step.category == "black-box"}
    costs = [_passes(run) for run in runs if run.title not in short and not (run.step and run.step.warm)]
    return len(runs[0].given.ids) * sum(cost for cost in costs if cost < inf)


def _spent(one: Outcome[StepRun]) -> int:
    """Passes of a step, and of judging it."""
    return sum(spent.forward + spent.backward for phase in ("attack", "verify") for spent in [one.spent(phase)])


def _within(run: StepRun, stands: Standing, nearest: Floats, room: float) -> Bools:
    """The samples that a step is run on: all that stand; after another one those nearest to being broken.

    These are as many as the ``room`` is enough for.
    """
    rows = stands.under(run.step)
    if not run.step or not run.step.after or _passes(run) == inf:
        return rows
    size = run.defense.group_size or 1
    groups = np.arange(len(rows)) // size
    # The margin of each group that is its highest among those that stand.
    best = np.full(groups[-1] + 1, -np.inf)
    np.maximum.at(best, groups[rows], nearest[rows])
    count = max(int(room / (_passes(run) * size)), 0)
    return rows & np.isin(groups, np.argsort(-best, kind="stable")[:count])


def _no_time(run: StepRun, stands: Standing, seconds: float | None, pace: float | None) -> str | None:
    """Why there is no time for a first block of a step."""
    if seconds is None:
        return None
    rows, passes = stands.under(None if run.settings.full else run.step), _passes(run)
    first = next((count for block in run.blocks if (count := int(rows[block.start : block.stop].sum()))), 0)
    needed = 0.0 if pace is None or passes == inf else pace * passes * first
    return f"{OVER}." if seconds <= needed else None


def _passes(run: StepRun) -> float:
    """What a sample costs; infinity where that is not known."""
    cost = run.cost()
    return inf if cost.unknown else cost.forward + cost.backward


def _seconds_a_pass(done: Outcomes) -> float | None:
    """What passes took so far, of those that were expected; None where nothing was run of which that is known."""
    known = [one for one in done if one.run.step and one.records and _passes(one.run) < inf]
    passes = sum(_passes(one.run) * len(one.records) for one in known)
    return sum(one.spent("attack").seconds for one in known) / passes if passes else None


def _promise(run: StepRun, done: Outcomes, stands: Standing) -> tuple[bool, bool, float]:
    """Whether a step comes first, whether after no other, and how many samples its kind should break for each pass."""
    step = run.step
    assert step is not None
    tried, lost = 0, _PROMISE.get(step.category, _USUAL)
    for one in done:
        other = one.run.step
        if other and (other.category, other.exposure) == (step.category, step.exposure):
            more = stands.broken.get(other.name, (0, 0))
            tried, lost = tried + more[0], lost + more[1]
    return step.category in _FIRST, not step.after, lost / (tried + 1) / _passes(run)
