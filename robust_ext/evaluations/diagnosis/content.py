"""From what was found to ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from robust_ext.core.errors import OutOfTimeError
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import ISOLATED, current_context
from robust_ext.engine.identity import describe, versions
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.progress import paced
from robust_ext.evaluations.causes.finding import COMPARISONS, Finding
from robust_ext.evaluations.causes.indicators import ioaf, most_likely, unstable_predictions
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.caveats import attack_warnings, outside_warnings, time_table
from robust_ext.evaluations.diagnosis.examination import Examination, next_steps, strongest
from robust_ext.evaluations.diagnosis.examining import ROLES, Examined, Ran, Work, robust_share
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings

# The neighbourhood in which predictions are to be stable, as a share of the bounds' width, and the samples looked at.
_NEAR, _FEW = 8 / 255, 4


def make_content(
    *,
    module: nn.Module,
    probe: ModelProbe,
    examination: Examination,
    findings: Sequence[Finding],
    tried: Sequence[Mapping[str, Any]] | None,
    left_out: Sequence[str],
    refusal: str | None,
    inputs: Tensor,
    threat_model: ThreatModel,
    settings: DiagnosisSettings,
    work: Work,
    begun: float,
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    given = None if examination.examiner is None else examination.examiner.given
    correct = [] if given is None else given.correct.tolist()
    likely = most_likely(findings)
    unstable = None if given is None else _unstable(given, settings.seed)
    attacks = [_attack(one, examination.larger[name], correct, unstable) for name, one in examination.attacks.items()]
    references = [_ran(one, correct) for one in examination.references.values()]
    ran = [(name, one.ran.records) for name, one in examination.attacks.items()]
    outside = [(name, one.ran.attack, threat_model, one.ran.records) for name, one in examination.attacks.items()]
    return {
        "kind": "diagnosis",
        "likely": None if likely is None else likely.to_dict(),
        "reason": _reason(likely, attacks, references, tried or (), whole=not left_out),
        "samples": len(inputs),
        "clean_accuracy": probe.clean_accuracy if given is None else float(given.correct.mean()),
        "norm": threat_model.norm,
        "epsilon": threat_model.epsilon,
        "model": {
            "name": type(module).__name__,
            "inputs": _range(inputs),
            "logits": None if given is None else _range(given.logits),
            "mode": "train" if module.training else "eval",
            "probe": probe.to_dict(),
        },
        "attacks": attacks,
        "references": references,
        "findings": [one.to_dict() for one in findings],
        "tried": None if tried is None else [dict(one) for one in tried],
        "next": next_steps(
            likely,
            tried,
            refused=given is None,
            plantable=not attacks or any(one["not_planted"] is None for one in attacks),
            whole=not left_out,
        ),
        "not_run": refusal,
        "left_out": list(left_out),
        "warnings": attack_warnings(ran, consequence=", and count as not found") + outside_warnings(outside),
        "settings": {
            **settings.to_dict(),
            "bounds": list(threat_model.bounds),
            **({} if given is None else given.described),
            **current_context().origins,
        },
        "isolated": ISOLATED.get(),
        "versions": versions(),
        "seed": settings.seed,
        "time": time_table(work.outcomes, begun=begun, others=work.planted),
    }


def _unstable(given: EvaluationInputs, seed: int) -> float | None:
    """Return the paper's indicator in its neighbourhood; None where the time is over."""
    radius, model = _NEAR * given.threat_model.width, given.threat_model
    try:
        with paced(given.module, "stability of predictions"):
            return unstable_predictions(
                given.module, given.inputs[:_FEW], given.labels[:_FEW], threat_model=model, radius=radius, seed=seed
            )
    except OutOfTimeError:
        return None


def _attack(
    examined: Examined, larger: Mapping[str, Ran], correct: Sequence[bool], unstable: float | None
) -> dict[str, Any]:
    """The numbers of an attack: on the samples, with larger budgets, and on planted problems."""
    planted = examined.planted or {}
    keys = ("score", "score_interval", "random_score", "verdict")
    reach = [(record.get("trace") or {}).get("reach") for record in examined.ran.records]
    return {
        **_ran(examined.ran, correct),
        **{key: planted.get(key) for key in keys},
        "planted": planted.get("samples", 0),
        "not_planted": examined.error,
        "larger": {name: _ran(ran, correct) for name, ran in larger.items()},
        "reach": [value for value in reach if value is not None],
        "ioaf": ioaf(
            examined.ran.entries(correct, None),
            unstable=unstable,
            unbounded=larger[ROLES[1]].entries(correct, None) if ROLES[1] in larger else None,
        ),
    }


def _ran(ran: Ran, correct: Sequence[bool]) -> dict[str, Any]:
    """Return the results of an attack on the samples."""
    count = len(ran.records)
    robust, lost = robust_share(ran, correct)
    interval = proportion_interval(robust, count)
    return {
        "name": ran.name,
        "description": describe(ran.attack),
        "kind": ran.attack.traits.kind,
        "epsilon": ran.epsilon,
        "robust_accuracy": robust / count if count else None,
        "interval": None if interval is None else list(interval),
        "not_attacked": lost,
        "curve": list(ran.curve),
        "seconds": ran.seconds,
        "passes": dict(ran.passes),
        "error": ran.error,
    }


def _reason(
    likely: Finding | None,
    attacks: Sequence[Mapping[str, Any]],
    references: Sequence[Mapping[str, Any]],
    tried: Sequence[Mapping[str, Any]],
    *,
    whole: bool,
) -> str:
    """The diagnosis in a sentence, and where another attack leaves less of the accuracy: which number to use.

    A cause is confirmed where its own remedy makes the same attack solve more; a comparison is none.
    """
    if likely is None:
        missed = any(attack["verdict"] == "failed" for attack in attacks)
        more = ", and the attack misses planted examples all the same" if missed else ""
        to = "" if whole else " to what was run before the time was over"
        return f"None of the known causes applies{to}{more}.{_lower(attacks, references)}"
    of = "" if likely.attack is None or len(attacks) == 1 else f" of {likely.attack}"
    if likely.code in COMPARISONS:
        return f"What is seen{of}: {likely.cause}{_lower(attacks, references)}"
    entry = next((one for one in tried if one["confirmed"] and one["code"] == likely.code), None)
    if entry is None:
        return f"The likely cause{of}: {likely.cause}{_lower(attacks, references)}"
    return f"The confirmed cause{of}: {likely.cause}{_beside(entry)}"


def _lower(attacks: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]) -> str:
    """Name the number to use where a reference leaves less accuracy than all attacks; empty otherwise."""
    known = [one["robust_accuracy"] for one in attacks if one["robust_accuracy"] is not None]
    lowest = min(references, key=lambda one: one["robust_accuracy"], default=None)
    if lowest is None or not known or lowest["robust_accuracy"] >= min(known):
        return ""
    yours, theirs = (f"{100 * value:.1f}" for value in (min(known), lowest["robust_accuracy"]))
    return f" Robust accuracy is {yours} by what was given, {theirs} by {lowest['name']}: use that."


def _beside(entry: Mapping[str, Any]) -> str:
    """Describe the results of references next to a confirmed remedy."""
    after = entry["after"]["robust_accuracy"]
    best = strongest(entry)
    if after is None or best is None:
        return ""
    yours, theirs = (f"{100 * value:.1f}" for value in (after, best["robust_accuracy"]))
    more = ": use that" if best["robust_accuracy"] < after else ""
    return f" With the remedy robust accuracy is {yours}, by {best['name']} {theirs}{more}."


def _range(values: Tensor) -> list[float] | None:
    finite = values.detach()[values.detach().isfinite()]
    return [float(finite.min()), float(finite.max())] if finite.numel() else None
