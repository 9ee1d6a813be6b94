"""All runs of a diagnosis, and their conclusions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import OutOfTimeError, shell_words
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import current_context
from robust_ext.evaluations.causes.comparisons import compare_attacks
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MISLEADING, NO_GRADIENT
from robust_ext.evaluations.causes.indicators import find_attack_faults
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.causes.remedies import for_classes, for_crash
from robust_ext.evaluations.diagnosis.examining import RANDOM, ROLES, Examined, Examiner, Ran
from robust_ext.evaluations.diagnosis.trying import HELPED

# Options of this command that others lack or have other defaults of: with a value, and without one.
_VALUED = ("--out", "--samples", "--planted", "--inner-points", "--queries", "--random-points", "--affordable")
_BARE = ("--try-remedies", "--no-try-remedies", "--references", "--no-references")

Step = dict[str, str]


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
        return [
            _step("Not all was run before the time was over: run this again without a limit.", "diagnose", whole=False)
        ]
    if likely is None:
        words = "State robust accuracy on as many samples as the claim is about."
        stated = _step(words if not plantable else f"Then {words[0].lower()}{words[1:]}", "robust-accuracy")
        if not plantable:
            return [stated]
        return [_step("Nothing of weight was found: run the full binarization test.", "binarization"), stated]
    helped = next((one for one in tried or () if one["outcome"] in HELPED and not one["remedy"]["evaluate"]), None)
    if helped is not None:
        return [_with(helped)]
    if tried is None and any(remedy.runnable for remedy in likely.remedies) and not refused:
        return [_step("Run the remedies and see what they change.", "diagnose", trying=True)]
    return [_step("Fix what is named first, and run this again.", "diagnose")]


def strongest(tried: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the attack of lowest robust accuracy that ran next to a remedy; None without any."""
    return min(tried["beside"], key=lambda one: float(one["robust_accuracy"]), default=None)


def _with(helped: Mapping[str, Any]) -> Step:
    """The full test with a remedy of use, or with what finds more than the attack does with it."""
    best, after = strongest(helped), helped["after"]["robust_accuracy"]
    if best is not None and best["text"] is not None and after is not None and best["robust_accuracy"] < after:
        words = f"{best['name']} finds more than the attack with the remedy: run the full binarization test with it."
        return _step(words, "binarization", {**helped, "text": best["text"]})
    what = "A remedy is confirmed" if helped["confirmed"] else "Another attack finds more"
    return _step(f"{what} on these samples: run the full binarization test with it.", "binarization", helped)


def _step(
    words: str,
    name: str,
    confirmed: Mapping[str, Any] | None = None,
    *,
    trying: bool = False,
    whole: bool = True,
) -> Step:
    """A step with the attack as a confirmed remedy has it, with all remedies run, or without a limit of time."""
    given, text = list(current_context().command), None if confirmed is None else confirmed["text"]
    if given[:1] != ["diagnose"]:
        return {"words": words, "command": _code(name, confirmed, trying=trying)}
    options = ["--try-remedies"] if trying else []
    dropped = () if name == "diagnose" and whole else ("--minutes",)
    command = _command(given, name, text, options, dropped=dropped)
    return {"words": words, "command": shell_words(["robust-ext", *command])}


def _command(
    given: Sequence[str], name: str, attack: str | None, options: Sequence[str], *, dropped: Sequence[str]
) -> list[str]:
    """The arguments of this command as those of another, with another attack and further options."""
    again = name == "diagnose"
    # The text of an attack has its adaptation.
    without = {*dropped, *(() if again else _VALUED), *(() if attack is None else ("--attack", "--bpda", "--eot"))}
    kept, skipped = [name], False
    for argument in given[1:]:
        option = argument.partition("=")[0]
        if skipped:
            skipped = False
        elif option in without:
            skipped = "=" not in argument
        elif again or option not in _BARE:
            kept.append(argument)
    return [*kept, *(() if attack is None else ("--attack", attack)), *options]


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


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The results of attacks and references; empty where the model cannot be evaluated."""

    examiner: Examiner | None
    attacks: Mapping[str, Examined] = field(default_factory=dict)
    larger: Mapping[str, Mapping[str, Ran]] = field(default_factory=dict)
    references: Mapping[str, Ran] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # What the time was over before

    @classmethod
    def of(
        cls, examiner: Examiner | None, attacks: Mapping[str, Attack], *, watch: Callable[[str], object]
    ) -> Examination:
        """Run everything; ``watch`` is called with words for each step."""
        if examiner is None:
            return cls(examiner=None)
        examined, larger, references = dict[str, Examined](), dict[str, dict[str, Ran]](), dict[str, Ran]()
        left_out = list[str]()
        for name, attack in attacks.items():
            watch(name)
            try:
                examined[name] = examiner.examine(attack)
            except OutOfTimeError:
                left_out.append(name)
                continue
            left_out += [f"{name} on planted problems"] if examined[name].cut else []
            larger[name] = {}
            if examiner.settings.references and examined[name].ran.error is None:
                try:
                    for role, ran in examiner.larger(examined[name].ran):
                        watch(f"{name}, {role} budget")
                        larger[name][role] = ran
                except OutOfTimeError:
                    left_out.append(f"{name} with larger budgets")
        compared = examiner.references(attacks.values()) if examiner.settings.references else {}
        for name, attack in compared.items():
            watch(name)
            try:
                ran = examiner.reference(name, attack)
            except OutOfTimeError:
                left_out.append(name)
                continue
            # One that raises (no gradient comes back) has nothing to compare with.
            if ran.error is None:
                references[name] = ran
        return cls(examiner=examiner, attacks=examined, larger=larger, references=references, left_out=tuple(left_out))


def find(examination: Examination, probe: ModelProbe, *, threat_model: ThreatModel) -> list[Finding]:
    """Findings about the model, about each attack, and from comparing it with others.

    What spoils gradients of the model is one where an attack did not get past it.
    """
    found, examiner = list[Finding](), examination.examiner
    if examiner is None:
        # What was refused comes first; what gradients do is looked at when that is fixed.
        refused = [one for one in probe.findings if one.code not in MISLEADING]
        weighty = {one.code for one in refused if one.weight != "low"}
        if weighty == {"random_output"}:
            # But for gradients that are none: a mean over draws, which randomness is met with, is none either.
            return [one for one in probe.findings if one in refused or one.code in NO_GRADIENT]
        return refused if weighty else list(probe.findings)
    correct, random = examiner.given.correct.tolist(), examination.references.get(RANDOM)
    ran = dict[str, Ran]()
    for name, examined in examination.attacks.items():
        if examined.ran.error is not None:
            found.append(
                Finding(
                    code="crashed",
                    cause=f"It {_raised(examined.ran.error, name)}, and returned nothing.",
                    evidence=(examined.ran.error,),
                    attack=name,
                    remedies=for_crash(examined.ran.error),
                )
            )
            continue
        if examined.raised:
            classes, planted = examiner.given.logits.shape[1], examiner.settings.planted
            found.append(_raised_on_planted(name, examined, classes=classes, planted=planted))
        ran[name] = examined.ran
        entries = [*examined.ran.entries(correct, random), *examined.planted_entries]
        found += find_attack_faults(name, examined.ran.attack, entries, threat_model=threat_model, probe=probe)
    # An attack of the user's that has the name of a reference is the one that counts.
    compared = {**examination.references, **ran}
    budgets = {
        role: {
            name: examination.larger[name][role].entries(correct, None)
            for name in ran
            if role in examination.larger[name]
        }
        for role in ROLES
    }
    found += compare_attacks(
        {name: one.entries(correct, random) for name, one in compared.items()},
        {name: one.attack for name, one in compared.items()},
        judged=list(ran),
        **budgets,
    )
    codes = {finding.code for finding in found}
    past = () if codes & {"crashed", *MISLEADING} or not examination.attacks else MISLEADING
    return [*(finding for finding in probe.findings if finding.code not in past), *found]


def _raised_on_planted(name: str, examined: Examined, *, classes: int, planted: int) -> Finding:
    """An attack that raised on planted problems and not on the samples."""
    padded, count = examined.padded, min(planted, len(examined.ran.records))
    cause = f"It raised on planted problems, {'which have two classes, ' if classes > 2 else ''}and not on the samples"
    evidence = [
        str(examined.error),
        f"It ran on {len(examined.ran.records)} samples with {classes} classes, and raised on the problems of two "
        f"classes that were planted in the first {count} of them.",
    ]
    if padded is not None:
        cause = f"{cause}: it takes {classes} classes, or labels of its own, for granted"
        evidence.append(
            f"On the same problems, padded to {classes} classes that nothing is in, it ran, and found "
            f"{padded['score']:.2f} of what is planted."
        )
    return Finding(
        code="crashed_planted", cause=f"{cause}.", evidence=tuple(evidence), attack=name, remedies=for_classes()
    )


def _raised(error: str, name: str) -> str:
    """Return the exception of an attack of this name, in a line."""
    text = error.removeprefix(f"{name}: ").split("\n")[0].partition("; ")[0].rstrip(".")
    _, found, raised = text.partition("raised ")
    return f"raised {raised[:160]}" if found else f"raised an error ({text[:160]})"
