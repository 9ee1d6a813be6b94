"""What to run after a diagnosis, as commands of the same samples or as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.printable import shell_words
from robust_ext.engine.context import current_context
from robust_ext.evaluations.diagnosis.finding import Finding, Remedy

# Options of this command that others lack or have other defaults of: with a value, and without one.
_VALUED = ("--out", "--samples", "--planted", "--inner-points", "--queries", "--random-points", "--affordable")
_BARE = ("--try-remedies", "--no-try-remedies", "--references", "--no-references")

Step = dict[str, str]


def next_steps(likely: Finding | None, tried: Sequence[Mapping[str, Any]] | None, *, refused: bool) -> list[Step]:
    """Words and a command (or code) each: mend what was found and see again, or go on to the full tests.

    Args:
        likely: The most likely cause, if any.
        tried: Remedies that were tried, as in ``result.json``; None where none were to be.
        refused: Whether the model could not be evaluated as it is.
    """
    if likely is None:
        return [
            _step("Nothing of weight was found: run the full binarization test.", "binarization"),
            _step("Then state robust accuracy on as many samples as the claim is about.", "robust-accuracy"),
        ]
    confirmed = next((one for one in tried or () if one["confirmed"] and not one["remedy"]["evaluate"]), None)
    if confirmed is not None:
        remedy = confirmed["remedy"]
        words = "A remedy is confirmed on these samples: run the full binarization test with it."
        return [_step(words, "binarization", remedy["attack"], remedy["options"], remedy["view"])]
    if tried is None and any(map(_runnable, likely.remedies)) and not refused:
        return [_step("Run the remedies and see what they change.", "diagnose", None, ("--try-remedies",))]
    return [_step("Mend what is named first, and run this again.", "diagnose")]


def _runnable(remedy: Remedy) -> bool:
    return remedy.runnable


def _step(
    words: str,
    name: str,
    attack: str | None = None,
    options: Sequence[str] = (),
    view: Mapping[str, Any] | None = None,
) -> Step:
    given = list(current_context().command)
    if given[:1] == ["diagnose"]:
        return {"words": words, "command": shell_words(["robust-ext", *_command(given, name, attack, options)])}
    return {"words": words, "command": _code(name, attack, options, view or {})}


def _command(given: Sequence[str], name: str, attack: str | None, options: Sequence[str]) -> list[str]:
    """The arguments of this command as those of another, with another attack and further options."""
    again = name == "diagnose"
    without = {*(() if again else _VALUED), *(() if attack is None else ("--attack",))}
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


def _code(name: str, attack: str | None, options: Sequence[str], view: Mapping[str, Any]) -> str:
    """A call of the public function."""
    shown = "attack" if attack is None else repr(attack)
    if view:
        adapted = ", ".join(f"{key}={value!r}" for key, value in view.items())
        shown = f"AdaptedAttack(attack=robust_ext.as_attack({shown}), {adapted})"
    if name == "binarization":
        return f"robust_ext.binarization_test(model, {shown}, inputs, threat_model)"
    function = name.replace("-", "_")
    trying = ", try_remedies=True" if "--try-remedies" in options else ""
    return f"robust_ext.{function}(model, {shown}, inputs, labels, threat_model{trying})"
