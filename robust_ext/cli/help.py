"""What ``--help`` and ``--help-all`` show of a command's options, panel by panel."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from typing import Annotated

import typer

_RARER = {
    "planting": "Planting",
    "readout": "Readout",
    "depth": "Depth",
    "verdict": "Verdict",
    "detection": "Detector, in detail",
    "cost": "Cost",
}
PANELS = ("model", "data", "attack", "detector", "test", "run", "workers", *_RARER)
"""Panels in the order in which they are shown; those from ``planting`` on by ``--help-all`` alone."""

_SENTENCE = re.compile(r"(?<=[\w)\"])\. (?=[A-Z0-9\"])")


def is_rare(panel: str) -> bool:
    """Whether ``--help`` leaves a panel out."""
    return panel in _RARER


def panel_title(panel: str) -> str:
    """What stands above a panel."""
    return _RARER.get(panel, panel.capitalize())


def terminal_words(text: str) -> str:
    """Words of a docstring for a terminal; brackets are no markup there."""
    from rich.markup import escape

    return escape(re.sub(r":\w+:`[~.]?([^`]*)`", r"\1", text).replace("``", ""))


def first_sentence(text: str) -> str:
    """Its first sentence, with a full stop where more followed.

    Example:
        >>> first_sentence("Points of class 0. The paper's are 999.")
        'Points of class 0.'
    """
    first, *more = _SENTENCE.split(text, maxsplit=1)
    return f"{first}." if more else first


def help_all(words: Mapping[str, str], panels: Collection[str]) -> list[inspect.Parameter]:
    """The parameter of ``--help-all``: whole texts of all options, by name; none where ``--help`` shows everything.

    Example:
        >>> [parameter.name for parameter in help_all({"gap": "Margin."}, {"planting"})]
        ['help_all']
    """
    rarer = [_RARER[panel].partition(",")[0].lower() for panel in PANELS if panel in panels and panel in _RARER]

    def show(context: typer.Context, value: bool) -> None:
        if not value:
            return
        for parameter in context.command.params:
            name, shown = str(parameter.name), parameter
            if name in words:
                shown.help, shown.hidden = words[name], False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit

    if not rarer:
        return []
    text = f"The same in full, with rarer options: {', '.join(dict.fromkeys(rarer))}."
    option = typer.Option("--help-all", callback=show, is_eager=True, expose_value=False, help=text)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter("help_all", keyword, default=False, annotation=Annotated[bool, option])]
