"""What work costs: rows that go through a network, and from measured rates the seconds they take."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.core.random import seeded_globals

logger = logging.getLogger(__name__)

# Rows of the first measurement; of the second, which is made where the first one comes to more than so many seconds.
_FEW, _MORE, _LONG = 4, 32, 60.0


@dataclass(frozen=True)
class Cost:
    """Rows that are sent through a network.

    Args:
        forward: Rows that go forward, at most.
        backward: Rows that a gradient comes back through, at most.
        unknown: What else is run, and of which nothing is known before: names of attacks.

    Example:
        >>> Cost(3, 2) * 10 + Cost(1, 0, ("mine",))
        Cost(forward=31, backward=20, unknown=('mine',))
    """

    forward: float = 0
    backward: float = 0
    unknown: tuple[str, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        unknown = tuple(dict.fromkeys((*self.unknown, *other.unknown)))
        return Cost(self.forward + other.forward, self.backward + other.backward, unknown)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.forward * times, self.backward * times, self.unknown)


@dataclass(frozen=True)
class Rates:
    """Seconds that a row takes to go ``forward``, and a gradient of it to come ``backward``."""

    forward: float
    backward: float

    def seconds(self, cost: Cost) -> float:
        """What the known part of a cost takes."""
        return cost.forward * self.forward + cost.backward * self.backward


def measure_rates(module: nn.Module, inputs: Tensor, cost: Cost) -> Rates | None:
    """Measure the rates of a copy of a module in eval mode at inputs ``(N, ...)``, N of at least 1, with a few rows.

    ``cost`` is what is to be estimated: where it is long, rows are measured in a batch of the usual size. None where
    the module cannot be copied or run.
    """
    try:
        # What a module keeps from call to call stays as it is.
        module = copy.deepcopy(module)
        with seeded_globals(0):
            rates = _measured(module, inputs[:_FEW])
            if rates.seconds(cost) <= _LONG:
                return rates
            return _measured(module, inputs[torch.arange(_MORE, device=inputs.device) % len(inputs)])
    except Exception as error:
        logger.info("the time of a row was not measured (%s: %s)", type(error).__name__, error)
        return None


def _measured(module: nn.Module, rows: Tensor) -> Rates:
    with torch.no_grad():
        forward = _seconds(lambda: module(rows), rows)
    points = rows.clone().requires_grad_(True)
    try:
        with torch.enable_grad():
            both = _seconds(lambda: torch.autograd.grad(module(points).sum(), points), rows)
    except RuntimeError:
        # No gradient: an attack that needs one states it.
        both = forward
    return Rates(forward / len(rows), max(both - forward, 0.0) / len(rows))


def _seconds(call: Callable[[], object], rows: Tensor) -> float:
    begun = time.perf_counter()
    call()
    if rows.is_cuda:
        torch.cuda.synchronize(rows.device)
    return time.perf_counter() - begun
