"""Evaluations of models that draw random numbers, and of test-time defenses: the cascade of ``evaluate_defense``."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.core.devices import run_device
from robust_ext.core.errors import InconsistentModelError, OutOfTimeError
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.context import current_context, is_over
from robust_ext.engine.evaluation_file import as_folder
from robust_ext.engine.inputs import Batches, EvaluationInputs, bounded_module, read_samples
from robust_ext.evaluations.adaptive.api import evaluate_prepared, prepare_defense
from robust_ext.evaluations.adaptive.plan import Step, plan_steps
from robust_ext.evaluations.adaptive.settings import AdaptiveResult, AdaptiveSettings
from robust_ext.evaluations.causes.setup import ACCURACY, find_setup
from robust_ext.evaluations.caveats import Part, parts_of
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
from robust_ext.evaluations.evaluate.search import Search, search_recipe
from robust_ext.evaluations.evaluate.separate import separate
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.eot import EoT
from robust_ext.models.function_purifier import WholeDefense

_STRENGTHS: Mapping[str, Mapping[str, Any]] = {
    "quick": {"steps": 20, "queries": 150},
    "standard": {"steps": 50, "queries": 500},
    "thorough": {"steps": 100, "transfer_steps": 100, "queries": 5000},
}

# Samples at most by which a defense inside a model is found.
_LOOKED_AT = 256


@dataclass(frozen=True)
class Subject:
    """A test-time defense or a random model, evaluated instead of a plain classifier.

    Args:
        defense: The defense to judge.
        model: The random model that it is made of; None for a test-time defense.
    """

    defense: AdaptiveDefense
    model: nn.Module | None = None


def prepare(
    run: RunKeywords,
    model: object,
    inputs: Array | Batches,
    labels: Array | None,
    threat_model: ThreatModel,
    settings: EvaluateSettings,
    defense: object,
    weights: str | os.PathLike[str] | None,
    beside: object = None,
    **judged: Any,
) -> tuple[EvaluationInputs, Subject | None]:
    """Check a model and its samples; return the inputs, and the defense or random model, None for a classifier.

    Samples are read once: an iterator ends. A model that is an AdaptiveDefense is one, and one that holds one is taken
    apart, unless there is a detector ``beside`` it; a model whose logits change from
    call to call is judged by fresh draws, and its mean over draws that are held is what it is compared with.
    """
    samples, size = read_samples(inputs, labels, threat_model), settings.batch_size
    given = samples, samples.labels, threat_model, run
    if isinstance(model, AdaptiveDefense) and defense is None:
        defense, model = model, model.classifier
    elif defense is None and beside is None and judged.get("criterion") is None:
        module = bounded_module(model, threat_model, device=run.device)
        found = separate(module, samples.inputs[:_LOOKED_AT].to(run_device(module, run.device)))
        if found is not None:
            model, defense = found
    if defense is not None:
        found, made = prepare_defense(defense, model, *given, batch_size=size, weights=weights)
        return found, Subject(made)
    try:
        return run.prepare(model, samples, samples.labels, threat_model, batch_size=size, **judged), None
    except InconsistentModelError as error:
        if error.kind != "random":
            raise
    module = bounded_module(model, threat_model, device=run.device)
    held = EoT(WholeDefense(module, module, random=True), draws=AdaptiveSettings().draws, seed=0, fixed=True)
    found, made = prepare_defense(WholeDefense(held, module, random=True), held, *given, batch_size=size)
    return found, Subject(made, module)


def evaluate_subject(
    subject: Subject, given: EvaluationInputs, settings: EvaluateSettings, run: RunKeywords, *, begun: float
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
    steps = _steps(subject, chosen, given.threat_model)
    result = evaluate_prepared(steps, given, defense, chosen, own)
    more: dict[str, Any] = {}
    if subject.model is not None:
        more["draws"] = draws_to_plant(subject.model, given, settings)
    certificate, attack, parts = _certified(subject, steps, result, given, settings, run, **more)
    parts, search = [*parts_of(result.content), *parts], None
    if settings.search and subject.model is not None and doubtful(certificate):
        search = _search(subject.model, given, settings, run, **more)
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
    left_out = [NO_SEARCH] if settings.search and subject.model is None else []
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
        measured=_measured(subject, steps, result, chosen),
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
    found = plan_steps(subject.defense, settings, threat_model=threat_model)
    if subject.model is None:
        return found
    return [one for one in found if one.exposure == "defense" and one.category != "naive"]


def _findings(setup: Sequence[Any], content: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = {one["code"] for one in content["findings"]}
    return [*(one.to_dict() for one in setup if one.code not in known), *content["findings"]]


def _measured(
    subject: Subject, steps: Sequence[Step], result: AdaptiveResult, settings: AdaptiveSettings
) -> dict[str, Any]:
    """The number, the steps and which of them broke each sample, from the result of the cascade."""
    content, records, defense = result.content["defended"], result.records, subject.defense
    right, stands = [one["right"] > 0.5 for one in records], [one["left"] > 0.5 for one in records]
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
                "robust_accuracy": one["left"],
                "interval": _interval(one["left"], samples),
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
    white = {one.name: one for one in steps if _is_white_box(one)}
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
    if subject.model is None and defense.random:
        words = "the defense draws random numbers, and the binarization test needs features of each row that stay"
        return uncertified(attack, words), attack, []
    certificate, tested = certify(attack, given, settings, out=run.out, model=subject.model or defense, **more)
    return certificate, attack, [] if tested is None else list(parts_of(tested.content))
