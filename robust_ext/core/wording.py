"""The words and number formats that texts, pages and plots share."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
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


# Parts of class names, with what tables call them; the names of Foolbox, ART, torchattacks and this project.
_ABBREVIATIONS = {
    "(PyTorch|Numpy|TensorFlowV2|Attack|Method)+$": "",
    r"^(Linf|L[012])(?=[A-Z])": "",
    "ProjectedGradientDescent": "PGD",
    "FastGradient(Sign)?": "FGSM",
    "BasicIterative": "BIM",
    "MomentumIterative": "MIM",
    "CarliniWagner": "CW",
}
# Their settings that tables show next to the name: as a number of steps, or as text.
_STEPS = ("steps", "max_iter", "queries", "n_queries", "num_steps")
_WORDS = {"loss": "{}", "bpda": "BPDA {}", "eot": "EoT {}", "gradient_mode": "{}", "temperature": "temperature {}"}


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return short names, all different, of those names that spell out an attack with its settings.

    Example:
        >>> short_names(["foolbox:LinfPGD(steps=20)", "art:ProjectedGradientDescent(max_iter=20)", "mine"])
        {'foolbox:LinfPGD(steps=20)': 'PGD-20 (foolbox)', 'art:ProjectedGradientDescent(max_iter=20)': 'PGD-20 (art)'}
        >>> short_names(["foolbox:LinfPGD(steps=20)", "nets/attacks.py:fgsm"])
        {'foolbox:LinfPGD(steps=20)': 'PGD-20', 'nets/attacks.py:fgsm': 'fgsm'}
    """
    given = list(dict.fromkeys(names))
    parsed = {name: parts for name in given if (parts := _parsed(name)) is not None}
    taken = set(given) - parsed.keys()
    found: dict[str, str] = {}
    for short in dict.fromkeys(one[0] for one in parsed.values()):
        alike = [name for name in parsed if parsed[name][0] == short]
        for more in ((), (1,), (2,), (1, 2)):
            details = [", ".join(filter(None, (parsed[name][place] for place in more))) for name in alike]
            titles = [f"{short} ({words})" if words else short for words in details]
            if len({*titles}) == len(titles) and not taken & {*titles}:
                found |= zip(alike, titles, strict=True)
                taken |= {*titles}
                break
    return {name: found[name] for name in given if found.get(name, name) != name}


def _parsed(name: str) -> tuple[str, str, str] | None:
    """Return the short name, the library or file, and the other settings; None where the name is no such text."""
    text, _, view = name.partition(" through ")
    match = re.fullmatch(r"(?:([\w./\\-]+):)?([A-Za-z_]\w*)(\(.*\))?", text, re.DOTALL)
    if match is None or not (match[1] or match[3]):
        return None
    try:
        call = ast.parse(f"f{match[3] or '()'}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        settings = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError):
        return None
    short, inner = match[2], settings.pop("attack", None)
    if isinstance(inner, str):
        short = (_parsed(inner) or (inner,))[0]
    else:
        for pattern, words in _ABBREVIATIONS.items():
            short = re.sub(pattern, words, short) or short
    short += "".join(f"-{settings.pop(key)}" for key in _STEPS if isinstance(settings.get(key), int))
    stated = [words.format(settings.pop(key)) for key, words in _WORDS.items() if settings.get(key) not in (None, 1)]
    rest = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return ", ".join(filter(None, [short, *stated, view])), match[1] or "", retyped(rest)


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
