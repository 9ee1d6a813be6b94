"""The training of defenses' parts: shared settings, the loop of small networks, and files of trained parts."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.files import replace_file
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import LARGEST_SEED, Settings, setting, settings_class
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_bounds, check_inputs
from robust_ext.detectors.training import train_pass

_KEY = "defense_part"

Self = TypeVar("Self", bound="TrainedPart")


class TrainedPart(nn.Module):
    """A network, or tensors, that a defense has trained; its ``settings`` (JSON values) make one of the same sizes."""

    settings: dict[str, Any]

    @classmethod
    def untrained(cls: type[Self], **settings: Any) -> Self:
        """Make a part whose weights are still to be loaded."""
        return cls(**settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write settings and weights to a safetensors file, in a folder that exists."""
        about = {"kind": type(self).__name__, "settings": self.settings}
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        replace_file(Path(path), safetensors.torch.save(state, metadata={_KEY: json.dumps(about)}))

    @classmethod
    def load(cls: type[Self], path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote: on the CPU, in eval mode, frozen; raise DataError for other files."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_KEY])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["kind"] != cls.__name__:
                raise ValueError(f"it holds a {about['kind']}")
            part = cls.untrained(**about["settings"])
            part.load_state_dict(state)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
            raise DataError(f"{path}: no file written by {cls.__name__}.save ({error})") from error
        return part.eval().requires_grad_(False)


class Training(Settings, ABC):
    """The training of a defense's part for a fixed classifier; a subclass declares the settings.

    All that is drawn comes from their ``seed``; the global generators are left alone.
    """

    bounds: tuple[float, float]

    @abstractmethod
    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> TrainedPart:
        """Train on at least 2 clean inputs, floating point ``(N, ...)`` in the bounds, and their classes ``(N,)``.

        The part is on the classifier's device, in eval mode, without gradients. InvalidArgumentError: these are no such
        tensors. ModelError: the classifier is not one, or is in train mode.
        """

    def checked(self, classifier: nn.Module, inputs: Tensor) -> Tensor:
        """Return the inputs on the classifier's device."""
        return check_inputs("inputs", inputs, bounds=self.bounds).to(module_device(classifier))


@settings_class
class NetworkTraining(Training):
    """Training of a network by Adam."""

    epochs: int = setting(default=20, help="Passes over the data, at least 1.", minimum=1)
    batch_size: int = setting(default=128, help="Inputs in a step, at least 2.", minimum=2)
    learning_rate: float = setting(default=1e-3, help="Learning rate of Adam.", above=0)
    bounds: tuple[float, float] = setting(default=(0.0, 1.0), help="Bounds of the inputs.", check=check_bounds)
    seed: int = setting(default=0, help="Seed of all random draws.", minimum=0, maximum=LARGEST_SEED)

    def run(
        self, module: nn.Module, rows: int, loss: Callable[[Tensor], Tensor], *, seeded: bool = True, slower: float = 1
    ) -> list[float]:
        """Train by :func:`train_network` with a seed of its own, or the caller's unless ``seeded``.

        ``slower`` divides the learning rate.
        """
        seed = derive_seed(self.seed, "training") if seeded else None
        rate, size = self.learning_rate / slower, self.batch_size
        return train_network(module, rows, loss, epochs=self.epochs, batch_size=size, learning_rate=rate, seed=seed)


def train_network(
    module: nn.Module,
    rows: int,
    loss: Callable[[Tensor], Tensor],
    *,
    epochs: int,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    seed: int | None = None,
) -> list[float]:
    """Train the parameters that require gradients by Adam; return the mean loss of each pass.

    Args:
        module: In eval mode, without gradients, in the end.
        rows: How many there are to train on, at least 2.
        loss: From indices of at least 2 of them, int64 ``(n,)``, to a mean loss ``()``; it may draw.
        epochs: Passes over the rows.
        batch_size: Rows in a step.
        learning_rate: Of Adam.
        seed: Of the global generators, which are put back; None to go on from the caller's.
    """
    check_rows(rows)
    optimizer = torch.optim.Adam([one for one in module.parameters() if one.requires_grad], lr=learning_rate)
    parts = max(rows // batch_size, 1)
    module.train()
    seeds = nullcontext() if seed is None else seeded_globals(seed)
    with seeds, torch.inference_mode(False), torch.enable_grad():
        # Batches of about the same size: one of a single row has no variance and no negatives.
        means = [
            train_pass(optimizer, torch.tensor_split(torch.randperm(rows), parts), lambda batch: (loss(batch),) * 2)
            for _ in range(epochs)
        ]
    optimizer.zero_grad()
    module.eval()
    return means


def check_rows(rows: int) -> None:
    """Raise InvalidArgumentError where there are too few rows to train on."""
    if rows < 2:
        raise InvalidArgumentError("inputs", f"{rows} inputs", "at least 2 training inputs")
