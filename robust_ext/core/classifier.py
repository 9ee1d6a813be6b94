"""Checks that a module is a classifier whose logits for a row depend on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.devices import tolerance_of
from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError, ModelError
from robust_ext.core.foreign import text_of
from robust_ext.core.random import seeded_globals
from robust_ext.core.tasks import OWN_GRADIENTS, TOKENS, name_output

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
        row_wise: Whether a row has to give the same logits with others next to it, alone, and in another order.
        optimised: Whether the logits come from an optimisation. Then only other rows next to a row count, and by much:
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
        f"{argument}: is batch-dependent: the logits of a row differ by up to {found:.3g} with the other rows of the "
        f"batch or their order (the largest is {scale:.3g}). Attacks query parts of batches in any order, so what "
        "they find is not what is judged. Take statistics that do not come from the batch (running ones in "
        "normalisation, static scales in quantisation); a defense that treats rows in groups by design is an "
        "AdaptiveDefense with batch_level = True and a group_size, for robust_ext.evaluate_defense"
    )


_CHANNELS_LAST = "it runs on inputs.permute(0, 3, 1, 2): the inputs have their channels last, so give those"


def check_classifier(module: nn.Module, inputs: Tensor) -> Tensor:
    """Run a classifier on a few inputs and return its logits ``(n, K)``; raise where it is no such thing.

    Args:
        module: The classifier, on the device of ``inputs``.
        inputs: float32 ``(n, ...)``, at least one row.

    Raises:
        InvalidArgumentError: ``module`` is not an ``nn.Module``.
        InconsistentModelError: It is in train mode.
        ModelError: It raises on such inputs, returns no ``(n, K >= 2)`` finite float tensor, or returns probabilities.
    """
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError("model", type(module).__name__, "a torch.nn.Module from inputs to logits")
    if inputs.is_meta or any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ModelError("model: its weights hold no values (device meta); move it to a device and load its weights")
    training = [
        name or type(part).__name__ for name, part in module.named_modules() if part.training and _behaves(part)
    ]
    if module.training or training:
        raise InconsistentModelError(
            f"model: {', '.join(training[:3]) or type(module).__name__} is in train mode, where outputs may depend "
            "on the batch or on chance; call model.eval() first",
            "train_mode",
        )
    try:
        with torch.no_grad():
            # A copy: a module that works in place must not change what is its caller's.
            logits = module(inputs.clone())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = text_of(error)
        tokens = any(isinstance(part, (nn.Embedding, nn.EmbeddingBag)) for part in module.modules())
        raise ModelError(
            f"model: raised {type(error).__name__} on inputs of shape {tuple(inputs.shape)} and dtype float32: {text}"
            + (f"; {TOKENS}" if tokens and "indices" in text else "")
            + (f"; {_CHANNELS_LAST}" if _has_channels_last(module, inputs) else "")
            + (f"; {OWN_GRADIENTS}" if _runs_with_gradients(module, inputs) else "")
        ) from error
    rows = len(inputs)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() != 2 or len(logits) != rows:
        raise ModelError(f"model: {name_output(logits, rows, inputs)}")
    if logits.shape[1] < 2:
        raise ModelError(
            f"model: returned shape {tuple(logits.shape)} for {rows} inputs, expected logits of shape ({rows}, K) with "
            "at least two classes; robust_ext.models.outputs.TwoClass makes two columns of one"
        )
    if not bool(torch.isfinite(logits).all()):
        raise ModelError(
            "model: returned NaN or infinite logits on clean inputs; fix what divides by zero or overflows, and mask "
            "classes by large negative logits instead of infinite ones"
        )
    sums_to_one = bool(((logits.double().sum(1) - 1).abs() < 1e-4).all())
    if sums_to_one and bool((logits >= 0).all()) and bool((logits <= 1).all()):
        raise ModelError(
            "model: returns probabilities (rows in [0, 1] that sum to one), expected logits; leave out the softmax"
        )
    return logits.detach()


def _has_channels_last(module: nn.Module, inputs: Tensor) -> bool:
    """Return whether a module that raised runs on images with their channels moved to the front."""
    if inputs.dim() != 4 or inputs.shape[3] not in (1, 3, 4):
        return False
    try:
        with torch.no_grad():
            module(inputs.permute(0, 3, 1, 2))
    except Exception:
        return False
    return True


def _runs_with_gradients(module: nn.Module, inputs: Tensor) -> bool:
    """Return whether a module that raised runs where gradients are switched on."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            module(inputs.clone())
    except Exception:
        return False
    return True


def _behaves(part: nn.Module) -> bool:
    """Return whether the train mode of this very module changes what it computes."""
    return isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)) or (
        isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
    )
