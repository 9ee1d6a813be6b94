"""The words and number formats that texts, pages and plots share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.core.errors import printable


def plain(text: object) -> str:
    """``text`` on one line, with what cannot be printed (controls, lone surrogates) written as escapes."""
    return printable(" ".join(str(text).split()))


def typed(value: float, otherwise: str = ".4g") -> str:
    """A number as it is typed: ``k/255`` where it is exactly that and no short decimal, or in the format ``otherwise``.

    Example:
        >>> typed(8 / 255), typed(51 / 255), typed(0.0314), typed(2.0)
        ('8/255', '0.2', '0.0314', '2')
    """
    over = round(255 * value) if abs(value) < 1e4 else 0
    exact = over / 255 == value and float(f"{value:.6g}") != value
    return f"{over}/255" if exact else format(value, otherwise)


def retyped(text: str) -> str:
    """``text`` with long decimals that are exactly ``k/255`` written so, which every option and file takes too.

    Example:
        >>> retyped("foolbox:LinfPGD(abs_stepsize=0.00784313725490196, steps=40)")
        'foolbox:LinfPGD(abs_stepsize=2/255, steps=40)'
    """
    return re.sub(r"(?<![\w.])\d+\.\d{8,}(?:e-\d+)?(?![\w.])", lambda found: _retyped(found[0]), text)


def _retyped(number: str) -> str:
    shown = typed(float(number))
    return shown if "/" in shown else number


def shorten(text: str, width: int) -> str:
    """``text`` with its middle replaced by an ellipsis, so that it takes at most ``width`` columns."""
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
    """A share in [0, 1] with three decimals; more where rounding would carry it across ``threshold``."""
    if value is None:
        return "-"
    for decimals in range(3, 9):
        text = f"{value:.{decimals}f}"
        if (float(text) >= threshold) == (value >= threshold):
            return text
    return repr(value)


def interval(bounds: Sequence[float] | None) -> str:
    """Return a confidence interval of shares as ``[low, high]``, or nothing without one."""
    return "" if bounds is None else f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


def seconds(value: float) -> str:
    """Return a duration in seconds with three figures or all the whole seconds, whichever is more."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share in per cent with one decimal, as in the papers' tables."""
    return "-" if value is None else f"{100 * value:.1f}"


def accuracy(row: Mapping[str, Any]) -> str:
    """A robust accuracy in per cent, marked as an upper bound where samples were not attacked."""
    bound = "≤ " if row.get("not_attacked") and row["robust_accuracy"] is not None else ""
    return bound + percent(row["robust_accuracy"])


def rests_on(row: Mapping[str, Any], samples: int, title: str) -> str:
    """Describe the basis of a robust accuracy besides adversarial examples; empty without one."""
    non_finite, lost, parts = row.get("non_finite", 0), row.get("not_attacked", 0), []
    if non_finite:
        parts.append(
            f"{non_finite} of {samples} samples are broken by non-finite logits alone, without which it would be "
            f"{percent(row['without_non_finite'])}"
        )
    if lost:
        parts.append(
            f"{lost} of {samples} count as robust though an attack on them ended or timed out, so that it is an upper "
            "bound"
        )
    return f"{title}: {accuracy(row)} per cent; {'; '.join(parts)}." if parts else ""


def count(number: int, thing: str) -> str:
    """Return a number with its noun."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
