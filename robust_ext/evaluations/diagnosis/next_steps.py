"""What to run after a diagnosis, as commands of the same samples or as code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.printable import shell_words
from robust_ext.engine.context import current_context
from robust_ext.evaluations.causes.finding import Finding

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
        words = "A remedy is confirmed on these samples: run the full binarization test with it."
        return [_step(words, "binarization", confirmed)]
    if tried is None and any(remedy.runnable for remedy in likely.remedies) and not refused:
        return [_step("Run the remedies and see what they change.", "diagnose", trying=True)]
    return [_step("Mend what is named first, and run this again.", "diagnose")]


def _step(words: str, name: str, confirmed: Mapping[str, Any] | None = None, *, trying: bool = False) -> Step:
    """A step with the attack as a confirmed remedy has it; ``trying``: with all remedies run."""
    given, text = list(current_context().command), None if confirmed is None else confirmed["text"]
    if given[:1] != ["diagnose"]:
        return {"words": words, "command": _code(name, confirmed, trying=trying)}
    options = ["--try-remedies"] if trying else []
    return {"words": words, "command": shell_words(["robust-ext", *_command(given, name, text, options)])}


def _command(given: Sequence[str], name: str, attack: str | None, options: Sequence[str]) -> list[str]:
    """The arguments of this command as those of another, with another attack and further options."""
    again = name == "diagnose"
    # The text of an attack says how it is adapted.
    without = {*(() if again else _VALUED), *(() if attack is None else ("--attack", "--bpda", "--eot"))}
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
