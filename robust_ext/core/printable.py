"""Text of any origin made fit for a terminal."""

from __future__ import annotations


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
