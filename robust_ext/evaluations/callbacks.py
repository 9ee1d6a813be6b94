"""Callbacks: what is told of a result, and of records as they come; ready ones for trackers of experiments."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.foreign import not_ending
from robust_ext.core.warning import issuing_once
from robust_ext.engine.context import current_context, run_context
from robust_ext.evaluations.tracking import metrics, params
from robust_ext.reports import findings

if TYPE_CHECKING:
    from robust_ext.evaluations.result import EvaluationResult

logger = logging.getLogger(__name__)

R = TypeVar("R", bound="EvaluationResult")


@runtime_checkable
class Callback(Protocol):
    """What an evaluation's ``callbacks`` are: any object with this method, called in the process of the caller.

    One that has ``on_record(record)`` too gets every record of a sample, with the name of its ``run``, when its block
    is finished (or found in the run folder). What a callback raises is logged, and the result is returned all the same.
    """

    def on_result(self, result: EvaluationResult) -> None:
        """Called once, with the result, when its files are written."""


@contextmanager
def listening(callbacks: Sequence[Callback]) -> Iterator[Callable[[R], R]]:
    """Records of runs inside the block go to the callbacks; yields what tells them of the result and returns it.

    Warnings of the block and of the result are issued at its end, see :mod:`robust_ext.core.warning`.

    InvalidArgumentError where one is no callback.
    """
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(one, Callback) for one in callbacks):
        raise InvalidArgumentError("callbacks", repr(callbacks), "a list of objects with a method on_result(result)")

    def tell(result: R) -> R:
        # A diagnosis is asked for its findings; of others, a wrong setup is a warning.
        setup = () if result.kind == "diagnosis" else findings.divided(result.content.get("findings", ()))[0]
        take([*map(findings.sentence, setup), *result.content.get("warnings", ())])
        for one in callbacks:
            _call(one, "on_result", result)
        return result

    failed: set[int] = set()

    def heard(record: Mapping[str, Any]) -> None:
        for number, one in enumerate(callbacks):
            # A callback that fails at one record would fail at thousands.
            if number not in failed and hasattr(one, "on_record") and not _call(one, "on_record", record):
                failed.add(number)

    context = replace(current_context(), on_record=heard if callbacks else None)
    with issuing_once() as take, run_context(context), not_ending():
        yield tell


def _call(callback: object, method: str, argument: object) -> bool:
    """Whether the call went well; what it raises is logged."""
    try:
        getattr(callback, method)(argument)
    except Exception:
        logger.exception("%s.%s raised; the evaluation goes on", type(callback).__name__, method)
        return False
    return True


class MLflowCallback:
    """Log metrics and parameters to MLflow's active run.

    Args:
        client: What has ``log_metrics`` and ``log_params``: the module ``mlflow`` when left out.
    """

    # Of the value of a parameter, in every release of MLflow.
    _LONGEST = 250

    def __init__(self, client: Any = None) -> None:
        self._client = _imported("mlflow", "MLflow") if client is None else client

    def on_result(self, result: EvaluationResult) -> None:
        """Log it."""
        self._client.log_params({name: text[: self._LONGEST] for name, text in params(result).items()})
        self._client.log_metrics(metrics(result))


class WandbCallback:
    """Log metrics to a run of Weights & Biases, and parameters to its configuration.

    Args:
        run: What ``wandb.init`` returned; the active run when left out.
    """

    def __init__(self, run: Any = None) -> None:
        self._run = run

    def on_result(self, result: EvaluationResult) -> None:
        """Log it."""
        run = _imported("wandb", "Weights & Biases").run if self._run is None else self._run
        if run is None:
            raise InvalidArgumentError("run", None, "an active run: call wandb.init(), or hand over what it returned")
        run.config.update(params(result), allow_val_change=True)
        run.log(metrics(result))


class TensorBoardCallback:
    """Write metrics as scalars, and parameters as a text, to TensorBoard.

    Args:
        writer: A ``SummaryWriter``, or the folder of one to be made.
        step: Of the scalars, as of the training of the model that is evaluated.
    """

    def __init__(self, writer: Any, *, step: int = 0) -> None:
        self._writer, self._step = writer, step

    def on_result(self, result: EvaluationResult) -> None:
        """Write it."""
        opened = isinstance(self._writer, (str, os.PathLike))
        writer = (
            _imported("torch.utils.tensorboard", "TensorBoard").SummaryWriter(self._writer) if opened else self._writer
        )
        for name, value in metrics(result).items():
            writer.add_scalar(name, value, self._step)
        lines = [f"    {name} = {text}" for name, text in params(result).items()]
        writer.add_text(f"{result.kind}/settings", "\n".join(lines), self._step)
        writer.close() if opened else writer.flush()


def _imported(module: str, library: str) -> Any:
    """A tracker's module, imported when it is needed."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        package = "tensorboard" if library == "TensorBoard" else module
        raise MissingDependencyError(f"Logging to {library} needs {package}: pip install {package}") from error
