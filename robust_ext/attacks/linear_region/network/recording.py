"""Record what a network does to a batch, step by step, in one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks.linear_region.network import (
    affine_rules,
    gate_rules,
    index_rules,
    layer_rules,
    max_gates,
    order_gates,
)
from robust_ext.attacks.linear_region.network.changes import changing_module
from robust_ext.attacks.linear_region.network.regions import Regions, merge_scales
from robust_ext.attacks.linear_region.network.tape import Tape
from robust_ext.core.consistency import check_consistency
from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError, ModelError, RobustExtError
from robust_ext.core.random import stream
from robust_ext.core.target import frozen
from robust_ext.models.compiled import evaluable

_RULES = {
    **affine_rules.RULES,
    **index_rules.RULES,
    **layer_rules.RULES,
    **gate_rules.RULES,
    **max_gates.RULES,
    **order_gates.RULES,
}


def record(network: nn.Module, points: Tensor) -> Regions:
    """The linear regions of a batch of points and the network's affine map in each.

    The points are ``(N, ...)``, float32 or float64; N may be 0. The network maps them to logits ``(N, K)``, in eval
    mode, and is left as it was. One forward pass is made; its choices are kept as one bool for each breakpoint and
    value and one int32 for each pooling window. A :class:`ModelError` names what in the network is not piecewise
    affine or cannot be followed, and lists what is supported.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> regions = record(network, torch.rand(4, 2))
        >>> constraints, logits = regions.forward(torch.rand(4, 2))
        >>> constraints.shape, logits.shape, regions.adjoint(constraints).shape
        (torch.Size([4, 3]), torch.Size([4, 2]), torch.Size([4, 2]))
    """
    if not isinstance(points, Tensor) or not points.is_floating_point() or points.dim() < 2:
        got = f"{points.dtype} of shape {tuple(points.shape)}" if isinstance(points, Tensor) else type(points).__name__
        raise InvalidArgumentError("points", got, "a floating point tensor (N, ...)")
    if not points.shape[0]:
        nothing = torch.zeros(0, dtype=torch.int64, device=points.device)
        return record(network, points.new_zeros(1, *points.shape[1:])).select(nothing)
    # With gradients switched on, whatever depends on the input requires them, also where it could not be followed.
    network = evaluable(network)
    with torch.inference_mode(False), torch.enable_grad(), frozen(network):
        x = points.detach().clone().requires_grad_().clone()
        tape = Tape(x, _RULES)
        with tape:
            logits = _run(network, x)
        output = tape.number_of_logits(logits)
    steps = merge_scales(tape.steps, output)
    return Regions(steps, shape=tuple(points.shape[1:]), dtype=points.dtype, output=output, logits=logits.detach())


def record_checked(network: nn.Module, inputs: Tensor, bounds: tuple[float, float]) -> Regions:
    """Regions of the first input, of a network whose logits of a row are found to follow from that row alone.

    The first of ``inputs (N, ...)`` and points drawn in ``bounds`` are recorded, sent through the network again, and
    once more in another order beside others: seven rows forward. There the recorded steps have to give its logits.

    Raises:
        ModelError: The network cannot be followed, or does not do again what was recorded.
        InconsistentModelError: It is random, keeps a state or looks at other rows; the text names the module.
    """
    low, high = bounds
    drawn = torch.rand(2, *inputs.shape[1:], generator=stream(0, "recorded")).to(inputs) * (high - low) + low
    points = torch.cat([inputs[:1], drawn[:1].clamp(low, high)])
    try:
        regions = record(network, points)
    except ModelError as refused:
        # Chance and other rows are also what makes a constant differ between rows.
        _check_rows(network, points, bounds, refused)
        raise
    beside = torch.cat([drawn[1:].clamp(low, high), points.flip(0)])
    with torch.no_grad():
        again, others = network(points.clone()), network(beside.clone())
    moved = regions.at(beside).logits
    rounding = (2e-2, 3e-2) if inputs.is_cuda else (1e-4, 1e-2)
    pairs = ((again, regions.logits), (others[1:].flip(0), regions.logits), (others, moved))
    for (one, other), share in zip(pairs, (rounding[0], rounding[1], rounding[1]), strict=True):
        # Rows that overflow, here and there, show nothing.
        kept = one.isfinite().all(1) | other.isfinite().all(1)
        if not bool(kept.any()):
            continue
        one, other = one[kept], other[kept]
        # A last log_softmax moves all logits of a row.
        gap = ((one - one[:, :1]) - (other - other[:, :1])).abs().max()
        if not bool(gap <= share * other.abs().max().clamp(min=1e-30)):
            differs = ModelError(
                "the network returns other logits than the steps that were recorded of it: it keeps a state, is random "
                "or decides something by values in Python; robust_ext:BoundarySearch() searches a network that is "
                "deterministic and has gradients"
            )
            _check_rows(network, points, bounds, differs)
            raise differs
    return regions.select(torch.zeros(1, dtype=torch.int64, device=inputs.device))


def _check_rows(network: nn.Module, points: Tensor, bounds: tuple[float, float], cause: ModelError) -> None:
    """Raise where a network is random, keeps a state or looks at other rows, with the module that does."""
    try:
        check_consistency(network, points, bounds=bounds)
    except InconsistentModelError as error:
        if error.kind not in ("random", "batch"):
            return
        module = changing_module(network, points, beside=error.kind == "batch")
        where = f"; it is in {module}" if module else ""
        text = f"{error}{where}"
        raise InconsistentModelError(text, error.kind, error.difference, error.scale) from cause


def _run(network: nn.Module, x: Tensor) -> Tensor:
    try:
        out: Tensor = network(x)
    except RobustExtError:
        raise
    except Exception as error:
        kinds = sorted({str(one.dtype).removeprefix("torch.") for one in network.parameters()} - {"float32"})
        weights = f" (its weights are {', '.join(kinds)})" if kinds else ""
        raise ModelError(
            f"linear regions cannot be followed: the network{weights} raised {type(error).__name__} for points of "
            f"{x.dtype} and shape {tuple(x.shape)}: {error}. Give a network of float32 weights; "
            "robust_ext.robust_accuracy puts a cast around others, for robust_ext:BoundarySearch()"
        ) from error
    return out
