"""What the commands of all evaluations have in common: the model, the data, the run; nothing is unpickled."""

from __future__ import annotations

import logging
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from robust_ext.cli.help import HIDDEN
from robust_ext.cli.options import number
from robust_ext.cli.study import current_command
from robust_ext.core.devices import check_device
from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.objects import resolve_object
from robust_ext.core.printable import printable
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.specification import check_keywords
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.datasets import Dataset, load_dataset
from robust_ext.datasets.files import reading
from robust_ext.demo.network import digits_network
from robust_ext.engine import repair
from robust_ext.engine.context import RunContext, run_context
from robust_ext.engine.isolation import CAN_ISOLATE
from robust_ext.engine.shards import end_with_parent


@settings_class
class RunOptions(Settings):
    """Options of every evaluation."""

    model: str = setting(
        help="digits, package.module:object or file.py:object; a model or what makes one.", panel="model"
    )
    weights: str | None = setting(
        default=None, help="State dict of the model: .safetensors, or a torch file.", panel="model"
    )
    bounds: str = setting(default="0,1", help="Lowest and highest input value of the model.", panel="model")
    data: str = setting(help="digits, mnist, fashion-mnist, cifar10, cifar100, an .npz file or a folder.", panel="data")
    data_root: str | None = setting(default=None, help="Folder with the data's files.", panel="data")
    data_split: str = setting(default="test", help="test or train.", choices=("test", "train"), panel="data")
    samples: int = setting(default=100, help="Number of samples.", minimum=1, panel="data")
    order: str = setting(
        default="random",
        help="Which samples: random (by the seed) or first.",
        choices=("random", "first"),
        panel="data",
    )
    out: Path | None = setting(
        default=None, help="Run folder; a killed run goes on there. result.json, report.html.", panel="run"
    )
    device: str = setting(default="cpu", help="As torch names it: cpu, cuda, cuda:1.", panel="run")
    progress: bool = setting(default=True, help="Show a progress bar.", panel="run")
    in_process: bool = setting(
        default=False,
        help="Run attacks in this process, which they can then change, instead of each in its own.",
        cli="--in-process",
        panel="run",
    )
    attack_timeout: float | None = setting(
        default=None, help="Seconds an attack may take for a batch; any time when left out.", above=0, panel="run"
    )
    jobs: int = setting(default=1, help="Processes; needs --out.", minimum=1, maximum=256, panel="run")
    repair: bool = setting(default=False, help="Do again what is damaged in --out.", panel="run")
    shard: str = setting(default="0/1", help="Number of this process, and of how many.", panel=HIDDEN)

    @property
    def limits(self) -> tuple[float, float]:
        """The bounds as numbers."""
        parts = self.bounds.split(",")
        if len(parts) != 2:
            raise InvalidArgumentError("--bounds", repr(self.bounds), "two numbers, as in 0,1")
        return number("--bounds", parts[0]), number("--bounds", parts[1])

    def load_model(self) -> object:
        """The model with its weights, on the device."""
        return load_model(self.model, weights=self.weights, device=check_device(self.device, argument="--device"))

    def load_samples(self, *, seed: int, further: int = 0) -> Samples:
        """The samples, and so many further ones where the data has them."""
        dataset = load_dataset(self.data, root=self.data_root, split=self.data_split)
        count = min(self.samples + further, max(self.samples, len(dataset)))
        rows = dataset.choose(count, seed=seed, order=self.order)
        inputs, labels = dataset.take(rows, bounds=self.limits)
        n = self.samples
        return Samples(dataset, [int(row) for row in rows[:n]], inputs[:n], labels[:n], inputs[n:] if further else None)

    def begin(self) -> None:
        """Check that processes have a folder to share; one of several ends with the process that started it."""
        if self.jobs > 1 and self.out is None:
            raise InvalidArgumentError("--jobs", self.jobs, "a run folder (--out) when there is more than one")
        if self.jobs > self.samples:
            raise InvalidArgumentError("--jobs", self.jobs, f"at most one process a sample, {self.samples}")
        if self.repair:
            if self.out is None:
                raise InvalidArgumentError("--repair", "no run folder", "the one to repair (--out)")
            logging.getLogger(repair.__name__).addHandler(logging.StreamHandler())
        if self.part[1] > 1:
            end_with_parent()

    @property
    def part(self) -> tuple[int, int]:
        """Number of this process, and of how many."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", self.shard)
        if found is None or int(found[1]) >= int(found[2]):
            raise InvalidArgumentError("--shard", repr(self.shard), "K/N with K from 0 to N - 1")
        return int(found[1]), int(found[2])

    def context(self, samples: Samples, **more: str | None) -> AbstractContextManager[None]:
        """The surroundings of the run: where things came from, in words, and the processes that share it."""
        origin = {
            "model": self.model if self.weights is None else f"{self.model}, weights {self.weights}",
            "data": f"{samples.dataset.name}, order {self.order}",
            **more,
        }
        known = {name: text for name, text in origin.items() if text is not None}
        return run_context(
            RunContext(origin=known, command=current_command(), jobs=self.jobs, shard=self.part, repair=self.repair)
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """What the evaluations' functions take of these."""
        return {"out": self.out, "progress": self.progress, **self.isolation}

    @property
    def isolation(self) -> dict[str, Any]:
        """Where attacks run, see :func:`robust_ext.engine.isolation.attack_worker`."""
        return {"isolate": CAN_ISOLATE and not self.in_process, "attack_timeout": self.attack_timeout}

    def show(self, result: object) -> None:
        """Write a result to the terminal, unless another process does."""
        if self.part[1] > 1:
            return
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
    """Samples of a data set, their numbers in it, inputs (float32) and labels (int64); and further inputs of it."""

    dataset: Dataset
    ids: list[int]
    inputs: Tensor
    labels: Tensor
    further: Tensor | None


def load_model(spec: str, *, weights: str | None = None, device: str | torch.device = "cpu") -> object:
    """``digits`` (the embedded network), or the model, or what the function makes, that ``file.py:object`` names.

    Arguments of the function may follow in parentheses. Weights, a state dict in ``.safetensors`` or a torch file, are
    read with ``weights_only``; a torch module is moved to the device.
    """
    made = digits_network() if spec == "digits" else resolve_object(spec, argument="--model")
    # A model of a library may be callable too; functions and classes make models.
    ready = not isinstance(made, type) and (hasattr(made, "bounds") or hasattr(made, "clip_values"))
    if callable(made) and not isinstance(made, nn.Module) and not ready:
        check_keywords(made, {}, argument="--model", label=spec)
        with foreign_code("--model", f"{spec}()", hint="a function that makes a model is called without arguments"):
            made = made()
    if weights is not None:
        if not isinstance(made, nn.Module):
            raise InvalidArgumentError("--weights", weights, "no weights for a model that is not a torch module")
        _load_weights(made, Path(weights))
    if not isinstance(made, nn.Module):
        return made
    with foreign_code("--model", f"moving {spec} to {device}", hint="name a device that holds it, --device cpu"):
        return made.to(device)


def _load_weights(model: nn.Module, path: Path) -> None:
    state = _read_state(path)
    inner = state.get("state_dict", state)
    if not isinstance(inner, dict) or not all(isinstance(value, Tensor) for value in inner.values()):
        raise DataError(f"{path}: holds no state dict; save model.state_dict()")
    # DataParallel and DistributedDataParallel put this before every name.
    named = {str(key).removeprefix("module."): value for key, value in inner.items()}
    try:
        model.load_state_dict(named)
    except RuntimeError as error:
        raise DataError(f"{path}: the weights do not fit the model: {error}") from error


def _read_state(path: Path) -> dict[str, Any]:
    with reading(path):
        if not path.is_file():
            raise DataError(f"{path}: no such file; --weights takes a .safetensors or torch file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged files raise almost anything, safetensors a class of its own without any other base.
        raise DataError(f"{path}: cannot be read as weights ({type(error).__name__}: {error})") from error
    return state if isinstance(state, dict) else {}
