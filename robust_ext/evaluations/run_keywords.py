"""Keywords of every evaluation besides its own arguments and settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from robust_ext.core.criteria import Criterion
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.evaluation_file import JudgedSettings, with_judge_seed
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.inputs import Batches, EvaluationInputs, Samples, prepare_inputs
from robust_ext.engine.run import Outcome, Run
from robust_ext.engine.running import Choice, attack_worker, run_all
from robust_ext.engine.task import Task, TaskResult, Worker, run_task
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.result import EvaluationResult

R = TypeVar("R", bound=Run)
S = TypeVar("S", bound=JudgedSettings)
T = TypeVar("T", bound=EvaluationResult)


@dataclass
class RunKeywords:
    """Keywords of every evaluation that decide how it is run.

    Args:
        device: Where to run it, on a copy of a model that lies elsewhere; the model's own device when left out.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder, in which the same call resumes a killed run; gets result and report.
        isolate: Run each attack in a process of its own, which has what an attacker has, see docs/threats.md.
        attack_timeout: Seconds an attack may then take for a batch; None for any time.
        executor: What runs the blocks, see docs/clusters.md; this process when left out.
        devices: The devices that its workers use; the model's own when left out.
        progress: Show a progress bar on stderr.
        callbacks: Told of the result, and of records as they come, see :class:`robust_ext.Callback`.
    """

    device: str | torch.device | None = None
    sample_ids: Sequence[int] | None = None
    out: str | os.PathLike[str] | None = None
    isolate: bool = False
    attack_timeout: float | None = None
    executor: ExecutorLike = None
    devices: Sequence[str] | None = None
    progress: bool = False
    callbacks: Sequence[Callback] = ()
    worker: Worker = field(init=False, default=run_task)

    @contextmanager
    def begun(self) -> Iterator[Callable[[T], T]]:
        """Start workers, and pass records to the callbacks; yield a function that saves the result and passes it on."""
        with (
            listening(self.callbacks) as tell,
            attack_worker(
                isolate=self.isolate, attack_timeout=self.attack_timeout, executor=self.executor, devices=self.devices
            ) as self.worker,
        ):
            yield lambda result: tell(result.saved(self.out))

    def prepare(
        self,
        model: object,
        inputs: Array | Batches | Samples,
        labels: Array | None,
        threat_model: ThreatModel,
        *,
        batch_size: int,
        criterion: Criterion | None = None,
    ) -> EvaluationInputs:
        """Check a classifier and its samples, see :func:`robust_ext.engine.inputs.prepare_inputs`."""
        more: dict[str, Any] = {"sample_ids": self.sample_ids, "device": self.device, "criterion": criterion}
        return prepare_inputs(model, inputs, labels, threat_model=threat_model, batch_size=batch_size, **more)

    def judged(self, settings: S) -> S:
        """The settings with a judge's seed."""
        return with_judge_seed(settings, out=self.out, worker=self.worker)

    def tasks(
        self,
        runs: Sequence[R],
        *,
        title: str,
        unit: str = "candidate",
        choose: Choice[R] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Generator[Task, TaskResult, dict[str, Outcome[R]]]:
        """The tasks of runs, for the worker to do; see :func:`robust_ext.engine.running.run_all`."""
        shown: dict[str, Any] = {"progress": self.progress, "title": title, "unit": unit}
        return run_all(runs, out=self.out, choose=choose, settings=settings, **shown)
