"""The words and number formats that texts, pages and plots share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VERDICTS = {
    "passed": "Adversarial examples were planted, and found; of several attacks, the strongest counts. This takes away "
    "one reason to doubt the evaluation. It does not prove that no stronger attack exists.",
    "failed": "Adversarial examples were there, and were missed. A robust accuracy measured with such an attack shows "
    "more about the attack than about the network.",
    "inconclusive": "The test could not separate a strong attack from a weak one here. This is no pass and no fail.",
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
        "No linear readout separated the inner points from the boundary points, so no problem could be built. Not part "
        "of the score.",
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


def shorten(text: str, width: int) -> str:
    """Return ``text`` with its middle replaced by an ellipsis, so that it takes at most ``width`` columns.

    Example:
        >>> shorten("foolbox:LinfPGD(steps=40)", 15)
        'foolbox…eps=40)'
    """
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return text
    head, tail = "", ""
    while True:
        # The longer end waits, so that both ends stay readable.
        longer_head = cell_len(head) <= cell_len(tail)
        char = text[len(head)] if longer_head else text[-1 - len(tail)]
        if cell_len(head + tail + char) > width - 1:
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


def percent(value: float | None) -> str:
    """Return a share in per cent with one decimal, as in the papers' tables.

    Example:
        >>> percent(0.9071), percent(1.0), percent(None)
        ('90.7', '100.0', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}"


def count(number: int, thing: str) -> str:
    """Return so many things in words.

    Example:
        >>> count(1, "attack"), count(2, "attack")
        ('1 attack', '2 attacks')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"
