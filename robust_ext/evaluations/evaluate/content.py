"""Everything that the result of an evaluation holds, from its runs and its certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import warn
from robust_ext.core.statistics import proportion_interval
from robust_ext.engine.context import is_over
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome
from robust_ext.engine.verify import LOST, UNDONE
from robust_ext.evaluations.caveats import Part, attack_warnings, outside_warnings, rounding_warnings, time_table
from robust_ext.evaluations.evaluate.cascade import MemberRun, standing_after, within
from robust_ext.evaluations.evaluate.certificate import text_of, uncertified
from robust_ext.evaluations.evaluate.publish import host_code, judge_claim
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.evaluate.suite import Member
from robust_ext.evaluations.result import framed

Outcomes = Sequence[Outcome[MemberRun]]


def make_content(
    given: EvaluationInputs,
    outcomes: Outcomes,
    settings: EvaluateSettings,
    *,
    findings: Sequence[Mapping[str, Any]],
    attack: Attack | None = None,
    certificate: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    not_tried: Sequence[Mapping[str, str]] = (),
    stopped: str | None = None,
    begun: float,
    others: Sequence[Part] = (),
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything ``result.json`` holds; ``attack`` is the one of the certificate, ``stopped`` why none was run.

    ``measured`` replaces what the outcomes would state, where another cascade attacked, and may add to it.
    """
    recipe = None
    if attack is not None:
        recipe = {"text": text_of(attack), **(host_code(attack, given.threat_model) if given.plain else {})}
    certificate = uncertified(None, stopped or "no white-box attack was run") if certificate is None else certificate
    measured = measure(given, outcomes) if measured is None else measured
    worst = None if stopped else measured["worst_case"]
    claim = None
    if settings.claim is not None and worst is not None:
        outcome = judge_claim(settings.claim, worst, certified=certificate["certified"])
        claim = {"claimed": settings.claim, "outcome": outcome}
    return framed(
        "evaluation",
        given,
        outcomes,
        verdict="failed"
        if certificate["verdict"] == "passed" and not certificate["certified"]
        else certificate["verdict"],
        stopped=stopped,
        norm=given.threat_model.norm,
        epsilon=given.threat_model.epsilon,
        findings=list(findings),
        **{**measured, "worst_case": worst},
        certificate=dict(certificate),
        recipe=recipe,
        search=None if search is None else dict(search),
        claim=claim,
        not_tried=list(not_tried),
        settings=settings.to_dict(),
        seed=settings.seed,
        time=time_table(outcomes, begun=begun, others=others),
    )


def measure(given: EvaluationInputs, outcomes: Outcomes) -> dict[str, Any]:
    """Return what the members of the suite left of the samples."""
    records = [(one.run.attack.name, one.records) for one in outcomes]
    upper = ", and count as not broken, so that robust accuracy is an upper bound"
    outside = [(one.run.attack.name, one.run.attack, one.run.threat_model, one.records) for one in outcomes]
    worst = _worst_case(given, outcomes)
    return {
        "clean_accuracy": float(given.correct.mean()),
        "worst_case": worst,
        "steps": _steps(given, outcomes),
        "found_by": _found_by(given, outcomes),
        "curve": _security_curve(given, outcomes),
        "warnings": attack_warnings(records, consequence=upper)
        + outside_warnings(outside)
        + rounding_warnings([worst]),
    }


def _worst_case(given: EvaluationInputs, outcomes: Outcomes) -> dict[str, Any]:
    stands = standing_after(given, outcomes)
    lost = {record["index"] for one in outcomes for record in one.records if record["outcome"] in LOST}
    interval = proportion_interval(int(stands.sum()), len(stands))
    limit = given.threat_model.epsilon + given.threat_model.tolerance(given.inputs[0].numel())
    records = [record for one in outcomes for record in one.records if record["outcome"] == UNDONE]
    undone = {record["index"] for record in records if record["distance"] <= limit}
    relaxed = float(np.mean([stand and index not in undone for index, stand in enumerate(stands)]))
    return {
        "robust_accuracy": float(stands.mean()),
        **({"without_rounding": relaxed} if given.threat_model.discrete else {}),
        "interval": None if interval is None else list(interval),
        "samples": len(stands),
        "broken": int((given.correct & ~stands).sum()),
        "not_attacked": sum(bool(stands[index]) for index in lost),
        "robust": "".join("01"[bool(one)] for one in stands),
    }


def _steps(given: EvaluationInputs, outcomes: Outcomes) -> list[dict[str, Any]]:
    """One a member: how many samples it attacked and broke, and what was left standing after it."""
    rows = []
    for number, one in enumerate(outcomes):
        if one.refusal is not None:
            continue
        spent, stands = one.spent("attack"), standing_after(given, outcomes[: number + 1])
        interval = proportion_interval(int(stands.sum()), len(stands))
        rows.append(
            {
                "name": one.run.attack.name,
                "text": text_of(one.run.attack),
                "description": describe(one.run.attack),
                "white_box": one.run.member.white_box,
                "samples": len(one.records),
                "broken": len(within(one.run, one.records)),
                "robust_accuracy": float(stands.mean()),
                "interval": None if interval is None else list(interval),
                "outcomes": dict(sorted(Counter(record["outcome"] for record in one.records).items())),
                "seconds": spent.seconds,
                "passes": spent.passes,
            }
        )
    return rows


def _found_by(given: EvaluationInputs, outcomes: Outcomes) -> list[str | None]:
    """The attack that broke each sample; None where it stands or is misclassified."""
    found: list[str | None] = [None] * len(given.ids)
    for one in outcomes:
        for record in within(one.run, one.records):
            found[record["index"]] = one.run.attack.name
    return found


def _security_curve(given: EvaluationInputs, outcomes: Outcomes) -> list[dict[str, float]]:
    """Robust accuracy over budgets from 0 on, by the smallest verified perturbation of each sample.

    Nothing where no attack looked for small perturbations. At every budget it is an upper bound, and below epsilon a
    looser one: attacks at epsilon, which do not look for less, break most samples there.
    """
    if not any(one.run.attack.traits.minimum_norm for one in outcomes):
        return []
    smallest = np.where(given.correct, np.inf, 0.0)
    for one in outcomes:
        for record in one.records:
            broken = record["outcome"] in ("found", "non_finite_logits") and not record.get("detected")
            if broken and record["distance"] is not None:
                smallest[record["index"]] = min(smallest[record["index"]], record["distance"])
    budgets = sorted({0.0, given.threat_model.epsilon, *map(float, smallest[np.isfinite(smallest)])})
    slack = given.threat_model.tolerance(given.inputs[0].numel())
    return [{"epsilon": one, "robust_accuracy": float((smallest > one + slack).mean())} for one in budgets]


def not_tried(given: EvaluationInputs, outcomes: Outcomes, members: Sequence[Member]) -> list[dict[str, str]]:
    """Return the members that were not run on all samples that stood, and why; warn where the time ended one."""
    ran = {one.run.attack.name: one for one in outcomes}
    refused = [{"name": name, "reason": one.refusal} for name, one in ran.items() if one.refusal is not None]
    over = "the time that was given was over"
    reason = over if is_over() and standing_after(given, outcomes).any() else "no sample was left standing"
    cut = [
        {"name": name, "reason": f"{over}; it attacked {len(one.records)} samples"}
        for name, one in ran.items()
        if one.cut
    ]
    if cut:
        warn("The time was over before every attack had attacked every sample that stood. Give more minutes for it.")
    idle = [{"name": one.attack.name, "reason": reason} for one in members if one.attack.name not in ran]
    return [*refused, *cut, *idle]
