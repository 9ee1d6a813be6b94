"""A block that may do anything to networks, code and settings, and leaves none of it behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from robust_ext.core.intact.code import code_state
from robust_ext.core.intact.modules import NetworkState
from robust_ext.core.intact.process import fenced


@dataclass
class Disturbances:
    """What had been changed when a guarded block was left, in words; it is all put back."""

    network: list[str] = field(default_factory=list)  # Weights, submodules, hooks, methods, functions
    left: list[str] = field(default_factory=list)  # Settings of the process, attributes of modules


@contextmanager
def guarded(*networks: nn.Module) -> Iterator[Disturbances]:
    """Run a block on networks, see what it changed, and put it back, also where the block raises.

    Inside, no parameter requires a gradient. Buffers, train flags, gradients and ``requires_grad`` are put back without
    being mentioned.
    """
    found, network = Disturbances(), NetworkState(*networks)
    code = code_state(network.classes)
    try:
        with fenced(found.left):
            try:
                yield found
            finally:
                # What compares and restores must run on functions as they were.
                patched = code.restore()
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            changed, attributes = network.restore()
        found.network = changed + patched
        found.left += attributes
