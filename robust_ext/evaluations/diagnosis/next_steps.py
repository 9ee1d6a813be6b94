"""What to run after a diagnosis, as commands of the same samples or as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.printable import shell_words
from robust_ext.engine.context import current_context
from robust_ext.evaluations.causes.finding import Finding
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
    """What leaves the lowest robust accuracy of the attacks that were run beside a remedy; None without any."""
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
    # The text of an attack says how it is adapted.
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
