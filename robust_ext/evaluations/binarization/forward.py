"""Forward passes of points through the features: in batches of the best size, through a faster folded copy.

Most of a binarization test on a CPU is forward passes of a thousand points a sample. A copy of the network with each
batch normalisation folded into the convolution before it, in channels-last layout, makes the same features from fewer
operations. It measures points and leads to witnesses, after its features were compared with the network's own; planted
points are checked again and attacked, and all is verified, through the network itself.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from robust_ext.core.machine import RowLimit, power_of_two, rows_that_fit
from robust_ext.core.target import Counted
from robust_ext.models.adaptive_features import together
from robust_ext.models.features import Observed

logger = logging.getLogger(__name__)


@dataclass
class Forward:
    """Features of many points."""

    module: nn.Module  # From inputs (M, ...) to features (M, F).
    rows: int  # Most of a batch; fewer from then on where these did not fit into memory.
    channels_last: bool = False  # How images are laid out.
    together: bool = False  # Whether a row's features depend on the rest of its batch.

    def __call__(self, points: Tensor) -> Tensor:
        """The features of ``(M, ...)``, without gradients, in batches of nearly equal size."""
        limit = RowLimit(self.rows)
        with torch.no_grad():
            features = limit.run(self.batch, points)
        self.rows = limit.rows
        return features

    def of_points(self, points: Tensor) -> Tensor:
        """The features ``(B, n, *F)`` of points ``(B, n, ...)`` of B samples.

        Those of a defense that treats rows together are of batches of all samples: the first points, then the second.
        """
        samples, count = points.shape[:2]
        if not self.together:
            features = self(points.flatten(0, 1))
            return features.view(samples, count, *features.shape[1:])
        parts = []
        for some in torch.split(points, max(1, self.rows // samples), 1):
            rows = some.transpose(0, 1).flatten(0, 1)
            with torch.no_grad():
                features = RowLimit(len(rows)).run(self.batch, rows)
            parts.append(features.view(-1, samples, *features.shape[1:]).transpose(0, 1))
        return torch.cat(parts, 1)

    def batch(self, points: Tensor) -> Tensor:
        """The features of one batch."""
        if self.channels_last:
            points = points.contiguous(memory_format=torch.channels_last)
        features: Tensor = self.module(points)
        return features


def choose_forward(
    features: Counted, inputs: Tensor, *, rows: int | str, fold: bool, drawn: nn.Module | None = None
) -> Forward:
    """Decide how points like the inputs ``(n, ...)`` are measured: by network and inputs alone, so every run alike.

    ``drawn`` are the features of a random model over several draws; a copy of that would draw other numbers.

    (Batches of other sizes differ in their last bits. What is fastest at the moment would make the records of two runs
    differ too. On a GPU whose memory is small against a batch, memory decides.)
    """
    if rows == "auto":
        # A power of two, 64 for CIFAR's images on a CPU, where caches limit it; more on a GPU and for less input.
        budget, least, most = (2**25, 16, 4096) if inputs.is_cuda else (2**18, 8, 256)
        rows = min(most, max(least, power_of_two(budget // max(1, inputs[:1].numel()))))
        if inputs.is_cuda:
            rows = rows_that_fit(features.module if drawn is None else drawn, inputs[:1], rows)
    if (grouped := together(features) > 1) or (drawn is not None and drawn is not features):
        return Forward(features if drawn is None else drawn, int(rows), together=grouped)
    twin = folded_twin(features, inputs) if fold else None
    return Forward(features, int(rows)) if twin is None else replace(twin, rows=int(rows))


def folded_twin(features: Counted, inputs: Tensor) -> Forward | None:
    """A faster copy of the features, counted like them; None where it gives other results on inputs ``(n, ...)``.

    Only networks with batch normalisation are copied, and only on a CPU, where it pays.
    """
    normalised = any(isinstance(part, nn.BatchNorm2d) for part in features.modules())
    if inputs.is_cuda or inputs.dim() != 4 or not normalised:
        return None
    original = features.module
    try:
        network = original.model if isinstance(original, Observed) else original
        folded = _fold(network).requires_grad_(False)
        folded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module = original.of(folded) if isinstance(original, Observed) else folded
        twin = Forward(Counted(module, features.counter), 1, channels_last=True)
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
    """A traced copy of a network in eval mode, without the batch normalisations that follow a convolution.

    Its sums and ReLUs write over what nothing else reads.
    """
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
    for node in traced.graph.nodes:
        # What a convolution or a sum has just made for this operation alone may be written over.
        made = node.args[0] if node.op == "call_function" else None
        if not isinstance(made, fx.Node) or len(made.users) > 1:
            continue
        convolved = made.op == "call_module" and isinstance(modules[str(made.target)], nn.Conv2d)
        if node.target in (torch.relu, F.relu) and (convolved or made.target in (operator.add, operator.iadd)):
            node.target, node.args, node.kwargs = torch.relu_, (made,), {}
        elif node.target is operator.add and convolved and isinstance(node.args[1], fx.Node):
            node.target = operator.iadd
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced
