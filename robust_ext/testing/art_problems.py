"""Estimators, inputs and a summary writer for tests of ART attacks on a ``PyTorchClassifier``."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from robust_ext.testing.networks import margins, small_batch, small_network

art: Any = import_module("robust_ext.adapters.art.library").art
SummaryWriter: Any = art.summary_writer.SummaryWriter
PyTorchClassifier: Any = art.estimators.classification.PyTorchClassifier
Bounds = tuple[float, float]


class RecordingWriter(SummaryWriter):  # type: ignore[misc]
    """A summary writer that keeps its updates, and writes no files.

    Attributes:
        updates: The keywords of each update.
        resets: How many times it was reset.
    """

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self.resets = 0
        super().__init__("")

    def _init_summary_writer(self, summary_writer: Any, init_counter: int) -> None:
        """No files."""

    def update(self, batch_id: int, global_step: int, **values: Any) -> None:
        """Keep an update."""
        self.updates.append({"batch_id": batch_id, "global_step": global_step, **values})

    def reset(self) -> None:
        """Count."""
        self.resets += 1


class ArtProblems:
    """How an attack is made, and what it is run on.

    Attributes:
        shape: Shape of one input.
        classes: Classes of the classifier.
        norm: ``np.inf``, 2 or 1: the norm of the attack that :meth:`make_attack` makes.
        epsilon: Budget a value, as a share of the bounds' width: ``eps`` itself for ``np.inf``, otherwise scaled to the
            norm.
    """

    shape: tuple[int, ...] = (1, 4, 4)
    classes = 4
    norm: float = np.inf
    epsilon = 0.2

    def make_attack(self, estimator: Any, **settings: Any) -> Any:
        """The attack on an estimator; what ``settings`` has goes before settings of one's own.

        They are among ``eps``, ``targeted``, ``batch_size``, ``verbose``, ``summary_writer``, those in
        ``wrong_settings`` and those in ``repeatable``.
        """
        raise NotImplementedError

    def make_network(self, bounds: Bounds, classes: int) -> nn.Module:
        """The network that is attacked, in eval mode."""
        return small_network(self.shape, classes, bounds=bounds)

    def _problem(self, bounds: Bounds = (0.0, 1.0), *, classes: int | None = None) -> tuple[Any, Any, Any]:
        """An estimator, inputs, and labels that are its predictions."""
        classes = classes or self.classes
        network = self.make_network(bounds, classes)
        y = self._predictions(network, bounds)
        return self._classifier(network, clip_values=bounds, classes=classes), self._inputs(bounds), y

    def _inputs(self, bounds: Bounds) -> Any:
        return small_batch(8, self.shape, bounds=bounds).numpy()

    def _predictions(self, network: nn.Module, bounds: Bounds) -> Any:
        with torch.no_grad():
            return network(small_batch(8, self.shape, bounds=bounds)).argmax(1).numpy()

    def _classifier(
        self,
        network: nn.Module | None = None,
        *,
        clip_values: Bounds = (0.0, 1.0),
        classes: int | None = None,
        preprocessing: Any = (0.0, 1.0),
    ) -> Any:
        classes = classes or self.classes
        return PyTorchClassifier(
            model=self.make_network(clip_values, classes) if network is None else network,
            loss=nn.CrossEntropyLoss(),
            input_shape=self.shape,
            nb_classes=classes,
            clip_values=clip_values,
            preprocessing=preprocessing,
            device_type="cpu",
        )

    def _eps(self, bounds: Bounds) -> float:
        values = int(torch.Size(self.shape).numel())
        return self.epsilon * (bounds[1] - bounds[0]) * math.pow(values, 1 / self.norm)

    def _make(self, estimator: Any, bounds: Bounds = (0.0, 1.0), **settings: Any) -> Any:
        return self.make_attack(estimator, **{"eps": self._eps(bounds), "verbose": False, **settings})

    def _run(self, estimator: Any, x: Any, y: Any, **settings: Any) -> Any:
        attack = self._make(estimator, **settings)
        np.random.seed(3)
        return attack.generate(x, y) if y is not None else attack.generate(x)


def margin_of(estimator: Any, x: Any, classes: Any) -> Any:
    """By how much the classes ``(N,)`` beat the best other one."""
    return margins(torch.from_numpy(estimator.predict(x)), torch.from_numpy(classes)).numpy()
