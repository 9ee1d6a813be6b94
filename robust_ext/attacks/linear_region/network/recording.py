"""Record what a network does to a batch, step by step, in one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.attacks.linear_region.network import affine_rules, gate_rules, max_gates
from robust_ext.attacks.linear_region.network.regions import Regions, merge_scales
from robust_ext.attacks.linear_region.network.tape import Tape
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import frozen

_RULES = {**affine_rules.RULES, **gate_rules.RULES, **max_gates.RULES}


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
    with torch.inference_mode(False), torch.enable_grad(), frozen(network):
        x = points.detach().clone().requires_grad_().clone()
        tape = Tape(x, _RULES)
        with tape:
            logits = network(x)
        output = tape.number_of_logits(logits)
    steps = merge_scales(tape.steps, output)
    return Regions(steps, shape=tuple(points.shape[1:]), dtype=points.dtype, output=output, logits=logits.detach())
