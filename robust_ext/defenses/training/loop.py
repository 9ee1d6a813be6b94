"""The training of what some defenses need: settings that all have, and the loop of the small networks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_inputs, check_integer, check_number
from robust_ext.defenses.training.part import TrainedPart


class Training(Settings, ABC):
    """How a defense's part is trained for a classifier, which is left as it was; a subclass declares the settings.

    All that is drawn comes from their ``seed``; the global generators are left alone.
    """

    bounds: tuple[float, float]

    @abstractmethod
    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> TrainedPart:
        """Train.

        Args:
            classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
            inputs: Clean training inputs, floating point ``(N, ...)`` in the bounds, at least 2.
            labels: Their classes, integers ``(N,)``.

        Returns:
            On the classifier's device, in eval mode; its parameters require no gradients.

        Raises:
            InvalidArgumentError: These are no such tensors.
            ModelError: The classifier is not one, or is in train mode.
        """

    def checked(self, classifier: nn.Module, inputs: Tensor) -> Tensor:
        """The inputs on the classifier's device."""
        return check_inputs("inputs", inputs, bounds=self.bounds).to(module_device(classifier))


@settings_class
class NetworkTraining(Training):
    """Training of a network by Adam."""

    epochs: int = setting(default=20, help="Passes over the data, at least 1.", minimum=1)
    batch_size: int = setting(default=128, help="Inputs in a step, at least 2.", minimum=2)
    learning_rate: float = setting(default=1e-3, help="Of Adam, above 0.", above=0)
    bounds: tuple[float, float] = setting(default=(0.0, 1.0), help="Of the inputs.", check=check_bounds)
    seed: int = setting(default=0, help="Of everything that is drawn.", minimum=0)

    def run(
        self, module: nn.Module, rows: int, loss: Callable[[Tensor], Tensor], *, seeded: bool = True, slower: float = 1
    ) -> None:
        """:func:`train_module` with these settings.

        Args:
            module: See there.
            rows: See there.
            loss: See there.
            seeded: False to go on with the global generators, seeded by the caller.
            slower: What the learning rate is divided by.
        """
        train_module(
            module,
            rows,
            loss,
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate / slower,
            seed=self.seed if seeded else None,
        )


def train_module(
    module: nn.Module,
    rows: int,
    loss: Callable[[Tensor], Tensor],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int | None,
) -> list[float]:
    """Train a module by Adam, in train mode; afterwards it is in eval mode and has no gradients.

    Args:
        module: Its parameters that require gradients are trained, on the device where they are.
        rows: Number of training rows, at least 2.
        loss: From indices of rows, int64 ``(n,)`` with n of at least 2, to the mean loss ``()``. It may draw from the
            global generators, which are seeded for it and put back.
        epochs: Passes over the data, at least 1.
        batch_size: Rows in a step, at least 2.
        learning_rate: Above 0.
        seed: Of the order and of whatever the loss draws, at least 0; None to go on with the global generators.

    Returns:
        The mean loss of each pass.

    Raises:
        InvalidArgumentError: A setting is not accepted.
    """
    check_integer("epochs", epochs, minimum=1)
    check_integer("batch_size", batch_size, minimum=2)
    check_number("learning_rate", learning_rate, minimum=0, open_minimum=True)
    check_rows(rows)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=learning_rate)
    means = []
    module.train()
    seeded = nullcontext() if seed is None else seeded_globals(derive_seed(seed, "training"))
    with seeded, torch.inference_mode(False), torch.enable_grad():
        for _ in range(epochs):
            total = 0.0
            # Batches of about the same size: one of a single row has no variance and no negatives.
            for part in torch.tensor_split(torch.randperm(rows), max(rows // batch_size, 1)):
                value = loss(part)
                optimizer.zero_grad()
                torch.autograd.backward(value)
                optimizer.step()
                total += float(value.detach()) * len(part)
            means.append(total / rows)
    optimizer.zero_grad()
    module.eval()
    return means


def check_rows(rows: int) -> None:
    """Raise InvalidArgumentError where there are too few rows to train on."""
    if rows < 2:
        raise InvalidArgumentError("inputs", f"{rows} inputs", "at least 2 training inputs")
