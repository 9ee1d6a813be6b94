"""What the commands of all evaluations have in common: the model, the data, the run; nothing is unpickled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from torch import Tensor

from robust_ext.cli.models import LoadedModel, load_model
from robust_ext.cli.options import number
from robust_ext.cli.workers import WorkerOptions
from robust_ext.core.devices import check_device
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.printable import printable
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import Dataset, load_dataset
from robust_ext.engine.context import current_context, run_context


@settings_class
class RunOptions(WorkerOptions):
    """Options of every evaluation."""

    model: str = setting(
        help="digits; a model of a library, as timm:resnet18(num_classes=10), torchvision:, hf: or robustbench:; or "
        "package.module:object or file.py:object, a model or what makes one.",
        panel="model",
    )
    weights: str | None = setting(
        default=None, help="State dict of the model: .safetensors, or a torch file.", panel="model"
    )
    mean: str | None = setting(
        default=None,
        help="Subtracted from inputs before the model: a number for each channel with commas between, or one for all; "
        "with --std. In place of the normalisation that a library states.",
        panel="model",
    )
    std: str | None = setting(default=None, help="Inputs less --mean are divided by it; likewise.", panel="model")
    bounds: str = setting(default="0,1", help="Lowest and highest input value of the model.", panel="model")
    data: str = setting(help="digits, mnist, fashion-mnist, cifar10, cifar100, an .npz file or a folder.", panel="data")
    data_root: str | None = setting(default=None, help="Folder with the data's files.", panel="data")
    data_split: str = setting(default="test", help="test or train.", choices=("test", "train"), panel="data")
    input_size: int | None = setting(
        default=None,
        help="Height and width to resize images to; when left out, those that a model of a library states.",
        minimum=1,
        panel="data",
    )
    samples: int = setting(default=100, help="Number of samples.", minimum=1, panel="data")
    order: str = setting(
        default="random",
        help="Which samples: random (by the seed) or first.",
        choices=("random", "first"),
        panel="data",
    )
    progress: bool = setting(default=True, help="Show a progress bar.", panel="run")
    repair: bool = setting(default=False, help="Do again what is damaged in --out.", panel="run")
    dry_run: bool = setting(
        default=False,
        help="Check what can be checked, and print the cost; nothing is run or written.",
        panel="run",
    )

    @property
    def limits(self) -> tuple[float, float]:
        """The bounds as numbers."""
        parts = self.bounds.split(",")
        if len(parts) != 2:
            raise InvalidArgumentError("--bounds", repr(self.bounds), "two numbers, as in 0,1")
        return number("--bounds", parts[0]), number("--bounds", parts[1])

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model with its weights and normalisation, on the device."""
        found = load_model(
            self.model,
            weights=self.weights,
            mean=None if self.mean is None else [number("--mean", text) for text in self.mean.split(",")],
            std=None if self.std is None else [number("--std", text) for text in self.std.split(",")],
            device=check_device(self.device, argument="--device"),
        )
        if found.bounds is not None and found.bounds != self.limits:
            raise InvalidArgumentError("--bounds", self.bounds, f"those of {self.model}, {found.bounds}")
        return found

    def load_model(self) -> object:
        """The model itself."""
        return self.loaded.model

    def load_samples(self, *, seed: int, further: int = 0, at_most: bool = False) -> Samples:
        """The samples, and so many further ones where the data has them; of the size that the model takes.

        With ``at_most``, no more than the data has.
        """
        dataset = load_dataset(self.data, root=self.data_root, split=self.data_split)
        n = min(self.samples, len(dataset)) if at_most else self.samples
        count = min(n + further, max(n, len(dataset)))
        rows = dataset.choose(count, seed=seed, order=self.order)
        size = self.size_for(dataset)
        inputs, labels = dataset.take(rows, bounds=self.limits, size=size)
        ids = [int(row) for row in rows]
        resized = "" if size is None else "{} x {} to {} x {}".format(*dataset.images.shape[2:], *size)
        return Samples(dataset, ids[:n], inputs[:n], labels[:n], inputs[n:] if further else None, resized)

    def size_for(self, dataset: Dataset) -> tuple[int, ...] | None:
        """Height and width that images are resized to; None where they have them, or nothing states any."""
        size = self.loaded.input_shape[1:] if self.loaded.input_shape else None
        if self.input_size is not None:
            size = (self.input_size, self.input_size)
        return None if size == dataset.images.shape[2:] else size

    def begin(self) -> None:
        """Check that there is something to repair."""
        if self.repair and self.out is None:
            raise InvalidArgumentError("--repair", "no run folder", "the one to repair (--out)")

    def context(self, samples: Samples, **more: str | None) -> AbstractContextManager[None]:
        """The surroundings of the run: where things came from, in words."""
        origin = {
            "model": self.model
            + ("" if self.weights is None else f", weights {self.weights}")
            + ("" if self.mean is None else f", mean {self.mean}, std {self.std}"),
            "data": f"{samples.dataset.name}, order {self.order}"
            + (f", resized from {samples.resized} (bilinear)" if samples.resized else ""),
            **more,
        }
        known = {name: text for name, text in origin.items() if text is not None}
        return run_context(replace(current_context(), origin=known, repair=self.repair, dry_run=self.dry_run))

    @property
    def keywords(self) -> dict[str, Any]:
        """What the evaluations' functions take of these."""
        return {"out": self.out, "progress": self.progress, **self.isolation, **self.workers}

    def show(self, result: object) -> None:
        """Write a result to the terminal."""
        typer.echo(str(result))
        if self.out is not None:
            typer.echo(written(self.out))


def written(folder: Path) -> str:
    """The line that names the files of a result."""
    return printable(f"{folder / 'result.json'} and {folder / 'report.html'} hold the details.")


@settings_class
class ThreatOptions(RunOptions):
    """Options of evaluations at one budget."""

    eps: str = setting(help="Budget in the units of the inputs; fractions such as 8/255 are fine.", panel="attack")
    norm: str = setting(default="linf", help=f"One of {', '.join(NORMS)}.", choices=NORMS, panel="attack")

    @property
    def threat_model(self) -> ThreatModel:
        """The norm, epsilon and bounds."""
        return ThreatModel(norm=self.norm, epsilon=number("--eps", self.eps), bounds=self.limits)


@dataclass(frozen=True)
class Samples:
    """Samples of a data set, their numbers in it, inputs (float32) and labels (int64); and further inputs of it.

    ``resized`` is from what size to what, in words; empty where images are as they were.
    """

    dataset: Dataset
    ids: list[int]
    inputs: Tensor
    labels: Tensor
    further: Tensor | None
    resized: str = ""
