"""Whether a module is a classifier from inputs to logits, checked on a few inputs before any work."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError, ModelError
from robust_ext.core.foreign import text_of
from robust_ext.core.tasks import OWN_GRADIENTS, TOKENS, name_output

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
    """Whether a module that raised runs on images with their channels moved to the front."""
    if inputs.dim() != 4 or inputs.shape[3] not in (1, 3, 4):
        return False
    try:
        with torch.no_grad():
            module(inputs.permute(0, 3, 1, 2))
    except Exception:
        return False
    return True


def _runs_with_gradients(module: nn.Module, inputs: Tensor) -> bool:
    """Whether a module that raised runs where gradients are switched on."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            module(inputs.clone())
    except Exception:
        return False
    return True


def _behaves(part: nn.Module) -> bool:
    """Whether the train mode of this very module changes what it computes."""
    return isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)) or (
        isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
    )
