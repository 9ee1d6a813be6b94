"""How points are sent through the features: in batches of the best size, through a folded copy where that is faster.

Most of a binarization test on a CPU is forward passes of a thousand points a sample. A copy of the network with each
batch normalisation folded into the convolution before it, in channels-last layout, makes the same features from fewer
operations. It is used to measure points only, after its features were compared with the network's own; what is planted
is checked again, attacked and verified through the network itself.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from robust_ext.features import LayerInput
from robust_ext.target import Counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forward:
    """Features of many points.

    Args:
        module: From inputs ``(M, ...)`` to features ``(M, F)``.
        rows: Most rows of a batch.
        channels_last: Whether images are laid out channels last.
    """

    module: nn.Module
    rows: int
    channels_last: bool = False

    def __call__(self, points: Tensor) -> Tensor:
        """The features of ``(M, ...)``, without gradients, in batches of nearly equal size."""
        pieces = max(1, -(-points.shape[0] // self.rows))
        with torch.no_grad():
            return torch.cat([self.batch(piece) for piece in points.tensor_split(pieces)])

    def batch(self, points: Tensor) -> Tensor:
        """The features of one batch."""
        if self.channels_last:
            points = points.contiguous(memory_format=torch.channels_last)
        features: Tensor = self.module(points)
        return features


def choose_forward(
    features: Counted,
    inputs: Tensor,
    *,
    rows: int | str,
    fold: bool,
    once: Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]],
) -> Forward:
    """Decide how points are measured, by timing; a run that goes on keeps to what was decided.

    Args:
        features: The network's features.
        inputs: Some inputs ``(n, ...)`` on its device, n of at least 1.
        rows: Rows of a batch, or ``"auto"``.
        fold: Whether a folded copy may be used.
        once: Gets a name and what computes the decision; returns it, or what was decided earlier.
    """
    twin = folded_twin(features, inputs) if fold else None
    plain = Forward(features, 1)
    # A GPU gains from batches until it is full; a CPU has its best size where activations still fit into caches.
    sizes = ([64, 256, 1024] if inputs.is_cuda else [32, 64, 128]) if rows == "auto" else [int(rows)]

    def decide() -> dict[str, Any]:
        best, rate = _fastest(plain, inputs, sizes)
        if twin is None:
            return {"rows": best, "folded": False}
        best_twin, rate_twin = _fastest(twin, inputs, sizes)
        return {"rows": best_twin, "folded": True} if rate_twin < 0.97 * rate else {"rows": best, "folded": False}

    decided = once("forward", decide)
    if decided["folded"] and twin is not None:
        return Forward(twin.module, decided["rows"], twin.channels_last)
    return Forward(features, decided["rows"])


def folded_twin(features: Counted, inputs: Tensor) -> Forward | None:
    """A faster copy of the features that gives the same result, counted like them; None where there is none.

    Args:
        features: The network's features.
        inputs: Some inputs ``(n, ...)``; the copy is compared on them, and on noise in their range.
    """
    if inputs.is_cuda or inputs.dim() != 4:
        return None
    original = features.module
    try:
        network = original.model if isinstance(original, LayerInput) else original
        folded = _fold(network).requires_grad_(False)
        folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        copy = LayerInput(folded, original.layer) if isinstance(original, LayerInput) else folded
        twin = Forward(Counted(copy, features.counter), 1, channels_last=True)
        with torch.no_grad():
            low, high = float(inputs.min()), float(inputs.max())
            noise = torch.linspace(low, high, inputs.numel(), device=inputs.device).view_as(inputs)
            for probe in (inputs, noise, inputs[:1]):
                expected, got = original(probe), twin.batch(probe)
                if not torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
                    logger.info("the folded copy of the network differs from it, and is not used")
                    return None
    except Exception as error:
        # Whatever cannot be traced (control flow that depends on data, other libraries' code) is measured as it is.
        logger.info("the network cannot be folded (%s: %s), and is measured as it is", type(error).__name__, error)
        return None
    return twin


def _fold(network: nn.Module) -> fx.GraphModule:
    """A traced copy of a network in eval mode, without the batch normalisations that follow a convolution."""
    traced = fx.symbolic_trace(copy.deepcopy(network))
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        norm = modules.get(node.target) if node.op == "call_module" else None
        before = node.args[0] if isinstance(norm, nn.BatchNorm2d) else None
        if not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        convolution = modules[str(before.target)]
        # Modules that are called twice have one set of weights for two places.
        once = len(before.users) == 1 and calls[node.target] == calls[before.target] == 1
        if once and isinstance(norm, nn.BatchNorm2d) and isinstance(convolution, nn.Conv2d):
            traced.set_submodule(str(before.target), fuse_conv_bn_eval(convolution, norm))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def _fastest(forward: Forward, inputs: Tensor, sizes: list[int]) -> tuple[int, float]:
    """The best of some batch sizes (the smallest within 3% of it), and its seconds a row."""
    rates = dict.fromkeys(sizes, float("inf"))
    with torch.no_grad():
        # Round after round rather than size after size, so that a slow moment does not decide; the first warms up.
        for warm in (False, True, True):
            for size in sizes:
                batch = inputs[:1].expand(size, *inputs.shape[1:]).contiguous()
                start = time.perf_counter()
                forward.batch(batch)
                if batch.is_cuda:
                    torch.cuda.synchronize(batch.device)
                if warm:
                    rates[size] = min(rates[size], (time.perf_counter() - start) / size)
    best = min(size for size in sizes if rates[size] <= 1.03 * min(rates.values()))
    return best, rates[best]
