"""How a network behaves on a few probe inputs: what it is, whatever it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.core.guard import frozen
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.models.adaptive import AdaptiveDefense

PROBES = 4
# What outputs may differ by, relative to the largest: float32, other numbers of threads; on another kind of device,
# whose convolutions may round to ten bits.
TOLERANCE, TOLERANCE_ELSEWHERE = 1e-3, 5e-3
# Of more outputs than this, so many sums with random signs are kept.
_KEPT = 16


def behaviour(module: nn.Module, inputs: Tensor, bounds: tuple[float, float]) -> dict[str, Any]:
    """What a module returns for probe inputs, as plain values; the module is left as it was.

    Args:
        module: From inputs ``(N, ...)`` to one or several numbers each; it may draw from the global generators.
        inputs: Of the probes' shape and device.
        bounds: Lowest and highest value of inputs.
    """
    low, high = bounds
    # Whole groups of what a defense treats together.
    group = max((part.group_size or 1 for part in module.modules() if isinstance(part, AdaptiveDefense)), default=1)
    rows = group * math.ceil(PROBES / group)
    drawn = [torch.rand(inputs.shape[1:], generator=stream(0, number, "probe")) for number in range(rows)]
    probes = (low + (high - low) * torch.stack(drawn)).to(inputs)
    with frozen(module, attributes=True), torch.no_grad(), seeded_globals(derive_seed(0, "behaviour")):
        before = _draws(probes)
        try:
            values = _kept(module(probes))
        except Exception as error:  # A network may be made for no such inputs at all; then it always raises.
            return {"raised": type(error).__name__}
        return {"device": inputs.device.type, "random": not torch.equal(before, _draws(probes)), "values": values}


def compare_behaviour(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In words, how what a module returns differs from what it returned earlier; None where it does not."""
    if "raised" in earlier or "raised" in now:
        words = [f"raised {one['raised']}" if "raised" in one else "returned numbers" for one in (earlier, now)]
        return f"{words[1]} on probe inputs, and {words[0]} before" if len(set(words)) > 1 else None
    elsewhere = earlier["device"] != now["device"]
    if elsewhere and earlier["random"] and now["random"]:
        return None  # Another device draws other numbers.
    if np.shape(earlier["values"]) != np.shape(now["values"]):
        return "returns another number of values"
    differ = _differ(earlier["values"], now["values"], TOLERANCE_ELSEWHERE if elsewhere else TOLERANCE)
    if not differ.any():
        return None
    largest = np.nanmax(np.abs(_array(earlier["values"]) - _array(now["values"])), initial=0.0)
    shown = f"largest difference {largest:.2g}" if largest else "other values are not finite"
    probes = f"{differ.sum()} of {len(differ)} probe inputs"
    return f"behaves differently on {probes} ({shown})"


def _draws(probes: Tensor) -> Tensor:
    """Where the global generators of torch stand."""
    states = [torch.cuda.get_rng_state(probes.device)] if probes.device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *states])


def _kept(out: Tensor) -> list[list[float | None]]:
    values = out.detach()[:PROBES].reshape(PROBES, -1).double().cpu()
    if values.shape[1] > _KEPT:
        signs = torch.randint(2, (values.shape[1], _KEPT), generator=stream(0, "behaviour signs")) * 2.0 - 1
        values = values @ signs.double() / math.sqrt(len(signs))
    return [[float(f"{value:.8g}") if math.isfinite(value) else None for value in row] for row in values.tolist()]


def _array(values: Any) -> Any:
    return np.array(values, dtype=np.float64)


def _differ(earlier: Any, now: Any, tolerance: float) -> Any:
    """Which probes' values differ, bool ``(PROBES,)``."""
    a, b = _array(earlier), _array(now)
    scale = np.nanmax(np.abs(a), initial=np.nanmax(np.abs(b), initial=0.0))
    same = (np.abs(a - b) <= tolerance * scale) | (np.isnan(a) & np.isnan(b))
    return ~same.all(1)
