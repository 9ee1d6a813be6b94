"""The training data of detectors, and the loop that small networks are trained in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_inputs, check_integer, check_number

ANY = (-float("inf"), float("inf"))


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSet:
    """The training data of a detector that is fitted by name.

    Args:
        clean: Inputs ``(N, ...)``, float32.
        labels: Their classes, int64 ``(N,)``.
        adversarial: Adversarial inputs ``(M, ...)`` of the first M clean ones, in order; None to have them made.
        attack: Makes them, from a classifier, clean inputs and their classes.
        rows: How many rows supervised detectors are trained on at most.
    """

    clean: Tensor
    labels: Tensor
    adversarial: Tensor | None
    attack: Callable[[nn.Module, Tensor, Tensor], Tensor]
    rows: int

    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Rows to train a supervised detector on, drawn by the seed, and the others: int64, in increasing order."""
        clean = self.clean
        given = len(clean if self.adversarial is None else self.adversarial)
        chosen = torch.randperm(given, generator=stream(seed, "training rows"))[: self.rows].sort().values
        chosen = chosen.to(clean.device)
        others = torch.ones(len(clean), dtype=torch.bool, device=clean.device).index_fill(0, chosen, False)
        return chosen, others.nonzero().flatten()

    def adversarial_of(self, chosen: Tensor, classifier: nn.Module) -> Tensor:
        """Adversarial inputs of some clean rows."""
        if self.adversarial is not None:
            return self.adversarial[chosen]
        return self.attack(classifier, self.clean[chosen], self.labels[chosen])


def check_kinds(
    clean: Tensor, adversarial: Tensor, *, fewest: int = 1, reason: str = "", bounds: tuple[float, float] = ANY
) -> list[Tensor]:
    """Return clean and adversarial inputs ``(N, ...)`` and ``(M, ...)`` as float32, in the bounds, if enough of each.

    ``reason`` stands before the number ``fewest`` in error messages.
    """
    checked = []
    for name, inputs in (("clean", clean), ("adversarial", adversarial)):
        checked.append(check_inputs(name, inputs, bounds=bounds))
        if len(inputs) < fewest:
            raise InvalidArgumentError(name, f"{len(inputs)} inputs", f"at least {reason}{fewest} {name} inputs")
    return checked


def check_training(epochs: int, batch_size: int, learning_rate: float, seed: int) -> None:
    """Check the settings of a training."""
    check_integer("epochs", epochs, minimum=1)
    check_integer("batch_size", batch_size, minimum=1)
    check_number("learning_rate", learning_rate, minimum=0, open_minimum=True)
    check_integer("seed", seed, minimum=0)


def minimise(
    network: nn.Module,
    loss: Callable[[Tensor], tuple[Tensor, Tensor]],
    rows: int,
    epochs: int,
    batch_size: int,
    learning_rate: float,
) -> list[float]:
    """Train a network by Adam, with torch's global generator; return the reported values, averaged over each epoch.

    ``loss`` takes the rows of a step and returns the minimised and the reported value, both ``()``.
    """
    device, optimizer = module_device(network), torch.optim.Adam(network.parameters(), lr=learning_rate)
    orders = (torch.randperm(rows).to(device) for _ in range(epochs))
    return [train_pass(optimizer, torch.split(order, batch_size), loss) for order in orders]


def train_pass(
    optimizer: torch.optim.Optimizer, batches: Iterable[Tensor], loss: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> float:
    """Take one step for each batch of rows, int64 ``(n,)``; return what ``loss`` reports, averaged over the rows."""
    total, rows = 0.0, 0
    for batch in batches:
        minimised, reported = loss(batch)
        optimizer.zero_grad()
        torch.autograd.backward(minimised)
        optimizer.step()
        total += float(reported.detach()) * len(batch)
        rows += len(batch)
    return total / rows
