"""How fast a network is by itself: bare passes, timed at a copy of it."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robust_ext.core.cost import Cost, Rates
from robust_ext.core.random import seeded_globals

logger = logging.getLogger(__name__)

# Rows of the first measurement; of the second, which is made where the first one comes to more than so many seconds.
_FEW, _MORE, _LONG = 4, 32, 60.0


@dataclass(frozen=True)
class Probe:
    """A network whose rows are counted, and how it is called.

    Args:
        network: From inputs to logits.
        inputs: Some, ``(n, ...)``, on its device.
        batch: Rows that are sent at once.
        batches: The same of phases that send other numbers, and no gradients.
    """

    network: nn.Module
    inputs: Tensor
    batch: int
    batches: Mapping[str, int] = field(default_factory=dict)


class BarePasses:
    """A copy of a network in eval mode, with the network's own weights, to be timed at inputs ``(n, ...)``.

    What a module keeps from call to call stays as it is, and so do the generators.
    """

    def __init__(self, network: nn.Module, inputs: Tensor) -> None:
        self._inputs = inputs
        self._network: nn.Module | None = None
        try:
            self._network = copy.deepcopy(network, {id(one): one for one in network.parameters()}).eval()
        except Exception as error:
            self._refuse(error)

    def measure(self, rows: int, *, backward: bool = True, warm: bool = False) -> Rates | None:
        """The rates of one batch of so many rows; None where the network cannot be copied or run.

        With ``warm`` it goes through once before: the first pass waits for memory.
        """
        if self._network is None:
            return None
        try:
            points = self._inputs[torch.arange(rows, device=self._inputs.device) % len(self._inputs)]
            with seeded_globals(0):
                rates = _measured(self._network, points, backward=backward)
                return _measured(self._network, points, backward=backward) if warm else rates
        except Exception as error:
            self._refuse(error)
            return None

    def _refuse(self, error: Exception) -> None:
        self._network = None
        logger.info("the time of a row was not measured (%s: %s)", type(error).__name__, error)


def measure_rates(probe: Probe, cost: Cost) -> Rates | None:
    """Measure the rates of a network with a few rows; None where it cannot be copied or run.

    ``cost`` is what is to be estimated: where it is long, rows are measured in a batch of the usual size.
    """
    bare = BarePasses(probe.network, probe.inputs)
    rates = bare.measure(min(_FEW, len(probe.inputs)))
    if rates is None or rates.seconds(cost) <= _LONG:
        return rates
    return bare.measure(_MORE)


def _measured(module: nn.Module, rows: Tensor, *, backward: bool) -> Rates:
    with torch.no_grad():
        forward = _seconds(lambda: module(rows), rows)
    if not backward:
        return Rates(forward / len(rows), 0.0)
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
