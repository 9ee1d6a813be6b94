"""Options of what inputs are valid: a grid of values, limits of entries from a file, and images of candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from robust_ext.cli.loading import RunOptions, Samples
from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.entries import OFF_GRID
from robust_ext.core.errors import InvalidArgumentError, printable
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.specification import did_you_mean
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets.npz import wrong_size
from robust_ext.evaluations.png_export import export_png
from robust_ext.registry.model import as_module

_ARRAYS = ("mask", "epsilon", "weights", "low", "high", "kinds")


@settings_class
class EntryOptions(Settings):
    """Options of what inputs are valid."""

    levels: int | None = setting(
        default=None,
        help="Number of values that an input's value can have, evenly spaced between its bounds: 256 accepts only what "
        "an image of 8 bits can hold.",
        minimum=2,
        maximum=2**16,
        panel="attack",
    )
    entries: Path | None = setting(
        default=None,
        help="Limits of single entries: an .npy file with a mask (True where an entry may change), or an .npz file of "
        "arrays mask, epsilon, weights (relative to --eps), low, high, kinds.",
        panel="attack",
    )

    def applied(self, threat_model: ThreatModel) -> ThreatModel:
        """The threat model with these limits; InvalidArgumentError where the file does not fit it."""
        found = replace(threat_model, levels=self.levels)
        if self.entries is None:
            return found
        arrays = _read(self.entries)
        given: dict[str, Any] = {name: arrays[name] for name in ("mask", "kinds", "weights") if name in arrays}
        if "epsilon" in arrays:
            largest = float(arrays["epsilon"].max())
            if not math.isclose(largest, found.epsilon, rel_tol=1e-6):
                expected = f"a largest one of --eps, {found.epsilon:g}; or weights, relative to it"
                raise InvalidArgumentError("--entries", f"budgets of at most {largest:g}", expected)
            given["weights"] = arrays["epsilon"] / largest
        if "low" in arrays or "high" in arrays:
            given["bounds"] = tuple(
                arrays.get(name, end) for name, end in zip(("low", "high"), found.bounds, strict=True)
            )
        return replace(found, **given)

    def load_samples(self, run: RunOptions, **given: Any) -> Samples:
        """Load samples as ``run`` does; from 256 levels on, images with values between them are rounded."""
        samples = run.load_samples(**given)
        if self.levels is None or self.levels < 256 or samples.inputs.dim() == 2:
            return samples
        low, high = run.limits
        step = (high - low) / (self.levels - 1)

        def rounded(x: Tensor) -> Tensor:
            places = (x.double() - low) / step
            near = places.round()
            return torch.where((places - near).abs() > OFF_GRID, (low + step * near).to(x.dtype), x)

        inputs = rounded(samples.inputs)
        if torch.equal(inputs, samples.inputs):
            return samples
        further = None if samples.further is None else rounded(samples.further)
        changed = f"{samples.changed}, rounded to {self.levels} levels"
        return replace(samples, inputs=inputs, further=further, changed=changed)


@settings_class
class ExportOptions(EntryOptions):
    """The same, with images of what was found."""

    png: Path | None = setting(
        default=None,
        help="Folder for adversarial examples as PNG images, which are read again and verified; with --levels 256 and "
        "--out.",
        panel="run",
    )

    def check(self, run: RunOptions) -> None:
        """Raise InvalidArgumentError, before any work, where images cannot be written."""
        if self.png is not None and (self.levels != 256 or run.out is None):
            raise InvalidArgumentError("--png", f"--levels {self.levels}, --out {run.out}", "--levels 256 and --out")

    def export(self, run: RunOptions, samples: Samples, threat_model: ThreatModel, criterion: Criterion | None) -> None:
        """Write the images, where they are asked for."""
        if self.png is None or run.out is None or run.dry_run:
            return
        module = as_module(run.loaded.model).module
        given: dict[str, Any] = {"ids": samples.ids, "criterion": criterion or MISCLASSIFICATION}
        found = export_png(run.out, self.png, module, samples.inputs, samples.labels, threat_model, **given)
        lost = f"; {len(found.lost)} no longer broke the model and were left out" if found.lost else ""
        typer.echo(printable(f"{self.png} holds {len(found.written)} images, read again and verified{lost}."))


def _read(path: Path) -> Mapping[str, NDArray[Any]]:
    """The arrays of a file by name."""
    expected = f"an .npy file with a mask, or an .npz file of arrays {', '.join(_ARRAYS)}, without pickles"
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, NpzFile):
                return {"mask": content}
            if wrong := wrong_size(content):
                raise ValueError(wrong)
            arrays = {name: content[name] for name in content}
    # zipfile, zlib and numpy raise a dozen kinds of errors for damaged data.
    except Exception as error:
        raise InvalidArgumentError("--entries", f"{path} ({type(error).__name__}: {error})", expected) from error
    unknown = [name for name in arrays if name not in _ARRAYS]
    if unknown or not arrays:
        got = f"an array {unknown[0]!r}{did_you_mean(unknown[0], _ARRAYS)}" if unknown else "no arrays"
        raise InvalidArgumentError("--entries", got, expected)
    if {"epsilon", "weights"} <= arrays.keys():
        raise InvalidArgumentError("--entries", "epsilon and weights", "one of them")
    return arrays
