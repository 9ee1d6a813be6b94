"""What weakens the arms of a MEAD run; whether they fool detectors is what the run measures, and no part of it."""

from __future__ import annotations

from collections.abc import Sequence

from robust_ext.engine.run import Outcome
from robust_ext.evaluations.arm_runs import ArmRun
from robust_ext.evaluations.causes.attaching import OF_LABELS, find_causes, of_arm, prober
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.setup import find_setup
from robust_ext.evaluations.scored_runs import ScoredRun


def find_faults(run: ScoredRun, left: Sequence[Outcome[ArmRun]]) -> list[Finding]:
    """What is wrong with arms, which are not compared with each other; ranked."""
    given = run.given
    probe = prober(given.module, given.inputs, given.labels, threat_model=given.threat_model, seed=run.seed)
    ran = {one.run.title: one for one in left if one.refusal is None}
    budgets = [one.run.threat_model for one in ran.values() if one.run.arms[0].epsilon is not None]
    found = find_setup(given, seed=run.seed, budgets=budgets) or find_causes(
        [of_arm(one, name=name) for name, one in ran.items()], probe, compared=False
    )
    # By design an objective without labels and one of detectors do not end where the label's does.
    others = {
        name
        for name, one in ran.items()
        if one.run.adaptive_to is not None or one.run.arms[0].objective not in (None, "ace")
    }
    caller = Caller(
        module=given.module,
        attacks={name: one.run.attack for name, one in ran.items()},
        arms={name: one.run.threat_model for name, one in ran.items() if one.run.arms[0].epsilon is not None},
        images=given.inputs.dim() == 4,
    )
    return caller.addressed(one for one in found if one.attack not in others or one.code not in OF_LABELS)
