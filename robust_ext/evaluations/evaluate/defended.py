"""Evaluations of models that draw random numbers, and of test-time defenses: the cascade of ``evaluate_defense``."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import OutOfTimeError
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import current_context, is_over
from robust_ext.engine.evaluation_file import as_folder
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.evaluations.adaptive.api import evaluate_prepared
from robust_ext.evaluations.adaptive.plan import Step, plan_steps
from robust_ext.evaluations.adaptive.settings import AdaptiveResult, AdaptiveSettings
from robust_ext.evaluations.causes.setup import ACCURACY, find_setup
from robust_ext.evaluations.caveats import Part, parts_of
from robust_ext.evaluations.detectors import NamedDetector
from robust_ext.evaluations.evaluate.certificate import (
    NO_SEARCH,
    certificate_of,
    certify,
    doubtful,
    draws_to_plant,
    text_of,
    uncertified,
)
from robust_ext.evaluations.evaluate.content import make_content
from robust_ext.evaluations.evaluate.detected import aware_steps, describe_detector
from robust_ext.evaluations.evaluate.search import Search, search_recipe
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.evaluate.subject import Subject
from robust_ext.evaluations.run_keywords import RunKeywords

_STRENGTHS: Mapping[str, Mapping[str, Any]] = {
    "quick": {"steps": 20, "queries": 150},
    "standard": {"steps": 50, "queries": 500},
    "thorough": {"steps": 100, "transfer_steps": 100, "queries": 5000},
}


def evaluate_subject(
    subject: Subject,
    given: EvaluationInputs,
    settings: EvaluateSettings,
    run: RunKeywords,
    *,
    detectors: Sequence[NamedDetector] = (),
    begun: float,
) -> dict[str, Any]:
    """Check, attack and certify, as content of the evaluation's result."""
    setup = find_setup(given, seed=settings.seed)
    stop = next((one for one in setup if one.code in ACCURACY), None)
    if stop is not None and not settings.accept_setup and not current_context().dry_run:
        plain = [one.to_dict() for one in setup]
        return make_content(given, (), settings, findings=plain, stopped=stop.cause, begun=begun)
    defense, own = subject.defense, copy.copy(run)
    own.out = None if run.out is None else Path(run.out) / "defense"
    chosen = AdaptiveSettings(
        seed=settings.seed,
        judge_seed=settings.seed_of_judge,
        batch_size=settings.batch_size,
        minutes=settings.minutes,
        # A sample that one attack breaks in most draws another one may break in more.
        full=subject.model is not None,
        **_STRENGTHS[settings.budget],
    )
    steps, watching = _steps(subject, chosen, given.threat_model), detectors[0] if detectors else None
    steps += _exposed(subject, aware_steps(given.threat_model, budget=settings.budget) if watching else ())
    result = evaluate_prepared(steps, given, defense, chosen, own, detector=watching)
    more: dict[str, Any] = {"detector": watching.detector if watching else None}
    if subject.model is not None:
        more["draws"] = draws_to_plant(subject.model, given, settings)
    certificate, attack, parts = _certified(subject, steps, result, given, settings, run, **more)
    parts, search = [*parts_of(result.content), *parts], None
    searches = settings.search and subject.model is not None and watching is None
    if searches and subject.model is not None and doubtful(certificate):
        search = _search(subject.model, given, settings, run, draws=more["draws"])
        parts += search.parts
        if search.winner is not None and search.judged is not None:
            attack, certificate = search.winner.attack, certificate_of(search.winner.attack, search.judged)
            one = Step(name=attack.name, category="white-box", attack=attack, exposure="defense", averaged=False)
            with suppress(OutOfTimeError):
                # The cascade again with one step more: candidates are compared by the same draws.
                again = evaluate_prepared([*steps, one], given, defense, chosen, own)
                parts += parts_of(again.content)
                if not is_over():
                    steps, result = [*steps, one], again
    left_out = [NO_SEARCH] if settings.search and not searches else []
    measured = _measured(subject, steps, result, chosen)
    if watching is not None:
        right = [one["right"] > 0.5 for one in result.records]
        measured["detector"] = describe_detector(watching, given, settings, right)
    return make_content(
        given,
        (),
        settings,
        findings=_findings(setup, result.content),
        attack=attack,
        certificate=certificate,
        search=None if search is None else {"tried": list(search.tried), "reason": search.reason},
        not_tried=[*left_out, *result.content["refused"], *result.content["not_run"]],
        begun=begun,
        others=parts,
        measured=measured,
    )


def _search(
    model: nn.Module, given: EvaluationInputs, settings: EvaluateSettings, run: RunKeywords, **more: Any
) -> Search:
    """Search for an attack that passes the test on a random model."""
    return search_recipe(
        module=model,
        inputs=given.inputs,
        ids=given.ids,
        threat_model=given.threat_model,
        findings=(),
        seed=settings.seed,
        judge_seed=settings.seed_of_judge,
        out=as_folder(run.out),
        random=True,
        layer=settings.layer,
        **more,
    )


def _steps(subject: Subject, settings: AdaptiveSettings, threat_model: ThreatModel) -> list[Step]:
    """Return the recommended steps; of a random model, of which there is no static one, those on itself."""
    found = _exposed(subject, plan_steps(subject.defense, settings, threat_model=threat_model))
    return [one for one in found if subject.model is None or one.category != "naive"]


def _exposed(subject: Subject, steps: Sequence[Step]) -> list[Step]:
    return [one for one in steps if subject.model is None or one.exposure == "defense"]


def _findings(setup: Sequence[Any], content: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = {one["code"] for one in content["findings"]}
    return [*(one.to_dict() for one in setup if one.code not in known), *content["findings"]]


def _measured(
    subject: Subject, steps: Sequence[Step], result: AdaptiveResult, settings: AdaptiveSettings
) -> dict[str, Any]:
    """The number, the steps and which of them broke each sample, from the result of the cascade."""
    content, records, defense = result.content["defended"], result.records, subject.defense
    right, stands = [one["right"] > 0.5 for one in records], [one["worst"] > 0.5 for one in records]
    broken = [before and not after for before, after in zip(right, stands, strict=True)]
    found_by = [one["by"] if lost else None for one, lost in zip(records, broken, strict=True)]
    samples, planned, worst = len(records), {one.name: one for one in steps}, content["worst_case"]
    rows = []
    for one in content["attacks"]:
        step = planned[one["name"]]
        rows.append(
            {
                **{key: one[key] for key in ("name", "samples", "outcomes", "seconds", "passes")},
                "text": text_of(_adapted(step, subject, settings.draws)),
                "description": f"{one['attack']}, {step.exposure}",
                "white_box": _is_white_box(step),
                "broken": found_by.count(one["name"]),
                "robust_accuracy": one["still_robust"],
                "interval": _interval(one["still_robust"], samples),
            }
        )
    kind = "random model" if subject.model is not None else type(defense).__name__
    return {
        "clean_accuracy": content["clean_accuracy"],
        "worst_case": {
            "robust_accuracy": worst["robust_accuracy"],
            "interval": _interval(worst["robust_accuracy"], samples),
            "samples": samples,
            "broken": sum(broken),
            "not_attacked": worst["not_attacked"],
            "robust": "".join("01"[one] for one in stands),
        },
        "steps": rows,
        "found_by": found_by,
        "curve": [],
        "warnings": result.content["warnings"],
        "defense": {
            "name": kind,
            "random": defense.random,
            "repeats": settings.repeats if defense.random else 1,
            "draws": settings.draws if defense.random else 1,
            "deviation": worst["deviation"],
            "majority": worst["majority"],
            "cost": result.content["cost"],
        },
    }


def _interval(share: float, samples: int) -> list[float] | None:
    """An interval for a mean of shares: they vary less than zeros and ones of the same mean."""
    total = round(share * samples, 6)
    low, high = (proportion_interval(end(total), samples) for end in (math.floor, math.ceil))
    return None if low is None or high is None else [low[0], high[1]]


def _is_white_box(step: Step) -> bool:
    return step.exposure != "static" and step.attack.traits.gradients


def _adapted(step: Step, subject: Subject, draws: int) -> Attack:
    """Return the attack of a step as it runs on the model or the defense itself."""
    averaged = subject.defense.random and step.averaged and step.category == "white-box"
    if step.exposure not in ("static", "defense"):
        mode = step.exposure
    elif averaged:
        mode = "plain" if step.exposure == "defense" and subject.model is None else "identity"
    else:
        return step.attack
    return AdaptedAttack(attack=step.attack, gradient_mode=mode, eot=draws if averaged else 1)


def _strongest(steps: Sequence[Step], result: AdaptiveResult, given: EvaluationInputs) -> Step | None:
    """Return the white-box step to certify: the last that broke a sample, else the longest that ran, or that there is.

    Where transfer from the static model broke everything, no white-box step had anything to attack.
    """
    aware = [one for one in steps if one.attack.traits.detector]
    # Attacks that ignore a detector fail one of its two tests.
    white = {one.name: one for one in aware or steps if _is_white_box(one)}
    content, classes = result.content["defended"], given.logits.shape[1]
    ran = [white[one["name"]] for one in content["attacks"] if one["name"] in white]
    if broke := [one for one in ran if content["worst_case"]["by"][one.name]]:
        return broke[-1]

    def length(step: Step) -> float:
        cost = step.attack.cost(given.threat_model, classes=classes)
        return 0.0 if cost is None else cost.backward

    # Of as long ones, those whose gradients do not end in the defense.
    known = sorted(ran or white.values(), key=lambda one: one.exposure == "defense")
    return max(known, key=length, default=None)


def _certified(
    subject: Subject,
    steps: Sequence[Step],
    result: AdaptiveResult,
    given: EvaluationInputs,
    settings: EvaluateSettings,
    run: RunKeywords,
    **more: Any,
) -> tuple[dict[str, Any], Attack | None, list[Part]]:
    """Put the strongest white-box attack through the binarization test on the random model or the defense."""
    step, defense = _strongest(steps, result, given), subject.defense
    if step is None:
        return uncertified(None, "no white-box attack was run"), None, []
    attack = _adapted(step, subject, AdaptiveSettings().draws)
    if defense.random and (subject.model is None or more["detector"] is not None):
        needs = "the defense", "features of each row that stay"
        if subject.model is not None:
            needs = "the model", "logits that stay beside a detector"
        words = f"{needs[0]} draws random numbers, and the binarization test needs {needs[1]}"
        return uncertified(attack, words), attack, []
    certificate, tested = certify(attack, given, settings, out=run.out, model=subject.model or defense, **more)
    return certificate, attack, [] if tested is None else list(parts_of(tested.content))
