"""Whether a classifier's logits of a row are a function of that row alone, found on a few inputs before any work.

Attacks query parts of batches in any order, and what they return is judged in a later pass. Where chance or the rows
beside a row have a say in its logits, neither planting nor judging means what it claims to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InconsistentModelError
from robust_ext.core.foreign import text_of
from robust_ext.core.precision import tolerance_of
from robust_ext.core.random import seeded_globals
from robust_ext.core.tasks import name_output

# Differences up to these shares of the largest logit are rounding: of one batch computed twice, which only some GPU
# kernels sum in another order; with other values in other rows, which networks that leave out rows on their way may
# compute in batches of other sizes; and of batches of other sizes, which use other kernels. In coarser types than
# float32 the last two are larger.
_AGAIN, _AGAIN_GPU = 1e-5, 1e-3
_BESIDE, _BESIDE_GPU = 1e-4, 1e-3
_OTHER_SIZE, _OTHER_SIZE_GPU = 1e-2, 3e-2
# The share by which logits of an optimisation may differ, which turns rounding into something larger.
_OPTIMISED = 0.03
_REPEATS = 2
SINGLE, _AT_BOUND = "on a single row", "where the other rows lie at a bound"
_ROWS = 3


def check_consistency(
    module: nn.Module,
    inputs: Tensor,
    *,
    bounds: tuple[float, float],
    argument: str = "model",
    repeatable: bool = True,
    row_wise: bool = True,
    optimised: bool = False,
) -> None:
    """Raise where a module changes its input, or the logits of a row change with chance or with other rows.

    Args:
        module: From inputs to logits, on the device of ``inputs``.
        inputs: float32 ``(n, ...)`` in ``bounds``, at least one row; the first few are used, and one more that goes
            from bound to bound.
        bounds: Of inputs.
        argument: What error messages call the module.
        repeatable: Whether the same batch has to give the same logits again.
        row_wise: Whether a row has to give the same logits with others beside it, alone, and in another order.
        optimised: Whether the logits come from an optimisation. Then only other rows beside a row count, and by much:
            in a batch of another size rounding differs, and steps by the sign of a gradient make more of it.

    Raises:
        InconsistentModelError: Something of this is not so; the text names which, and what to do.
    """
    low, high = bounds
    ramp = (
        torch.linspace(low, high, inputs[0].numel(), device=inputs.device)
        .clamp(low, high)
        .view_as(inputs[:1])
        .to(inputs)
    )
    rows = torch.arange(_ROWS, device=inputs.device) % len(inputs)
    probes = torch.cat([inputs[rows], ramp.view_as(inputs[:1]).to(inputs)])
    # Nothing that draws disturbs the caller's random numbers.
    with torch.no_grad(), seeded_globals(0):
        first = _logits(module, probes, argument)
        scale = float(first.abs().nan_to_num(0, 0, 0).max())
        if repeatable:
            again = max(_difference(first, _logits(module, probes, argument)) for _ in range(_REPEATS))
            if again > scale * (_AGAIN_GPU if first.is_cuda else _AGAIN):
                raise InconsistentModelError(_random_words(argument, again, scale), "random", again, scale)
        if row_wise:
            found = _beside_others(module, probes, first, bounds, argument)
            beside = tolerance_of(module, first, single=_BESIDE_GPU if first.is_cuda else _BESIDE)
            if found > scale * (max(_OPTIMISED, beside) if optimised else beside):
                raise InconsistentModelError(_batch_words(argument, found, scale), "batch", found, scale)
        if row_wise and not optimised:
            found = _in_other_batches(module, probes, first, argument)
            size = tolerance_of(module, first, single=_OTHER_SIZE_GPU if first.is_cuda else _OTHER_SIZE)
            if found > scale * size:
                raise InconsistentModelError(_batch_words(argument, found, scale), "batch", found, scale)


def _beside_others(
    module: nn.Module, probes: Tensor, first: Tensor, bounds: tuple[float, float], argument: str
) -> float:
    """The largest change of the first and last row's logits where all other rows lie at one of the bounds."""
    found = 0.0
    for row, bound in zip((0, len(probes) - 1), bounds, strict=True):
        others = torch.full_like(probes, bound)
        others[row] = probes[row]
        found = max(found, _difference(first[row], _logits(module, others, argument, _AT_BOUND)[row]))
    return found


def _in_other_batches(module: nn.Module, probes: Tensor, first: Tensor, argument: str) -> float:
    """The largest change of logits of rows in another order, and of the first and last row alone."""
    order = torch.arange(len(probes) - 1, -1, -1, device=probes.device)
    found = _difference(first, _logits(module, probes[order], argument, "on rows in another order")[order])
    for row in (0, len(probes) - 1):
        try:
            alone = _logits(module, probes[row : row + 1], argument, SINGLE)[0]
        except InconsistentModelError:
            # A module that raises on every batch by now does not raise because a row is alone.
            _logits(module, probes, argument)
            raise
        found = max(found, _difference(first[row], alone))
    return found


def _logits(module: nn.Module, rows: Tensor, argument: str, tried: str = "") -> Tensor:
    """Logits of a copy of the rows; an error where the module changes that copy, or does not return one row each."""
    given, tried = rows.clone(), tried or f"on a batch of {len(rows)} rows"
    try:
        out = module(given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        needed = (
            "attacks leave out rows that are done, so it has to take batches of any size"
            if tried == SINGLE
            else "it has to take all inputs in the bounds"
        )
        text = f"{argument}: raised {type(error).__name__} {tried}: {text_of(error)}; {needed}"
        raise InconsistentModelError(text, "raises", tried=tried) from error
    if not torch.equal(given, rows):
        raise InconsistentModelError(
            f"{argument}: changes its input in place, so the points of attacks and of whoever checks them would change "
            "too; let its forward begin with x = x.clone(), or use functions that return a new tensor (x.clamp(0, 1) "
            "for x.clamp_(0, 1))",
            "changes_input",
        )
    if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != len(rows):
        raise InconsistentModelError(f"{argument}: {name_output(out, len(rows), rows)}", "shape", tried=tried)
    return out.detach()


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference between logits; those that are not finite in both count as equal."""
    differences = (one.double() - other.double()).abs()
    both = ~torch.isfinite(one) & ~torch.isfinite(other)
    found: float = differences.masked_fill(both, 0).nan_to_num(torch.inf, torch.inf, torch.inf).max().item()
    return found


def _random_words(argument: str, found: float, scale: float) -> str:
    return (
        f"{argument}: is random: called again with the same rows it returns logits that differ by up to {found:.3g} "
        f"(the largest is {scale:.3g}), so one prediction decides nothing. Fix its random numbers; or evaluate it as a "
        "random defense, which is judged by repeated draws: set its attribute random = True and call "
        "robust_ext.evaluate_defense(defense, None, inputs, labels, threat_model, classifier=static), where static is "
        "the network without the randomness"
    )


def _batch_words(argument: str, found: float, scale: float) -> str:
    return (
        f"{argument}: is batch-dependent: the logits of a row differ by up to {found:.3g} with the rows beside it or "
        f"their order (the largest is {scale:.3g}). Attacks query parts of batches in any order, so what they find "
        "is not what is judged. Take statistics that do not come from the batch (running ones in normalisation, static "
        "scales in quantisation); a defense that treats rows in groups by design is an AdaptiveDefense with "
        "batch_level = True and a group_size, for robust_ext.evaluate_defense"
    )
