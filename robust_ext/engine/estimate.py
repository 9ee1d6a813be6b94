"""Cost estimates of runs: all checks run, and nothing else runs or is written."""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from robust_ext.core.cost import Cost, Costs
from robust_ext.core.random import seeded_globals
from robust_ext.engine.context import current_context, run_context
from robust_ext.engine.run_folder import finished

if TYPE_CHECKING:
    from robust_ext.engine.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The remaining work, at most.

    Args:
        title: Of the evaluation.
        samples: How many it has, over all of its runs, and how many of them are ``done``.
        costs: Rows by phase; what is run next to them and not known before is named there.
        seconds: Of the rows of each phase as bare passes on this machine; phases of which that is not known are left
            out.
        workers: Processes that share the work.
        size: Bytes that the run folder takes in the end, about; None where that is not known or there is none.
    """

    title: str
    samples: int = 0
    done: int = 0
    costs: Costs = field(default_factory=dict)
    seconds: dict[tuple[str, str | None], float] = field(default_factory=dict)
    workers: int = 1
    size: int | None = None

    @property
    def total(self) -> Cost:
        """The sum of all phases."""
        return sum(self.costs.values(), Cost())

    def __add__(self, other: Estimate) -> Estimate:
        """Both one after the other."""
        keys = {**self.costs, **other.costs}
        costs = {key: self.costs.get(key, Cost()) + other.costs.get(key, Cost()) for key in keys}
        timed = {**self.seconds, **other.seconds}
        seconds = {key: self.seconds.get(key, 0.0) + other.seconds.get(key, 0.0) for key in timed}
        size = None if self.size is None or other.size is None else self.size + other.size
        samples, done = self.samples + other.samples, self.done + other.done
        return replace(self, samples=samples, done=done, costs=costs, seconds=seconds, size=size)

    def as_phase(self, name: str, *, times: float = 1) -> Estimate:
        """Return the same work, done this many times, as one phase."""
        key: tuple[str, str | None] = (name, None)
        seconds = {key: times * sum(self.seconds.values())} if self.seconds else {}
        return replace(self, costs={key: self.total * times}, seconds=seconds)


class EstimatedError(Exception):
    """Ends an evaluation that is not to be run; not an error of anyone."""

    def __init__(self, estimate: Estimate) -> None:
        super().__init__(f"{estimate.title} is not run")
        self.estimate = estimate


def estimate(evaluation: Callable[[], object]) -> Estimate:
    """Estimate the cost of a call of an evaluation: it checks like the call, and runs and writes nothing.

    Args:
        evaluation: A function without arguments that calls one of ``evaluate``, ``binarization_test``, ``mead``,
            ``robust_accuracy``, ``evaluate_defense`` and ``diagnose``.

    Raises:
        RobustExtError: As the call would raise.

    Example:
        >>> import torch
        >>> from robust_ext import ThreatModel, robust_accuracy
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
        >>> x, threat_model = torch.rand(8, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.1)
        >>> y, attack = network(x).argmax(1), "robust_ext:APGD(steps=10)"
        >>> estimate(lambda: robust_accuracy(network, attack, x, y, threat_model)).total
        Cost(forward=96, backward=80, unknown=())
    """
    try:
        with run_context(replace(current_context(), dry_run=True)):
            evaluation()
    except EstimatedError as found:
        return found.estimate
    raise TypeError("evaluation: ended without a run, expected a function that calls an evaluation")


def row_seconds(network: nn.Module, inputs: Tensor, rows: int) -> tuple[float, float] | None:
    """Return the seconds that a row of a batch takes to go forward, and a gradient of it to come back.

    They are those of a copy of the network, in eval mode, with the network's own weights: what it keeps from call to
    call and the generators stay unchanged. None where it cannot be copied or run.
    """
    points = inputs[torch.arange(rows, device=inputs.device) % len(inputs)].requires_grad_()
    try:
        copied = copy.deepcopy(network, {id(one): one for one in network.parameters()}).eval()
        with seeded_globals(0), torch.enable_grad():
            # The first pass waits for memory.
            copied(points)
            begun = time.perf_counter()
            output = copied(points).sum()
            float(output.detach())
            forward = time.perf_counter() - begun
            if output.requires_grad:
                torch.autograd.grad(output, points, allow_unused=True)[0].sum().item()
    except Exception as error:
        logger.info("the time of a row was not measured (%s: %s)", type(error).__name__, error)
        return None
    return forward / rows, (time.perf_counter() - begun - forward) / rows


def estimate_runs(runs: Sequence[Run], *, folder: Path | None, title: str, workers: int) -> Estimate:
    """Estimate the remaining work of one evaluation's runs; RunFolderError for a folder of another run."""
    costs: defaultdict[tuple[str, str | None], Cost] = defaultdict(Cost)
    seconds: defaultdict[tuple[str, str | None], float] = defaultdict(float)
    samples = done = 0
    sizes = []
    rates: dict[nn.Module, tuple[float, float] | None] = {}
    for run in runs:
        there = set[int]() if folder is None else finished(folder / run.key, kind=run.kind, settings=run.stated)
        count = sum(map(len, run.blocks))
        left = sum(len(rows) for rows in run.blocks if not there.issuperset(rows))
        samples, done = samples + count, done + count - left
        kept = run.kept()
        sizes.append(None if kept is None else kept * count)
        probe = run.probe() if left else None
        if probe is not None and probe[0] not in rates:
            rates[probe[0]] = row_seconds(*probe)
        for key, cost in run.costs().items():
            costs[key] += cost * left
            if probe is not None and (cost.forward or cost.backward) and (rate := rates[probe[0]]) is not None:
                seconds[key] += left * (cost.forward * rate[0] + cost.backward * rate[1])
    size = None if folder is None or None in sizes else sum(one or 0 for one in sizes)
    return Estimate(
        title=title,
        samples=samples,
        done=done,
        costs=dict(costs),
        seconds=dict(seconds),
        workers=workers,
        size=size,
    )
