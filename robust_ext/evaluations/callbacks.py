"""Callbacks on results and on records as they arrive, with ready ones for experiment trackers."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from robust_ext.core import finding_texts as findings
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError, issuing_once, printable
from robust_ext.core.foreign import not_ending
from robust_ext.engine.context import current_context, run_context

if TYPE_CHECKING:
    from robust_ext.evaluations.result import EvaluationResult


def metrics(result: EvaluationResult) -> dict[str, float]:
    """Every number of the rows of a result, by a flat name: ``binarization/pgd/score``.

    Names hold letters, digits and ``_-./`` alone, which all trackers take; numbers that are missing are left out. A
    result with a verdict has ``KIND/passed`` besides, 1 or 0.
    """
    found: dict[str, float] = {}
    if (verdict := getattr(result, "verdict", None)) is not None:
        found[f"{result.kind}/passed"] = float(verdict == "passed")
    numbers = [name for name, kind in result.columns.items() if kind in (int, float) and name not in result.keys]
    rows = result.rows()
    titles = _apart("/".join(_name(row[key]) for key in result.keys if row[key] is not None) for row in rows)
    for title, row in zip(titles, rows, strict=True):
        known = {name: value for name in numbers if isinstance(value := row[name], (int, float))}
        found |= {f"{result.kind}/{title}/{name}": float(value) for name, value in known.items()}
    return found


def params(result: EvaluationResult) -> dict[str, str]:
    """The settings and versions of a result as texts, by flat names: ``binarization/epsilon``.

    Digests of code by file, and what networks return for probe inputs, are left out.
    """
    settings = {name: value for name, value in result.content.get("settings", {}).items() if not is_digest(name)}
    versions = {"versions": result.content.get("versions", {})}
    flat = [*_flat("", {"seed": result.content.get("seed"), **settings}), *_flat("", versions)]
    names = _apart(_name(name) for name, _ in flat)
    return {f"{result.kind}/{name}": text for name, (_, text) in zip(names, flat, strict=True)}


def is_digest(name: str) -> bool:
    """Return whether a setting identifies code, behaviour or entries in too many numbers for a reader."""
    return name == "entries" or name.endswith(("_code", "_behaviour"))


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}/", value)
        else:
            yield f"{prefix}{key}", printable(value if isinstance(value, str) else json.dumps(value))


def _name(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"[^A-Za-z0-9_./-]+", "_", text).strip("_/") or "_"


def _apart(names: Iterable[str]) -> list[str]:
    """Names of which equal ones are numbered."""
    found: dict[str, None] = {}
    for name in names:
        numbered = (name if number == 1 else f"{name}_{number}" for number in count(1))
        found[next(one for one in numbered if one not in found)] = None
    return list(found)


logger = logging.getLogger(__name__)

R = TypeVar("R", bound="EvaluationResult")


@runtime_checkable
class Callback(Protocol):
    """A callback of an evaluation: any object with this method, called in the caller's process.

    One that has ``on_record(record)`` too gets every record of a sample, with the name of its ``run``, when its block
    is finished (or found in the run folder). What a callback raises is logged, and the result is returned all the same.
    """

    def on_result(self, result: EvaluationResult) -> None:
        """Called once, with the result, when its files are written."""


@contextmanager
def listening(callbacks: Sequence[Callback]) -> Iterator[Callable[[R], R]]:
    """Pass records of runs inside the block to the callbacks; yield a function that passes them the result.

    Warnings of the block and of the result are issued at its end, see :mod:`robust_ext.core.errors`.

    InvalidArgumentError where one is no callback.
    """
    if not isinstance(callbacks, (list, tuple)) or not all(isinstance(one, Callback) for one in callbacks):
        raise InvalidArgumentError("callbacks", repr(callbacks), "a list of objects with a method on_result(result)")
    # A callback that fails at one record would fail at thousands.
    hearing = [one for one in callbacks if hasattr(one, "on_record")]

    def heard(record: Mapping[str, Any]) -> None:
        hearing[:] = [one for one in hearing if _call(one, "on_record", record)]

    def tell(result: R) -> R:
        # Findings are the result of a diagnosis; elsewhere only a wrong setup is a warning.
        setup = () if result.kind == "diagnosis" else findings.divided(result.content.get("findings", ()))[0]
        take([*map(findings.sentence, setup), *result.content.get("warnings", ())])
        for one in callbacks:
            _call(one, "on_result", result)
        return result

    context = replace(current_context(), on_record=heard if callbacks else None)
    with issuing_once() as take, run_context(context), not_ending():
        yield tell


def _call(callback: object, method: str, argument: object) -> bool:
    """Return whether the call went well; what it raises is logged."""
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
        writer, opened = self._writer, isinstance(self._writer, (str, os.PathLike))
        if opened:
            writer = _imported("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter(writer)
        for name, value in metrics(result).items():
            writer.add_scalar(name, value, self._step)
        lines = [f"    {name} = {text}" for name, text in params(result).items()]
        writer.add_text(f"{result.kind}/settings", "\n".join(lines), self._step)
        writer.close() if opened else writer.flush()


def _imported(module: str, library: str, package: str | None = None) -> Any:
    """A tracker's module, imported when it is needed."""
    try:
        return import_module(module)
    except ImportError as error:
        needed = package or module
        raise MissingDependencyError(f"Logging to {library} needs {needed}: pip install {needed}") from error
