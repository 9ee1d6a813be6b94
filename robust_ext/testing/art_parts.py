"""Parts of the tests of ART attacks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.testing.networks import margins

art: Any = import_module("robust_ext.adapters.art.library").art
SummaryWriter: Any = art.summary_writer.SummaryWriter


class RecordingWriter(SummaryWriter):  # type: ignore[misc]
    """A summary writer that collects its updates and counts its resets; it writes no files."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self.resets = 0
        super().__init__("")

    def _init_summary_writer(self, summary_writer: Any, init_counter: int) -> None:
        """Open no files."""

    def update(self, batch_id: int, global_step: int, **values: Any) -> None:
        """Store an update."""
        self.updates.append({"batch_id": batch_id, "global_step": global_step, **values})

    def reset(self) -> None:
        """Count."""
        self.resets += 1


def classifier_of(network: nn.Module, shape: tuple[int, ...], classes: int, **settings: Any) -> Any:
    """Return a classifier of ART on the CPU."""
    given = {"loss": nn.CrossEntropyLoss(), "input_shape": shape, "nb_classes": classes, "device_type": "cpu"}
    return art.estimators.classification.PyTorchClassifier(model=network, **given, **settings)


def margin_of(estimator: Any, x: Any, classes: Any) -> Any:
    """Return by how much the classes ``(N,)`` beat the best other class."""
    return margins(torch.from_numpy(estimator.predict(x)), torch.from_numpy(classes)).numpy()


class Standardised(nn.Module):
    """Inputs less a mean, over a deviation."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        """Return the standardised inputs."""
        return (x - self.mean) / self.deviation


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, zeros without one."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
