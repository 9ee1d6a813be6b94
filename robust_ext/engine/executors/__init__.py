"""Executors by name, for blocks of samples that are computed elsewhere: processes, Dask, Ray, Slurm; docs/clusters.md.

Each is a :class:`concurrent.futures.Executor`. A call whose worker died raises a ``BrokenExecutor``; where that is a
:class:`WorkerLostError`, the executor goes on with other workers. ``shutdown(wait=False)`` ends calls that run.
"""

from robust_ext.engine.executors.cluster import WorkerLostError
from robust_ext.engine.executors.make import make_executor, workers_of

__all__ = ["WorkerLostError", "make_executor", "workers_of"]
