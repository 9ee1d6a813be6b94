"""Pages made from the templates next to this file, with examples as images; HTML needs nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError, printable
from robust_ext.engine.verify import OUTCOMES
from robust_ext.reports import wording
from robust_ext.reports.drawing import DARK, themed
from robust_ext.reports.findings import failed, label, shared, subject, to_paste

if TYPE_CHECKING:
    from jinja2 import Environment


_MAGENTA = (204, 0, 153)


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One clean input ``(C, H, W)``, of the sample with this index, and the candidate an attack returned for it.

    ``planted`` is the adversarial example that was there to be found, where one was planted.

    One or three channels are shown as grey or colour, of other numbers of channels the first one; inputs of other
    shapes are left out of a page. The outcome is one such as ``"found"``; the bounds are shown as black and white.
    """

    attack: str
    sample: int
    outcome: str
    clean: NDArray[Any]
    candidate: NDArray[Any]
    bounds: tuple[float, float]
    planted: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        for name, points in (("candidate", self.candidate), ("planted", self.planted)):
            if points is not None and points.shape != self.clean.shape:
                raise InvalidArgumentError(name, f"shape {points.shape}", f"the shape of clean, {self.clean.shape}")
        if not self.bounds[0] < self.bounds[1]:
            raise InvalidArgumentError("bounds", self.bounds, "a pair whose first number is below its second")

    @property
    def is_image(self) -> bool:
        """True if the input has the shape of an image, ``(C, H, W)`` with at least one pixel."""
        return self.clean.ndim == 3 and self.clean.size > 0


class Panels(NamedTuple):
    """The images of one example by title, as data URIs of PNG files with one pixel a pixel, and what they leave out.

    Values of points beyond the bounds are shown as black or white. In differences 0 is mid grey, and the largest
    absolute value of all, ``scale``, is black or white.
    """

    images: Mapping[str, str]
    scale: float
    notes: tuple[str, ...]


def panels(example: Example) -> Panels:
    """The images of an example whose ``is_image`` is true."""
    channels = example.clean.shape[0]
    shown = slice(None) if channels in (1, 3) else slice(0, 1)
    given = {"input": example.clean, "planted": example.planted, "candidate": example.candidate}
    points = {title: np.asarray(one[shown], dtype=np.float64) for title, one in given.items() if one is not None}
    low, high = example.bounds
    clean, candidate = points["input"], points["candidate"]
    finite = {title: np.isfinite(one) & np.isfinite(clean) for title, one in points.items()}
    moved = {
        title: np.where(finite[title], one, 0.0) - np.where(finite[title], clean, 0.0)
        for title, one in points.items()
        if title != "input"
    }
    scale = max(float(np.abs(one).max()) for one in moved.values())
    notes = {
        f"first of {channels} channels": channels not in (1, 3),
        "values that are not finite are magenta": not finite["candidate"].all(),
        "values beyond the bounds are cut": np.any(
            (candidate[finite["candidate"]] < low) | (candidate[finite["candidate"]] > high)
        ),
    }
    images = {title: _png((one - low) / (high - low), np.isfinite(one)) for title, one in points.items()}
    images |= {
        f"{title} - input": _png(0.5 + 0.5 * one / (scale or 1.0), finite[title]) for title, one in moved.items()
    }
    return Panels(images=images, scale=scale, notes=tuple(note for note, holds in notes.items() if holds))


def _png(values: NDArray[np.float64], finite: NDArray[np.bool_]) -> str:
    """Return an image ``(1 or 3, H, W)`` of values in [0, 1] as a data URI; pixels that are not finite in magenta."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError('Images in a report need Pillow: pip install "robust-ext[cli]"') from error
    levels = np.rint(np.clip(np.where(finite, values, 0.0), 0.0, 1.0) * 255).astype(np.uint8)
    pixels = np.moveaxis(levels, 0, -1)
    lost: NDArray[np.bool_] = np.any(~finite, axis=0)
    if lost.any():
        pixels = np.where(lost[..., None], np.array(_MAGENTA, dtype=np.uint8), pixels)
    elif pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


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
    """Return the environment of templates; read templates are cached."""
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
    """Return the frame of every page: its script, the script's hash for its policy, and the colours of dark plots."""
    from markupsafe import Markup

    script = files("robust_ext.reports").joinpath("sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    colours = " ".join(f"--plot-{light[1:]}: {dark};" for light, dark in DARK.items())
    return {"script": Markup(script), "script_digest": f"sha256-{digest}", "plot_colours": colours}


def _setting(value: object) -> str:
    """A setting as text; numbers in full, so that a run can be repeated from its page."""
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
