"""Pages made from the templates beside this file; those in HTML need nothing from outside them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from robust_ext.core.errors import MissingDependencyError
from robust_ext.core.printable import printable
from robust_ext.engine.outcomes import OUTCOMES
from robust_ext.reports import wording
from robust_ext.reports.drawing import DARK, themed
from robust_ext.reports.examples import Example, panels
from robust_ext.reports.findings import failed, label, shared, subject, to_paste

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, context: Mapping[str, Any], examples: Sequence[Example] = ()) -> str:
    """Fill the template of this name; in HTML everything is escaped that is not marked as markup."""
    try:
        environment = _environment(template.endswith(".html.jinja"))
    except ImportError as error:
        raise MissingDependencyError('A report page needs jinja2: pip install "robust-ext[cli]"') from error
    images = [example for example in examples if example.is_image]
    shown = {"examples": [(one, panels(one)) for one in images], "left_out": len(examples) - len(images)}
    return environment.get_template(template).render(**shown, **context).rstrip() + "\n"


@cache
def _environment(escaped: bool) -> Environment:
    """What templates are filled with; those that were read once stay."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("robust_ext", "reports"),
        autoescape=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is a subclass of str and passes; a name with a control character or half a surrogate is made printable.
        finalize=lambda value: wording.retyped(wording.plain(value)) if type(value) is str else value,
    )
    environment.globals["OUTCOMES"] = OUTCOMES
    filters = (
        wording.share,
        wording.interval,
        wording.seconds,
        wording.percent,
        wording.accuracy,
        wording.outcomes,
        wording.count,
        wording.typed,
    )
    environment.filters.update({word.__name__: word for word in filters})
    environment.filters.update(title_of=wording.attack_title, setting=_setting, code=_code)
    environment.filters.update(
        shared=shared, to_paste=to_paste, failed=failed, label=label, subject=subject, themed=themed
    )
    environment.globals.update(_frame())
    return environment


@cache
def _frame() -> Mapping[str, str]:
    """What every page is made with: its script, the one that its policy lets run, and colours of plots in the dark."""
    from markupsafe import Markup

    script = files("robust_ext.reports").joinpath("sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    colours = " ".join(f"--plot-{light[1:]}: {dark};" for light, dark in DARK.items())
    return {"script": Markup(script), "script_digest": f"sha256-{digest}", "plot_colours": colours}


def _setting(value: object) -> str:
    """A setting in words; numbers in full, so that a run can be repeated from its page."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_setting, value)) or "none"
    return str(value)


def _code(text: str) -> str:
    """Lines as they are, with their indentation."""
    from markupsafe import escape

    return escape(wording.retyped(printable(text)))
