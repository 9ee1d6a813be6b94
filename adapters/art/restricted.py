"""Masks and budgets of single values, as modules that attacks on all values with one budget can be run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.module_search import search_defended, search_module
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel

DEFENDED = "robust_ext.adapters.art.estimators.DefendedPyTorchClassifier"


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
        search: Any = search_defended if attack.traits.detector else search_module
        there = {name: points.to(device) for name, points in given.items()}
        ways |= {"expected": DEFENDED} if attack.traits.detector else {}
        found: Tensor = search(
            attack, module, inputs.to(device), labels, threat_model=threat_model, watch=watch, **there, **ways
        )
        return found.cpu()
    parts = [inputs[:0]]
    # A network that depends on the row takes whole batches in order, or one row alone.
    size = len(inputs) if attack.traits.batching == "full" else 1
    for rows in torch.split(torch.arange(len(inputs)), max(size, 1)):
        its_mask, its_reach = (None if part is None else part[rows].to(device) for part in (mask, reach))
        inside, begin, ball = _restrict(module, inputs[rows].to(device), its_mask, its_reach, threat_model)
        candidates = search_rows(
            attack,
            inside,
            begin.cpu(),
            labels[rows],
            {name: points[rows] for name, points in given.items()},
            device=device,
            threat_model=ball,
            watch=None if watch is None else _inside(watch, inside),
            **ways,
        )
        parts.append(inside.points(candidates.to(device)).cpu())
    return torch.cat(parts)


def _restrict(
    module: nn.Module, inputs: Tensor, mask: Tensor | None, reach: Tensor | None, threat_model: ThreatModel
) -> tuple[Restricted, Tensor, ThreatModel]:
    """Return the module that is attacked in place of another, where the attack begins and how far it may go."""
    if reach is None:
        assert mask is not None
        return Masked(module, inputs, mask), inputs, threat_model
    budget = reach if mask is None else reach * mask
    ball = ThreatModel(norm="linf", epsilon=1.0, bounds=(-1.0, 1.0))
    return Scaled(module, inputs, budget, threat_model.bounds), torch.zeros_like(inputs), ball


def _inside(watch: Watch, inside: Restricted) -> Watch:
    return lambda step: watch(replace(step, points=inside.points(step.points)))


class Restricted(nn.Module):
    """A module on points that are made of an attack's, which is attacked in its place.

    ``inputs`` ``(N, ...)`` is where the attack begins; ``(1, ...)`` serves batches of any size.
    """

    def __init__(self, module: nn.Module, inputs: Tensor) -> None:
        super().__init__()
        self.module, self.inputs = module, inputs
        self.training = module.training

    def points(self, x: Tensor) -> Tensor:
        """Return inputs of the module, ``(N, ...)``, from points of the attack."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(N, K)``."""
        logits: Tensor = self.module(self.points(x))
        return logits


class Masked(Restricted):
    """Values outside a mask (bool, of the shape of the inputs) stay those of the input; distances are of all values."""

    def __init__(self, module: nn.Module, inputs: Tensor, mask: Tensor) -> None:
        super().__init__(module, inputs)
        self.mask = mask.to(inputs.dtype)
        self.kept = inputs * (1 - self.mask)

    def points(self, x: Tensor) -> Tensor:
        """See :meth:`Restricted.points`; exact, and affine for attacks that need that."""
        return x * self.mask + self.kept


class Scaled(Restricted):
    """Each value goes from -1 to 1 as the module's goes over its own budget (at least 0), as far as the bounds allow.

    The linf ball of radius 1 around 0 is all that the budgets allow, and nothing more.
    """

    def __init__(self, module: nn.Module, inputs: Tensor, reach: Tensor, bounds: tuple[float, float]) -> None:
        super().__init__(module, inputs)
        self.above = torch.minimum(reach, bounds[1] - inputs).clamp_min(0)
        self.below = torch.minimum(reach, inputs - bounds[0]).clamp_min(0)
        self.bounds = bounds

    def points(self, x: Tensor) -> Tensor:
        """See :meth:`Restricted.points`."""
        return (self.inputs + torch.where(x > 0, self.above, self.below) * x).clamp(*self.bounds)


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


def check_budget(argument: str, value: Any, *, above: bool = False) -> Any:
    """Return an array of budgets or steps when all its values are finite and at least 0, or ``above`` 0."""
    expected = f"finite numbers {'above' if above else 'of at least'} 0"
    if not np.issubdtype(value.dtype, np.number):
        raise InvalidArgumentError(argument, f"dtype {value.dtype}", expected)
    if not (np.isfinite(value).all() and (value > 0 if above else value >= 0).all()):
        raise InvalidArgumentError(argument, f"values in [{value.min():g}, {value.max():g}]", expected)
    return value


def broadcast(argument: str, values: Any, inputs: Tensor) -> Any:
    """Broadcast an array to the shape of the inputs; InvalidArgumentError where it does not fit."""
    try:
        return np.broadcast_to(values, tuple(inputs.shape)).copy()
    except ValueError:
        expected = (
            f"one that numpy broadcasts to {tuple(inputs.shape)}; for a value an input, shape "
            f"{(len(inputs), *[1] * (inputs.dim() - 1))}"
        )
        raise InvalidArgumentError(argument, f"shape {np.shape(values)}", expected) from None


def groups_of_rows(eps: Any, eps_step: Any, inputs: Tensor) -> list[tuple[float, Any, Tensor]] | None:
    """Group rows with the same budget and step as (budget, step, indices of rows), in the order of first rows.

    Both are numbers or arrays that broadcast to the inputs ``(N, ...)``; the step may be None. Returns None where
    values of one row have different budgets.
    """
    if not (isinstance(eps, np.ndarray) or isinstance(eps_step, np.ndarray)):
        return [(eps, eps_step, torch.arange(len(inputs)))]
    table = _rows_of("eps", eps, inputs)
    steps = None if eps_step is None else _rows_of("eps_step", eps_step, inputs)
    for values in (table, steps):
        if values is not None and values.size and not (values == values[:, :1]).all():
            return None
    found: dict[tuple[float, Any], list[int]] = {}
    for row in range(len(inputs)):
        key = (float(table[row, 0]), None if steps is None else float(steps[row, 0]))
        found.setdefault(key, []).append(row)
    return [(budget, step, torch.tensor(rows)) for (budget, step), rows in found.items()]


def common_ratio(eps: Any, eps_step: Any, inputs: Tensor) -> float | None:
    """Return ``eps_step`` relative to ``eps``, which must be the same in every value; None where it is None."""
    if eps_step is None:
        return None
    table, steps = _rows_of("eps", eps, inputs), _rows_of("eps_step", eps_step, inputs)
    ratios = (steps / np.where(table > 0, table, np.nan))[table > 0]
    if ratios.size and not np.allclose(ratios, ratios[0], rtol=1e-5):
        expected = "the same share of eps for every value, such as 0.1 * eps, or None"
        raise InvalidArgumentError("eps_step", f"shares from {ratios.min():g} to {ratios.max():g} of eps", expected)
    return float(ratios[0]) if ratios.size else None


def _rows_of(argument: str, values: Any, inputs: Tensor) -> Any:
    table = broadcast(argument, np.asarray(values, dtype=np.float64), inputs)
    return table.reshape(len(inputs), int(inputs[:1].numel()) if len(inputs) else -1) if len(inputs) else table
