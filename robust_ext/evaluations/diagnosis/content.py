"""From what was found to ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from robust_ext.core.errors import OutOfTimeError, shell_words
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import ISOLATING, current_context
from robust_ext.engine.identity import describe, versions
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.progress import paced
from robust_ext.engine.verify import LOST
from robust_ext.evaluations.causes.finding import COMPARISONS, Finding
from robust_ext.evaluations.causes.indicators import ioaf, most_likely, unstable_predictions
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.caveats import attack_warnings, outside_warnings
from robust_ext.evaluations.diagnosis.examination import Examination
from robust_ext.evaluations.diagnosis.examining import ROLES, Examined, Ran
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings
from robust_ext.evaluations.diagnosis.trying import HELPED

Step = dict[str, str]
# The neighbourhood in which predictions are to be stable, as a share of the bounds' width, and the samples looked at.
_NEAR, _FEW = 8 / 255, 4


def make_content(
    *,
    module: nn.Module,
    probe: ModelProbe,
    examination: Examination,
    findings: Sequence[Finding],
    tried: Sequence[Mapping[str, Any]] | None,
    refusal: str | None,
    inputs: Tensor,
    threat_model: ThreatModel,
    settings: DiagnosisSettings,
    time: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    given = None if examination.examiner is None else examination.examiner.given
    correct = [] if examination.examiner is None else examination.examiner.correct
    likely, whole = most_likely(findings), not examination.left_out
    unstable = None if given is None else _unstable(given, settings.seed)
    attacks = [_attack(one, examination.larger[name], correct, unstable) for name, one in examination.attacks.items()]
    references = [_ran(one, correct) for one in examination.references.values()]
    plantable = not attacks or any(one["not_planted"] is None for one in attacks)
    ran = {name: one.ran for name, one in examination.attacks.items()}
    lost = attack_warnings([(name, one.records) for name, one in ran.items()], consequence=", and count as not found")
    outside = outside_warnings((name, one.attack, threat_model, one.records) for name, one in ran.items())
    return {
        "kind": "diagnosis",
        "likely": None if likely is None else likely.to_dict(),
        "reason": _reason(likely, attacks, references, tried or (), whole=whole),
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
        "next": next_steps(likely, tried, refused=given is None, plantable=plantable, whole=whole),
        "not_run": refusal,
        "left_out": list(examination.left_out),
        "warnings": lost + outside,
        "settings": {
            **settings.to_dict(),
            "bounds": list(threat_model.bounds),
            **threat_model.of_entries,
            **({} if given is None else given.described),
            **current_context().origins,
        },
        "isolated": ISOLATING.get() is not None,
        "versions": versions(),
        "seed": settings.seed,
        "time": time,
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
            examined.ran.entries(correct),
            unstable=unstable,
            unbounded=larger[ROLES[1]].entries(correct) if ROLES[1] in larger else None,
        ),
    }


def _ran(ran: Ran, correct: Sequence[bool]) -> dict[str, Any]:
    """Return the results of an attack on the samples."""
    robust = ran.robust(correct)
    interval = proportion_interval(len(robust), len(ran.records))
    return {
        "name": ran.name,
        "description": describe(ran.attack),
        "kind": ran.attack.traits.kind,
        "epsilon": ran.epsilon,
        "robust_accuracy": ran.accuracy(correct),
        "interval": None if interval is None else list(interval),
        "not_attacked": sum(ran.records[index]["outcome"] in LOST for index in robust),
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
        more = ", although the attack misses planted examples" if missed else ""
        to = "" if whole else " in what ran before the time was over"
        return f"None of the known causes applies{to}{more}.{_lower(attacks, references, tried)}"
    of = "" if likely.attack is None or len(attacks) == 1 else f" of {likely.attack}"
    if likely.code in COMPARISONS:
        return f"What is seen{of}: {likely.cause}{_lower(attacks, references, tried)}"
    entry = next((one for one in tried if one["confirmed"] and one["code"] == likely.code), None)
    if entry is None:
        remedied = any(remedy.runnable for remedy in likely.remedies) and not tried
        return f"The likely cause{of}: {likely.cause}{_lower(attacks, references, tried, remedied=remedied)}"
    return f"The confirmed cause{of}: {likely.cause}{_beside(entry)}"


def _lower(
    attacks: Sequence[Mapping[str, Any]],
    references: Sequence[Mapping[str, Any]],
    tried: Sequence[Mapping[str, Any]],
    *,
    remedied: bool = False,
) -> str:
    """Name the number to use where a reference or a remedy leaves less accuracy than all attacks; empty otherwise.

    Where a remedy was not tried yet (``remedied``), that number may still fall.
    """
    known = [one["robust_accuracy"] for one in attacks if one["robust_accuracy"] is not None]
    found = [(one["robust_accuracy"], one["name"]) for one in references]
    found += [((one["after"] or {}).get("robust_accuracy"), "a remedy below") for one in tried]
    found = [(value, name) for value, name in found if value is not None]
    lowest, name = min(found, default=(1.0, ""))
    if not known or lowest >= min(known):
        return ""
    yours, theirs = (f"{100 * value:.1f}" for value in (min(known), lowest))
    advice = "apply the remedy before you report a number" if remedied else "report the lower number"
    return f" Robust accuracy is {yours} with the attack as given and {theirs} with {name}: {advice}."


def _beside(entry: Mapping[str, Any]) -> str:
    """Describe the results of references next to a confirmed remedy."""
    after = entry["after"]["robust_accuracy"]
    best = strongest(entry)
    if after is None or best is None:
        return ""
    yours, theirs = (f"{100 * value:.1f}" for value in (after, best["robust_accuracy"]))
    more = ": report the lower number" if best["robust_accuracy"] < after else ""
    return f" Robust accuracy is {yours} with the remedy and {theirs} with {best['name']}{more}."


def _range(values: Tensor) -> list[float] | None:
    finite = values.detach()[values.detach().isfinite()]
    return [float(finite.min()), float(finite.max())] if finite.numel() else None


# Options of this command that others lack or have other defaults of: with a value, and without one.
_VALUED = (
    "--out",
    "--samples",
    "--planted",
    "--inner-points",
    "--queries",
    "--random-points",
    "--affordable",
    "--minutes",
)
_BARE = ("--try-remedies", "--no-try-remedies", "--references", "--no-references")


def next_steps(
    likely: Finding | None,
    tried: Sequence[Mapping[str, Any]] | None,
    *,
    refused: bool,
    plantable: bool,
    whole: bool = True,
) -> list[Step]:
    """Words and a command (or code) each: fix what was found and see again, or go on to the full tests.

    Args:
        likely: The most likely cause, if any.
        tried: Remedies that were tried, as in ``result.json``; None where none were to be.
        refused: Whether the model could not be evaluated as it is.
        plantable: Whether a binarization test takes one of the attacks.
        whole: Whether all was run before the time was over.
    """
    if likely is None and not whole:
        words = "The time was over before everything ran: run this again without a limit."
        return [_step(words, "diagnose", without=("--minutes",))]
    if likely is None:
        stated = "measure robust accuracy on as many samples as the claim covers."
        if not plantable:
            return [_step(stated.capitalize(), "robust-accuracy")]
        words = "No serious fault was found: run the full binarization test."
        return [_step(words, "binarization"), _step(f"Then {stated}", "robust-accuracy")]
    helped = next((one for one in tried or () if one["outcome"] in HELPED and not one["remedy"]["evaluate"]), None)
    if helped is not None:
        best, after = strongest(helped), helped["after"]["robust_accuracy"]
        what = "A remedy is confirmed" if helped["confirmed"] else "Another attack finds more"
        words = f"{what} on these samples"
        if best is not None and best["text"] is not None and after is not None and best["robust_accuracy"] < after:
            words = f"{best['name']} finds more than the attack with the remedy"
            helped = {**helped, "text": best["text"]}
        return [_step(f"{words}: run the full binarization test with it.", "binarization", helped)]
    if tried is None and any(remedy.runnable for remedy in likely.remedies) and not refused:
        return [_step("Try the remedies and see what they change.", "diagnose", trying=True)]
    return [_step("Fix the first cause, and run this again.", "diagnose")]


def strongest(tried: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the attack of lowest robust accuracy that ran next to a remedy; None without any."""
    return min(tried["beside"], key=lambda one: float(one["robust_accuracy"]), default=None)


def _step(
    words: str, name: str, helped: Mapping[str, Any] | None = None, *, trying: bool = False, without: Sequence[str] = ()
) -> Step:
    """A step with the attack as a remedy that helped has it, with all remedies run, or without options."""
    command, *given = current_context().command or ("",)
    if command != "diagnose":
        return {"words": words, "command": _code(name, helped, trying=trying)}
    again, attack = name == "diagnose", None if helped is None else helped["text"]
    dropped = [*without, *(() if again else ("--minutes", *_VALUED))]
    if attack is not None:
        # The text of an attack has its adaptation.
        dropped += ["--attack", "--bpda", "--eot"]
    kept, skipped = [name], False
    for argument in given:
        option = argument.partition("=")[0]
        if skipped:
            skipped = False
        elif option in dropped:
            skipped = "=" not in argument
        elif option != "--no-progress" and (again or option not in _BARE):
            kept.append(argument)
    kept += [*(() if attack is None else ("--attack", attack)), *(("--try-remedies",) if trying else ())]
    return {"words": words, "command": shell_words(["robust-ext", *kept])}


def _code(name: str, confirmed: Mapping[str, Any] | None, *, trying: bool) -> str:
    """A call of the public function."""
    shown = "attack"
    if confirmed is not None:
        view = "".join(f", {key}={value!r}" for key, value in confirmed["remedy"]["view"].items())
        adapted = f"robust_ext.attacks.adapted.AdaptedAttack(attack=robust_ext.as_attack(attack){view})"
        shown = adapted if confirmed["text"] is None else repr(confirmed["text"])
    if name == "binarization":
        return f"robust_ext.binarization_test(model, {shown}, inputs, threat_model)"
    more = ", try_remedies=True" if trying else ""
    return f"robust_ext.{name.replace('-', '_')}(model, {shown}, inputs, labels, threat_model{more})"
