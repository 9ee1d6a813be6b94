"""Monte-Carlo dropout: how much the predictions of a network vary when its dropout stays on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from robust_ext.detectors._features.repeating import repeatable

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def dropout_layers(network: nn.Module) -> list[nn.Module]:
    """The dropout modules of a network that drop anything; dropout within other modules or functions is not seen."""
    return [part for part in network.modules() if isinstance(part, _DROPOUTS) and part.p > 0]


@contextmanager
def dropping(network: nn.Module) -> Iterator[None]:
    """Switch dropout modules, and nothing else, to train mode, and back to what they were."""
    before = [(part, part.training) for part in dropout_layers(network)]
    try:
        for part, _ in before:
            part.training = True
        yield
    finally:
        for part, training in before:
            part.training = training


def dropout_variance(network: nn.Module, x: Tensor, *, passes: int) -> Tensor:
    """Variance of the predicted probabilities over passes with dropout, averaged over classes, ``(N,)``.

    It has gradients. Masks come from torch's global generator. Inputs ``(N, ...)`` are treated one after the other, all
    passes (at least 2) of one as a batch, so under one seed the result does not depend on how a data set is cut into
    batches. Where gradients need several inputs, each is repeated on the way back with the same masks, so that memory
    stays that of one. Without dropout modules it is exactly 0.
    """
    if not len(x) or not dropout_layers(network):
        return x.new_zeros(len(x))
    several = len(x) > 1 and torch.is_grad_enabled() and x.requires_grad
    return torch.cat([repeatable(several, _variance, network, row, passes) for row in torch.split(x, 1)])


def _variance(network: nn.Module, row: Tensor, passes: int) -> Tensor:
    # Inside, so that a pass that is repeated on the way back drops as well.
    with dropping(network):
        logits = _shared_beginning(network, row, passes)
        if logits is None:
            logits = network(row.repeat(passes, *[1] * (row.dim() - 1)))
    return logits.softmax(1).var(0, correction=0).mean()[None]


def _shared_beginning(network: nn.Module, row: Tensor, passes: int) -> Tensor | None:
    """Logits of all passes, with one pass through what lies before the first dropout, where all of them agree.

    None for networks that cannot have their batch grow on the way.
    """

    def grow(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        return (x.expand(passes, *x.shape[1:]) if len(x) == 1 else x, *args[1:])

    before = torch.get_rng_state()
    handles = [part.register_forward_pre_hook(grow) for part in dropout_layers(network)]
    try:
        logits: Tensor = network(row)
    except RuntimeError:
        logits = row
    finally:
        for handle in handles:
            handle.remove()
    if logits.dim() == 2 and len(logits) == passes and logits is not row:
        return logits
    # The masks are to be those of the passes that are made instead.
    torch.set_rng_state(before)
    return None
