"""Several seeded draws of a random module at once."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from robust_ext.core.random import derive_seed, seeded_globals


class Drawn(nn.Module):
    """Outputs of a module that draws from the global generators of torch, numpy or ``random``, draw after draw.

    What is drawn follows from the seed, the number of the draw and the values of the batch: the same batch draws the
    same again, whatever was drawn before, and another batch draws anew. The generators are left as they were.

    Args:
        module: From inputs ``(N, ...)`` to outputs ``(N, *F)``; shared, not copied.
        draws: How many.
        seed: Of all of them.

    Example:
        >>> noisy = Drawn(nn.Dropout(0.5).train(), 1000, seed=0)
        >>> noisy(torch.ones(1, 2)).mean(1).round()
        tensor([[1., 1.]])
    """

    def __init__(self, module: nn.Module, draws: int, *, seed: int) -> None:
        super().__init__()
        self.module = module
        self.draws = draws
        self.seed = seed
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``(N, draws, *F)`` of inputs ``(N, ...)``."""
        content = x.detach().cpu().contiguous().numpy().tobytes()
        key = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")
        found = []
        for draw in range(self.draws):
            with seeded_globals(derive_seed(self.seed, "draws", key, draw)):
                found.append(self.module(x))
        return torch.stack(found, 1)
