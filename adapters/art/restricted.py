"""Masks and budgets of single values, as modules that attacks on all values with one budget can be run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.native import search_module
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel

DEFENDED = "robust_ext.adapters.art.estimators.DefendedPyTorchClassifier"


class Restricted(nn.Module):
    """A module on points of an attack, which ``points`` maps to inputs of the module that is attacked, ``(N, ...)``."""

    def __init__(self, module: nn.Module, points: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.points, self.training = module, points, module.training

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``."""
        logits: Tensor = self.module(self.points(x))
        return logits


def masked(module: nn.Module, inputs: Tensor, mask: Tensor) -> Restricted:
    """Return a module whose values outside a bool mask stay those of the inputs; distances are of all values."""
    free = mask.to(inputs.dtype)
    kept = inputs * (1 - free)
    return Restricted(module, lambda x: x * free + kept)


def scaled(module: nn.Module, inputs: Tensor, reach: Tensor, bounds: tuple[float, float]) -> Restricted:
    """Return a module whose values go from -1 to 1 over their budgets ``reach``, as far as the bounds allow.

    The linf ball of radius 1 around 0 is all that the budgets allow, and nothing more.
    """
    above = torch.minimum(reach, bounds[1] - inputs).clamp_min(0)
    below = torch.minimum(reach, inputs - bounds[0]).clamp_min(0)
    return Restricted(module, lambda x: (inputs + torch.where(x > 0, above, below) * x).clamp(*bounds))


def search_rows(
    attack: NativeAttack,
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    given: Mapping[str, Tensor],
    *,
    mask: Tensor | None = None,
    reach: Tensor | None = None,
    device: torch.device,
    threat_model: ThreatModel,
    watch: Watch | None,
    **ways: Any,
) -> Tensor:
    """Run an attack on the rows of one batch, on the CPU but for the module; returns candidates ``(N, ...)``.

    ``given`` holds references or starting points of N rows. ``mask`` (bool ``(N, ...)``) states which values may
    change, ``reach`` ``(N, ...)`` the budget of each value, which goes before that of the threat model. ``watch``
    receives the module's own inputs; gradients are by the attack's points.
    """
    if mask is None and reach is None:
        there: dict[str, Any] = {name: points.to(device) for name, points in given.items()}
        ways |= {"threat_model": threat_model, "watch": watch, "shell": DEFENDED}
        return search_module(attack, module, inputs.to(device), labels, **there, **ways).cpu()
    parts, ball = [inputs[:0]], threat_model
    # A network that depends on the row takes whole batches in order, or one row alone.
    size = len(inputs) if attack.traits.batching == "full" else 1
    for rows in torch.split(torch.arange(len(inputs)), max(size, 1)):
        x, begin = inputs[rows].to(device), inputs[rows]
        if reach is None:
            assert mask is not None
            inside = masked(module, x, mask[rows].to(device))
        else:
            budget = (reach if mask is None else reach * mask)[rows].to(device)
            inside, begin = scaled(module, x, budget, threat_model.bounds), torch.zeros_like(begin)
            ball = ThreatModel(norm="linf", epsilon=1.0, bounds=(-1.0, 1.0))
        candidates = search_rows(
            attack,
            inside,
            begin,
            labels[rows],
            {name: points[rows] for name, points in given.items()},
            device=device,
            threat_model=ball,
            watch=None if watch is None else _inside(watch, inside),
            **ways,
        )
        parts.append(inside.points(candidates.to(device)).cpu())
    return torch.cat(parts)


def _inside(watch: Watch, inside: Restricted) -> Watch:
    return lambda step: watch(replace(step, points=inside.points(step.points)))


def check_mask(mask: Any, inputs: Tensor) -> Tensor | None:
    """Return a bool mask of the inputs' shape, True where values may change; None without one.

    Accepted are bool or floating point values of at least 0 that numpy broadcasts to the inputs.
    """
    if mask is None:
        return None
    values = np.asarray(mask)
    expected = "bool or floating point values, 0 where nothing may change and above 0 where it may"
    if values.dtype != bool and not np.issubdtype(values.dtype, np.floating):
        raise InvalidArgumentError("mask", f"dtype {values.dtype}", expected)
    if not (values >= 0).all():
        raise InvalidArgumentError("mask", "values below 0 or NaN", expected)
    return torch.from_numpy(broadcast("mask", values != 0, inputs))


def check_budget(argument: str, value: Any, *, above: bool = False) -> None:
    """Raise unless all values of an array of budgets or steps are finite and at least 0, or ``above`` 0."""
    expected = f"finite numbers {'above' if above else 'of at least'} 0"
    if not np.issubdtype(value.dtype, np.number):
        raise InvalidArgumentError(argument, f"dtype {value.dtype}", expected)
    if not (np.isfinite(value).all() and (value > 0 if above else value >= 0).all()):
        raise InvalidArgumentError(argument, f"values in [{value.min():g}, {value.max():g}]", expected)


def broadcast(argument: str, values: Any, inputs: Tensor) -> Any:
    """Broadcast an array to the shape of the inputs; InvalidArgumentError where it does not fit."""
    try:
        return np.broadcast_to(values, tuple(inputs.shape)).copy()
    except ValueError:
        each = (len(inputs), *[1] * (inputs.dim() - 1))
        expected = f"one that numpy broadcasts to {tuple(inputs.shape)}; for a value an input, shape {each}"
        raise InvalidArgumentError(argument, f"shape {np.shape(values)}", expected) from None


def groups_of_rows(eps: Any, eps_step: Any, inputs: Tensor) -> list[tuple[float, Any, Tensor]] | None:
    """Group rows with the same budget and step as (budget, step, indices of rows), in the order of first rows.

    Both are numbers or arrays that broadcast to the inputs ``(N, ...)``; the step may be None. Returns None where
    values of one row have different budgets.
    """
    if not (isinstance(eps, np.ndarray) or isinstance(eps_step, np.ndarray)):
        return [(eps, eps_step, torch.arange(len(inputs)))]
    tables = [_rows_of("eps", eps, inputs), *([] if eps_step is None else [_rows_of("eps_step", eps_step, inputs)])]
    if any((table != table[:, :1]).any() for table in tables):
        return None
    found: dict[tuple[float, ...], list[int]] = {}
    for row in range(len(inputs)):
        found.setdefault(tuple(float(table[row, 0]) for table in tables), []).append(row)
    return [(key[0], key[1] if key[1:] else None, torch.tensor(rows)) for key, rows in found.items()]


def common_ratio(eps: Any, eps_step: Any, inputs: Tensor) -> float | None:
    """Return ``eps_step`` relative to ``eps``, which must be the same in every value; None where it is None."""
    if eps_step is None:
        return None
    table, steps = _rows_of("eps", eps, inputs), _rows_of("eps_step", eps_step, inputs)
    ratios = steps[table > 0] / table[table > 0]
    if ratios.size and not np.allclose(ratios, ratios[0], rtol=1e-5):
        expected = "the same share of eps for every value, such as 0.1 * eps, or None"
        raise InvalidArgumentError("eps_step", f"shares from {ratios.min():g} to {ratios.max():g} of eps", expected)
    return float(ratios[0]) if ratios.size else None


def _rows_of(argument: str, values: Any, inputs: Tensor) -> Any:
    """Return values as a table, float64 ``(N, D)``."""
    return broadcast(argument, np.asarray(values, dtype=np.float64), inputs).reshape(
        len(inputs), inputs[0:1].numel() or 1
    )
