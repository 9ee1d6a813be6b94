"""Text of any origin made fit for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


def printable(text: str) -> str:
    r"""Text with all that is not printed but lines and tabs (controls, turned directions, lone surrogates) as escapes.

    So that it cannot move a cursor, recolour or rename a terminal.

    Example:
        >>> print(printable("a\x1b[31mb"))
        a\x1b[31mb
    """
    return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def duration(seconds: float) -> str:
    """Seconds in words.

    Example:
        >>> [duration(seconds) for seconds in (0.4, 75, 600, 7300)]
        ['0 s', '1 min 15 s', '10 min', '2 h 2 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def shell_words(arguments: Iterable[str]) -> str:
    """Arguments as a shell takes them, in double quotes where they hold single ones and nothing that a shell expands.

    Example:
        >>> print(shell_words(["--attack", "robust_ext:APGD(loss='dlr')", "--out", "my runs"]))
        --attack "robust_ext:APGD(loss='dlr')" --out 'my runs'
    """
    return " ".join(
        f'"{one}"' if "'" in one and not set(one) & set('"$`\\!') else shlex.quote(one) for one in arguments
    )
