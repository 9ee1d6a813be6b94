"""The recording of what a network does to a batch, step by step, in one forward pass."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.linear_region.network.regions import Regions, merge_scales
from robust_ext.attacks.linear_region.network.rules import RULES
from robust_ext.attacks.linear_region.network.tape import Tape, tensors_in
from robust_ext.core.classifier import check_consistency
from robust_ext.core.errors import InconsistentModelError, ModelError, RobustExtError
from robust_ext.core.guard import frozen
from robust_ext.core.random import stream
from robust_ext.models.forms import evaluable

# A relative difference that rounding can make.
_ROUNDING = 1e-4
# Passes with which a random module is looked for.
_TRIES = 4


def record(network: nn.Module, points: Tensor) -> Regions:
    """Return the linear regions of a batch of points and the network's affine map in each, from one forward pass.

    Args:
        network: A network in eval mode that maps points to logits ``(N, K)``; left unchanged.
        points: float32 or float64 ``(N, ...)``; N may be 0.

    Raises:
        ModelError: The network is not piecewise affine or cannot be followed; the text names the function and lists
            the supported ones.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
        >>> regions = record(network, torch.rand(4, 2))
        >>> constraints, logits = regions.forward(torch.rand(4, 2))
        >>> constraints.shape, logits.shape, regions.adjoint(constraints).shape
        (torch.Size([4, 3]), torch.Size([4, 2]), torch.Size([4, 2]))
    """
    if not points.shape[0]:
        nothing = torch.zeros(0, dtype=torch.int64, device=points.device)
        return record(network, points.new_zeros(1, *points.shape[1:])).select(nothing)
    # With gradients on, all that depends on the input requires them, also behind functions that cannot be seen.
    network = evaluable(network)
    with torch.inference_mode(False), torch.enable_grad(), frozen(network):
        x = points.detach().clone().requires_grad_().clone()
        tape = Tape(x, RULES)
        with tape:
            logits = _run(network, x)
        output = tape.number_of_logits(logits)
    steps = merge_scales(tape.steps, output)
    return Regions(steps, shape=tuple(points.shape[1:]), dtype=points.dtype, output=output, logits=logits.detach())


def record_checked(network: nn.Module, inputs: Tensor, bounds: tuple[float, float]) -> Regions:
    """Return the region of the first input, of a network whose logits of a row follow from that row alone.

    Record the first of ``inputs (N, ...)`` and a point drawn in ``bounds``, run them again, and run them in another
    order next to another point: seven rows forward. The recorded steps must reproduce the logits.

    Raises:
        ModelError: The network cannot be followed, or does not repeat its recorded steps.
        InconsistentModelError: It is random, keeps a state or looks at other rows; the text names the module.
    """
    low, high = bounds
    drawn = torch.rand(2, *inputs.shape[1:], generator=stream(0, "recorded")).to(inputs) * (high - low) + low
    points = torch.cat([inputs[:1], drawn[:1].clamp(low, high)])
    try:
        regions = record(network, points)
    except ModelError as refused:
        # Randomness and other rows also make a constant differ between rows.
        _check_rows(network, points, bounds, refused)
        raise
    other_batch = torch.cat([drawn[1:].clamp(low, high), points.flip(0)])
    with torch.no_grad():
        again, others = network(points.clone()), network(other_batch.clone())
    moved = regions.at(other_batch).logits
    rounding = (2e-2, 3e-2) if inputs.is_cuda else (1e-4, 1e-2)
    pairs = ((again, regions.logits), (others[1:].flip(0), regions.logits), (others, moved))
    for (one, other), share in zip(pairs, (rounding[0], rounding[1], rounding[1]), strict=True):
        # Rows that overflow in one of the two show nothing.
        kept = one.isfinite().all(1) | other.isfinite().all(1)
        if not bool(kept.any()):
            continue
        one, other = one[kept], other[kept]
        # A last log_softmax moves all logits of a row.
        gap = ((one - one[:, :1]) - (other - other[:, :1])).abs().max()
        if not bool(gap <= share * other.abs().max().clamp(min=1e-30)):
            differs = ModelError(
                "the network returns other logits than its recorded steps: it keeps a state, is random or decides by "
                "values in Python; robust_ext:BoundarySearch() searches a network that is deterministic and has "
                "gradients"
            )
            _check_rows(network, points, bounds, differs)
            raise differs
    return regions.select(torch.zeros(1, dtype=torch.int64, device=inputs.device))


def _check_rows(network: nn.Module, points: Tensor, bounds: tuple[float, float], cause: ModelError) -> None:
    """Raise an error with the module's name if a network is random, keeps a state or looks at other rows."""
    try:
        check_consistency(network, points, bounds=bounds)
    except InconsistentModelError as error:
        if error.kind not in ("random", "batch"):
            return
        module = _changing_module(network, points, beside=error.kind == "batch")
        where = f"; it is in {module}" if module else ""
        text = f"{error}{where}"
        raise InconsistentModelError(text, error.kind, error.difference, error.scale) from cause


def _changing_module(network: nn.Module, points: Tensor, *, beside: bool) -> str | None:
    """Return name and class of the innermost module that first returns a different output for the same input.

    Args:
        network: A network.
        points: At least two rows.
        beside: Compare the first row next to other rows, instead of repeating all rows.
    """
    others = torch.cat([points[:1], points[:1].expand_as(points[1:])]) if beside else points
    kept = slice(1) if beside else slice(None)
    name: str
    # Two random draws may be the same.
    for _ in range(_TRIES):
        # One block around both passes: its end restores buffers, which may be the state.
        with frozen(network), torch.no_grad():
            calls = [_module_calls(network, given.clone()) for given in (points, others)]
        for (name, before, after), (_, before_again, after_again) in zip(*calls, strict=False):
            if _same(before, before_again, kept) and not _same(after, after_again, kept):
                return name
    return None


def _module_calls(network: nn.Module, x: Tensor) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return module, inputs and outputs of each call, innermost first."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    entered: list[list[Tensor]] = []

    def enter(_module: nn.Module, args: Any) -> None:
        entered.append([one.detach().clone() for one in tensors_in(args)])

    with ExitStack() as stack:
        for name, module in network.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            shown = f"{name or 'the network'} ({type(module).__name__})"

            def leave(_module: nn.Module, _args: Any, out: Any, shown: str = shown) -> None:
                calls.append((shown, entered.pop(), [one.detach().clone() for one in tensors_in(out)]))

            stack.enter_context(module.register_forward_pre_hook(enter))
            stack.enter_context(module.register_forward_hook(leave))
        network(x)
    return calls


def _same(first: list[Tensor], second: list[Tensor], rows: slice) -> bool:
    if [one.shape for one in first] != [one.shape for one in second]:
        return False
    pairs = [(one.double(), other.double()) for one, other in zip(first, second, strict=True) if one[rows].numel()]
    return all(bool((one[rows] - other[rows]).abs().max() <= _ROUNDING * one.abs().max()) for one, other in pairs)


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
