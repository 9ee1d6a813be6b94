"""Executors by name, for blocks of samples that are computed elsewhere: processes, Dask, Ray, Slurm; docs/clusters.md.

Each is a :class:`concurrent.futures.Executor`. A call whose worker died raises ``BrokenExecutor`` where the executor is
of no more use, as that of ``local``; else :class:`WorkerLostError`, and the executor goes on with other workers.
"""

from robust_ext.engine.executors.cluster import WorkerLostError
from robust_ext.engine.executors.make import make_executor, workers_of

__all__ = ["WorkerLostError", "make_executor", "workers_of"]
