"""Options that several commands share: the model, the data, the attacks, the run and its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from torch import Tensor

from robust_ext.attacks.adapted import AdaptedAttack, adaptation_words, adapted_text
from robust_ext.cli.models import LoadedModel, load_model
from robust_ext.cli.options import labelled, number, numbers
from robust_ext.core.devices import check_device
from robust_ext.core.errors import InvalidArgumentError, printable
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import Dataset, load_dataset
from robust_ext.datasets.load import NAMES
from robust_ext.engine.context import current_context, run_context
from robust_ext.engine.executors import make_executor
from robust_ext.engine.isolation import CAN_ISOLATE
from robust_ext.evaluations.arms import Arm
from robust_ext.models.layer_backward import find_layers
from robust_ext.registry.model import as_module


@settings_class
class ProgressOptions(Settings):
    """The option of all commands that take a while."""

    progress: bool = setting(default=True, help="Show a progress bar.", panel="run")


@settings_class
class SeedOptions(ProgressOptions):
    """Options of commands that draw, but are no evaluations with settings of their own."""

    seed: int = setting(default=0, help="Seed of all random draws.", minimum=0, maximum=LARGEST_SEED, panel="run")


@settings_class
class ExecutorOptions(ProgressOptions):
    """Options that choose where attacks run."""

    executor: str | None = setting(
        default=None,
        help="Where blocks of samples are computed: local (processes of this machine), dask:ADDRESS, or file.py:name "
        "of a function that makes an executor. See docs/clusters.md.",
        panel="workers",
    )
    jobs: int | None = setting(
        default=None,
        help="Number of workers. Processes of this machine without --executor.",
        minimum=1,
        maximum=10_000,
        panel="workers",
    )

    def make_executor(self, *, devices: Sequence[str] = ()) -> Callable[[], Executor] | None:
        """Return a function that makes the executor; None to run in this process."""
        if self.executor is None and not devices and self.jobs in (None, 1):
            return None
        text = "local" if self.executor is None else self.executor
        return make_executor(text, workers=self.jobs, devices=devices)


@settings_class
class WorkerOptions(ExecutorOptions):
    """Options of commands that run attacks."""

    out: Path | None = setting(
        default=None,
        help="Run folder for result.json and report.html; the same command resumes a killed run.",
        panel="run",
    )
    device: str = setting(default="cpu", help="Device, as torch names it: cpu, cuda, cuda:1.", panel="run")
    in_process: bool = setting(
        default=False,
        help="Run attacks in the process that judges them, which they can then change, instead of each in its own.",
        cli="--in-process",
        panel="workers",
    )
    attack_timeout: float | None = setting(
        default=None, help="Seconds an attack may take for a batch; any time when left out.", above=0, panel="workers"
    )
    devices: str | None = setting(
        default=None,
        help="Devices of the workers, as cuda:0,cuda:1. On a cluster cuda, a GPU for each worker.",
        panel="workers",
    )

    @property
    def isolation(self) -> dict[str, Any]:
        """Keywords that give attacks processes of their own, see :func:`robust_ext.engine.running.attack_worker`."""
        return {"isolate": CAN_ISOLATE and not self.in_process, "attack_timeout": self.attack_timeout}

    @property
    def workers(self) -> dict[str, Any]:
        """Keywords for the executor and its devices; None for this process."""
        devices = None if self.devices is None else [one.strip() for one in self.devices.split(",")]
        return {"executor": self.make_executor(devices=devices or ()), "devices": devices}

    def show(self, result: object) -> None:
        """Print a result and name its files."""
        typer.echo(str(result))
        if self.out is not None:
            typer.echo(written(self.out))


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
        help="Mean subtracted from inputs before the model: one number, or one for each channel separated by commas; "
        "needs --std. Replaces the normalisation of the model's library.",
        panel="model",
    )
    std: str | None = setting(
        default=None,
        help="Standard deviation by which inputs less --mean are divided, in the same form.",
        panel="model",
    )
    bounds: str = setting(default="0,1", help="Lowest and highest input value of the model.", panel="model")
    data: str = setting(
        help=f"{', '.join(NAMES)}, an .npz file (images, or a table in its own units) or a folder.",
        panel="data",
    )
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
    repair: bool = setting(default=False, help="Recompute damaged parts of --out.", panel="run")
    dry_run: bool = setting(
        default=False,
        help="Check the arguments and print the cost; run and write nothing.",
        panel="run",
    )

    @property
    def limits(self) -> tuple[float, float]:
        """The bounds as numbers."""
        if self.bounds.count(",") != 1:
            raise InvalidArgumentError("--bounds", repr(self.bounds), "two numbers, as in 0,1")
        low, high = numbers("--bounds", self.bounds)
        return low, high

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model with its weights and normalisation, on the device."""
        found = load_model(
            self.model,
            weights=self.weights,
            mean=None if self.mean is None else numbers("--mean", self.mean),
            std=None if self.std is None else numbers("--std", self.std),
            device=check_device(self.device, argument="--device"),
        )
        if found.bounds is not None and found.bounds != self.limits:
            raise InvalidArgumentError("--bounds", self.bounds, f"those of {self.model}, {found.bounds}")
        return found

    def load_samples(self, *, seed: int, further: int = 0, at_most: bool = False) -> Samples:
        """Load the samples, and up to ``further`` ones more, in the size that the model takes.

        With ``at_most``, a smaller data set is taken whole.
        """
        if self.repair and self.out is None:
            raise InvalidArgumentError("--repair", "no run folder", "the one to repair (--out)")
        dataset = load_dataset(self.data, root=self.data_root, split=self.data_split)
        n = min(self.samples, len(dataset)) if at_most else self.samples
        count = min(n + further, max(n, len(dataset)))
        rows = dataset.choose(count, seed=seed, order=self.order)
        size = self.size_for(dataset)
        inputs, labels = dataset.take(rows, bounds=self.limits, size=size)
        ids = [int(row) for row in rows]
        way = ", resized from {} x {} to {} x {} (bilinear)"
        changed = "" if size is None else way.format(*dataset.images.shape[2:], *size)
        return Samples(dataset, ids[:n], inputs[:n], labels[:n], inputs[n:] if further else None, changed)

    def size_for(self, dataset: Dataset) -> tuple[int, ...] | None:
        """Return the height and width to resize images to; None to leave them, and tables."""
        if dataset.images.ndim == 2:
            if self.input_size is not None:
                raise InvalidArgumentError("--input-size", self.input_size, "none for a table")
            return None
        size = self.loaded.input_shape[1:] if self.loaded.input_shape else None
        if self.input_size is not None:
            size = (self.input_size, self.input_size)
        return None if size == dataset.images.shape[2:] else size

    def context(self, samples: Samples, **more: str | None) -> AbstractContextManager[None]:
        """Surround the run with the origins of its parts, as text."""
        origin = {
            "model": self.model
            + ("" if self.weights is None else f", weights {self.weights}")
            + ("" if self.mean is None else f", mean {self.mean}, std {self.std}"),
            "data": f"{samples.dataset.name}, order {self.order}{samples.changed}",
            **more,
        }
        known = {name: text for name, text in origin.items() if text is not None}
        return run_context(replace(current_context(), origin=known, repair=self.repair, dry_run=self.dry_run))

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of the evaluations' functions."""
        return {"out": self.out, "progress": self.progress, **self.isolation, **self.workers}


def written(folder: Path) -> str:
    """Return the line that names the files of a result."""
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


@settings_class
class AdaptationOptions(Settings):
    """Options that adapt every attack of a command, see :class:`robust_ext.attacks.adapted.AdaptedAttack`."""

    bpda: str | None = setting(
        default=None,
        help="Layer, as in named_modules(), that has the gradient of the identity (BPDA) for every attack; several "
        "are separated by commas.",
        panel="attack",
    )
    eot: int = setting(
        default=1, help="Draws over which every attack averages logits and gradients (EoT).", minimum=1, panel="attack"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the adapted attacks; empty if nothing is adapted."""
        return {**({} if self.bpda is None else {"bpda": self.bpda}), **({"eot": self.eot} if self.eot > 1 else {})}

    def attacks(self, texts: Sequence[str]) -> list[str] | dict[str, str]:
        """Adapt attacks given as text, by label where any has one or is adapted."""
        return found if list(found := self.named(labelled(texts))) != list(texts) else list(texts)

    def named(self, attacks: Mapping[str, str]) -> dict[str, str]:
        """Adapt attacks given as text by name."""
        if not self.settings:
            return dict(attacks)
        words = adaptation_words(**self.settings)
        return {f"{name} through {words}": adapted_text(text, **self.settings) for name, text in attacks.items()}

    def arms(self, arms: Iterable[Arm]) -> list[Arm]:
        """Adapt the attacks of arms."""
        return [replace(arm, attack=AdaptedAttack(attack=arm.resolved, **self.settings)) for arm in arms]

    def model(self, run: RunOptions) -> object:
        """Load the model; InvalidArgumentError, before any work, if it lacks the layer of ``--bpda``."""
        if self.bpda is not None:
            find_layers(as_module(run.loaded.model).module, self.bpda, argument="--bpda")
        return run.loaded.model


@dataclass(frozen=True)
class Samples:
    """Samples of a data set, their numbers in it, inputs (float32) and labels (int64); and further inputs of it.

    ``changed`` describes what was done to images, each part after a comma.
    """

    dataset: Dataset
    ids: list[int]
    inputs: Tensor
    labels: Tensor
    further: Tensor | None
    changed: str = ""
