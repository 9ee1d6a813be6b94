"""The words and number formats that the table and the page share, and the check of a result at the door."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.errors import InvalidArgumentError

VERDICTS = {
    "passed": "Adversarial examples were planted, and found; of several attacks, the strongest counts. This takes away "
    "one reason to doubt the evaluation. It does not prove that no stronger attack exists.",
    "failed": "Adversarial examples were there, and were missed. A robust accuracy measured with such an attack says "
    "more about the attack than about the network.",
    "inconclusive": "The test could not tell a strong attack from a weak one here. This is neither a pass nor a fail.",
}
"""What each verdict means for the evaluation."""

OUTCOMES = {
    "found": (
        "Found",
        "The candidate is finite, within the bounds and epsilon, and changes the prediction: the problem is solved. "
        "Only these count towards the test score.",
    ),
    "rejected": (
        "Rejected",
        "A valid input within epsilon that changes the prediction, and that the detector rejects (in the inverted "
        "test: lets pass). An example that fools both existed, and the attack missed it.",
    ),
    "not_adversarial": (
        "Not adversarial",
        "A valid input within epsilon, but the prediction did not change. An adversarial example existed, and the "
        "attack missed it.",
    ),
    "beyond_epsilon": (
        "Beyond epsilon",
        "Farther from the clean input than the threat model allows. Check the epsilon and the norm that the attack "
        "was given.",
    ),
    "out_of_bounds": (
        "Out of bounds",
        "Some values lie outside the range of valid inputs. Check the bounds and the preprocessing.",
    ),
    "not_finite": ("Not finite", "The candidate holds NaN or infinity: the attack broke down numerically."),
}
"""Label and meaning of what can become of an attacked problem."""

SKIPPED = {
    "not_separable": (
        "Not separable",
        "No linear readout told the inner points from the boundary points, so no problem could be built. Not part of "
        "the score.",
    ),
    "not_planted": (
        "Not planted",
        "The planted example was not adversarial any more when it was checked through the whole network. Not part of "
        "the score.",
    ),
}
"""Label and meaning of why a sample was left out."""

PHASES = {
    "features": "Features",
    "readout": "Readout",
    "attack": "Attack",
    "random": "Random attack",
    "verify": "Verification",
}
"""Label of each timed phase, in the order in which a run goes through them."""


def check_result(result: Mapping[str, Any]) -> None:
    """Refuse a result that is of another kind, has no attacks, or a verdict that is not one.

    Raises:
        InvalidArgumentError: Names the entry.
    """
    if result.get("kind") != "binarization":
        raise InvalidArgumentError("result['kind']", result.get("kind"), "'binarization'")
    attacks = result.get("attacks")
    if not isinstance(attacks, Sequence) or isinstance(attacks, str) or not attacks:
        raise InvalidArgumentError("result['attacks']", attacks, "a list with at least one attack")
    for owner in (result, *attacks):
        if owner.get("verdict") not in VERDICTS:
            raise InvalidArgumentError("verdict", owner.get("verdict"), "one of " + ", ".join(map(repr, VERDICTS)))


def plain(text: object) -> str:
    r"""Return ``text`` on one line, with what cannot be printed (controls, lone surrogates) written as escapes.

    Example:
        >>> plain("a\tb \x1b[31m")
        'a b \\x1b[31m'
    """
    line = " ".join(str(text).split())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode() for char in line
    )


def cells(text: str) -> int:
    """Return how many columns of a terminal ``text`` takes: wide characters two, combining ones none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def shorten(text: str, width: int) -> str:
    """Return ``text`` with its middle replaced by an ellipsis, so that it takes at most ``width`` columns.

    Example:
        >>> shorten("foolbox:LinfPGD(steps=40)", 15)
        'foolbox…eps=40)'
    """
    if cells(text) <= width:
        return text
    head, tail = "", ""
    while True:
        # The longer end waits, so that both ends stay readable.
        longer_head = cells(head) <= cells(tail)
        char = text[len(head)] if longer_head else text[-1 - len(tail)]
        if cells(head + tail + char) > width - 1:
            return f"{head}…{tail}"
        head, tail = (head + char, tail) if longer_head else (head, char + tail)


def attack_title(attack: Mapping[str, Any]) -> str:
    """Return the name of an attack and, where it is known, what it attacked."""
    name, target = plain(attack["name"]), plain(attack["target"])
    return f"{name} on {target}" if target else name


def share(value: float | None, threshold: float) -> str:
    """Return a share in [0, 1] with three decimals; more where rounding would carry it across ``threshold``.

    Example:
        >>> share(0.5, 0.95), share(0.9496, 0.95), share(None, 0.95)
        ('0.500', '0.9496', '-')
    """
    if value is None:
        return "-"
    for decimals in range(3, 9):
        text = f"{value:.{decimals}f}"
        if (float(text) >= threshold) == (value >= threshold):
            return text
    return repr(value)


def interval(bounds: Sequence[float] | None, *, decimals: int = 3) -> str:
    """Return a confidence interval of shares as ``[low, high]``, or nothing where there is none."""
    return "" if bounds is None else f"[{bounds[0]:.{decimals}f}, {bounds[1]:.{decimals}f}]"


def seconds(value: float) -> str:
    """Return a duration in seconds with three figures or all the whole seconds, whichever is more."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
