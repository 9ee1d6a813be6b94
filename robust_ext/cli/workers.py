"""The options that state where a command's work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.engine.executors import make_executor
from robust_ext.engine.isolation import CAN_ISOLATE


@settings_class
class ExecutorOptions(Settings):
    """What runs attacks elsewhere."""

    executor: str | None = setting(
        default=None,
        help="What computes blocks of samples: local (processes of this machine), dask:ADDRESS, or file.py:name of a "
        "function that makes an executor. See docs/clusters.md.",
        panel="workers",
    )
    jobs: int | None = setting(
        default=None,
        help="Number of workers. Processes of this machine without --executor.",
        minimum=1,
        maximum=10_000,
        panel="workers",
    )

    def make_executor(self, *, devices: Sequence[str] = ()) -> Callable[[], Executor] | None:
        """What makes the executor; None for this process."""
        if self.executor is None and not devices and self.jobs in (None, 1):
            return None
        text = "local" if self.executor is None else self.executor
        return make_executor(text, workers=self.jobs, devices=devices)


@settings_class
class WorkerOptions(ExecutorOptions):
    """Options of commands that run attacks."""

    out: Path | None = setting(
        default=None, help="Run folder; a killed run goes on there. result.json, report.html.", panel="run"
    )
    device: str = setting(default="cpu", help="As torch names it: cpu, cuda, cuda:1.", panel="run")
    in_process: bool = setting(
        default=False,
        help="Run attacks in the process that judges them, which they can then change, instead of each in its own.",
        cli="--in-process",
        panel="workers",
    )
    attack_timeout: float | None = setting(
        default=None, help="Seconds an attack may take for a batch; any time when left out.", above=0, panel="workers"
    )
    devices: str | None = setting(
        default=None,
        help="Devices of the workers, as cuda:0,cuda:1. On a cluster cuda, a GPU for each worker.",
        panel="workers",
    )

    @property
    def isolation(self) -> dict[str, Any]:
        """Whether attacks have processes of their own, see :func:`robust_ext.engine.workers.attack_worker`."""
        return {"isolate": CAN_ISOLATE and not self.in_process, "attack_timeout": self.attack_timeout}

    @property
    def workers(self) -> dict[str, Any]:
        """What makes the executor, and its devices; None for this process."""
        devices = None if self.devices is None else [one.strip() for one in self.devices.split(",")]
        return {"executor": self.make_executor(devices=devices or ()), "devices": devices}
