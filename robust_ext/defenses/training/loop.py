"""The training loop of the small networks that some defenses need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.validation import check_integer, check_number


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
    check_training(rows, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)
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


def check_training(rows: int, *, epochs: int, batch_size: int, learning_rate: float) -> None:
    """Validate the settings of :func:`train_module`."""
    check_integer("epochs", epochs, minimum=1)
    check_integer("batch_size", batch_size, minimum=2)
    check_number("learning_rate", learning_rate, minimum=0, open_minimum=True)
    if rows < 2:
        raise InvalidArgumentError("inputs", f"{rows} inputs", "at least 2 training inputs")
