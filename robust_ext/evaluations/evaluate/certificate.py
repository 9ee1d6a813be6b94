"""The certificate: the binarization test of the attack that a robust accuracy rests on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack, adapted_text
from robust_ext.attacks.base import Attack
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError, OutOfTimeError
from robust_ext.core.settings import default_of
from robust_ext.core.wording import count, percent
from robust_ext.engine.context import current_context
from robust_ext.engine.estimate import Estimate, EstimatedError
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome
from robust_ext.evaluations.binarization import BinarizationResult, binarization_test, plant
from robust_ext.evaluations.binarization.head import OF_HEAD
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.causes.rewriting import call_of
from robust_ext.evaluations.evaluate.cascade import MemberRun, within
from robust_ext.evaluations.evaluate.detected import joined
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.evaluate.suite import Member
from robust_ext.models.black_box import black_box_in

# Findings with which a pass cannot support a number: others solve deeper problems, or the batch size decides.
WEAKER = ("falls_behind", "batch_size_matters")

ERROR_RATE = 0.02
"""The probability that an attack is certified whose rate is not above what a pass claims, before any search.

The search of the same evaluation has .03, so that both together stay at .05.
"""
ENOUGH = 38
"""The fewest planted problems that can show so at this error rate, where an attack misses none."""

# Draws that points are measured over where a model is random, see draws_to_plant, and the samples they are tried on.
_DRAWS, _TRIED = (15, 60, 240), 8

# What is not tried where a defense or a detector stands before the classifier.
NO_SEARCH = {"name": "attack search", "reason": "recipes are searched for on classifiers alone that have gradients"}


def strongest(outcomes: Sequence[Outcome[MemberRun]]) -> Attack | None:
    """Return the white-box attack to certify: the last one at epsilon that broke a sample, else the first.

    On a black box, any member but random search will do. Earlier ones left that sample. Searches for the
    smallest perturbation cost many times as much to test, and stand aside where there is another.
    """
    ran = [one for one in outcomes if one.refusal is None and not isinstance(one.run.attack, RandomSearch)]
    # Of a model without gradients, any attack that is not what attacks are measured against.
    white = [one for one in ran if one.run.member.white_box] or (ran if _blind(ran) else [])
    white = [one for one in white if not one.run.attack.traits.minimum_norm] or white
    broke = [one for one in white if within(one.run, one.records)]
    return (broke[-1] if broke else white[0]).run.attack if white else None


def draws_to_plant(model: nn.Module, given: EvaluationInputs, settings: EvaluateSettings) -> int:
    """Return the draws to measure points of a random model over, chosen before any attack is tested.

    They are the fewest with which something can be planted in more than three quarters of the first samples: a readout
    has to hold for the majority of other draws, and a certificate needs most of the samples.
    """
    inputs = given.inputs[: min(_TRIED, settings.planted)]
    if not len(inputs) or current_context().dry_run:
        return _DRAWS[0]
    common: dict[str, Any] = {"layer": settings.layer, "judge_seed": settings.seed_of_judge}
    for draws in _DRAWS[:-1]:
        try:
            planted = len(plant(model, inputs, given.threat_model, draws=draws, **common))
        except ModelError:
            continue
        if 4 * planted > 3 * len(inputs):
            return draws
    return _DRAWS[-1]


def _blind(outcomes: Sequence[Outcome[MemberRun]]) -> bool:
    return any(black_box_in(one.run.given.module) is not None for one in outcomes)


def certify(
    attack: Attack,
    given: EvaluationInputs,
    settings: EvaluateSettings,
    *,
    out: str | os.PathLike[str] | None,
    model: object = None,
    **more: Any,
) -> tuple[dict[str, Any], BinarizationResult | None]:
    """Put an attack through the binarization test with depth on these samples; plain values, and the whole result.

    ``model`` is what it attacks, where that is not the classifier, and ``more`` are keywords of the test.
    """
    samples = min(settings.planted, len(given.ids))
    if not samples:
        return uncertified(attack, "the test was left out (planted=0)"), None
    try:
        result = binarization_test(
            given.module if model is None else model,
            [attack],
            given.inputs[:samples],
            given.threat_model,
            sample_ids=list(given.ids[:samples]),
            out=None if out is None else Path(out) / "certificate",
            seed=settings.seed,
            judge_seed=settings.judge_seed,
            layer=settings.layer,
            error_rate=ERROR_RATE,
            **more,
        )
    except (AttackError, InvalidArgumentError, ModelError, OutOfTimeError) as error:
        return uncertified(attack, str(error)), None
    return certificate_of(attack, result.content), result


def warn_if_uncertifiable(given: EvaluationInputs, settings: EvaluateSettings) -> None:
    """Warn before any work where there are too few samples for a certificate."""
    if settings.planted:
        rules = Rules(BinarizationSettings(threat_model=given.threat_model, error_rate=ERROR_RATE))
        rules.warn_if_few(min(settings.planted, len(given.ids)))


def doubtful(certificate: Mapping[str, Any]) -> bool:
    """Return whether an attack misses planted examples, of enough to tell."""
    if certificate["certified"] or not certificate["planted"]:
        return False
    missed = certificate["found"] < certificate["planted"]
    return bool(certificate["verdict"] != "inconclusive" or (missed and certificate["planted"] >= ENOUGH))


def weakness(attack: Attack, content: Mapping[str, Any]) -> str:
    """Return why a pass of this attack supports no number, as a clause; empty where it does.

    A finding about the model beside a pass is about its head, which the test replaces: where that masks gradients,
    examples are planted without it, or at the logits behind it. That an attack by queries finds these does not show
    that it finds those that an attack along better gradients would.
    """
    queries = not attack.traits.gradients
    for one in content["findings"]:
        cause = f"{one['cause'][0].lower()}{one['cause'][1:]}"
        if one["code"] in WEAKER:
            return cause
        if queries and one["attack"] is None and one["code"] in OF_HEAD:
            return f"it uses queries alone, while {cause}"
    return ""


def certificate_of(attack: Attack, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the certificate that the content of a binarization test gives an attack, as plain values.

    A recipe that passes at depth 1 and falls behind the witnesses deeper is not certified; nor is one by queries alone
    where the head masks gradients.
    """
    entry = content["attacks"][0]
    entry = joined(entry) if "tests" in entry else entry
    weaker = weakness(attack, content)
    certified = entry["verdict"] == "passed" and not weaker
    hits, problems = entry["outcomes"]["found"], entry["samples"]
    found = f"{hits} of {count(problems, 'planted example')}"
    deeper = [row for row in content["witnesses"] if row["proved"]]
    if certified:
        words = f"certified: it finds {found}, to depth {entry['depth']:g}"
    elif entry["verdict"] == "passed":
        words = f"not certified: it finds {found}, and {weaker}"
    elif not problems:
        words = f"not certified: {entry['reason'][0].lower()}{entry['reason'][1:]}"
    elif entry["verdict"] == "inconclusive" and hits == problems:
        words = f"not certified: it finds {found}, too few to tell; give more samples"
    else:
        random = "" if entry["random_score"] is None else f", random search {percent(entry['random_score'])}%"
        words = f"not certified: it finds {found}{random}"
    return {
        "attack": entry["name"],
        "text": text_of(attack),
        "verdict": entry["verdict"],
        "certified": certified,
        "words": words.rstrip("."),
        "reason": entry["reason"],
        "found": hits,
        "planted": problems,
        "score": entry["score"],
        "interval": entry["score_interval"],
        "random_score": entry["random_score"],
        "depth": entry["depth"],
        "witness_depth": max((row["depth"] for row in deeper), default=None),
        "head": [one["cause"] for one in content["findings"] if one["attack"] is None],
        "findings": list(content["findings"]),
        "warnings": list(content["warnings"]),
    }


def estimate_certificate(
    members: Sequence[Member],
    given: EvaluationInputs,
    settings: EvaluateSettings,
    *,
    out: str | os.PathLike[str] | None,
    detector: object,
) -> Estimate | None:
    """Estimate the test of the dearest white-box attack of a suite, in a dry run; None where nothing can be tested."""
    white = [one.attack for one in members if one.white_box and not one.attack.traits.minimum_norm]
    if not settings.planted or not white:
        return None

    def passes(attack: Attack) -> float:
        found = attack.cost(given.threat_model, classes=given.logits.shape[1]) or Cost()
        return found.forward + found.backward

    try:
        certify(max(white, key=passes), given, settings, out=out, detector=detector)
    except EstimatedError as found:
        return found.estimate.as_phase("certificate")
    return None


def uncertified(attack: Attack | None, why: str) -> dict[str, Any]:
    """Return an entry without a certificate, with the reason why the test was not run."""
    none = dict.fromkeys(("found", "planted", "score", "interval", "random_score", "depth", "witness_depth"))
    return {
        "attack": None if attack is None else attack.name,
        "text": None if attack is None else text_of(attack),
        "verdict": "inconclusive",
        "certified": False,
        "words": f"not certified: {why[0].lower()}{why[1:].rstrip('.')}",
        "reason": why,
        **none,
        "head": [],
        "findings": [],
        "warnings": [],
    }


def text_of(attack: Attack) -> str:
    """Return an attack as a text that runs again, or its description where it has none."""
    if isinstance(attack, AdaptedAttack) and _is_identity(attack):
        # Of a test-time defense this is another gradient than its own, though no setting was changed.
        return adapted_text(text_of(attack.attack), gradient_mode=attack.gradient_mode)
    call = call_of(attack)
    return describe(attack) if call is None else call.changed()


def _is_identity(attack: AdaptedAttack) -> bool:
    return all(value == default_of(AdaptedAttack, name) for name, value in attack.adaptation.items())
