"""The readout of a random model: fitted to several draws of its features, and decided by their majority."""

from __future__ import annotations

import hashlib
import math
from functools import cache

import torch
from torch import Tensor, nn

from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.models.readouts.base import Fitted, Readout


class Drawn(nn.Module):
    """Outputs ``(N, draws, *F)`` of a module that draws from the global generators, draw after draw.

    What is drawn follows from the seed, the number of the draw and the values of the batch: the same batch draws the
    same again after any other draws, and another batch draws again. The generators are left as they were, and the
    module is shared, not copied.
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


@settings_class
class Majority(Readout):
    """Another readout over several draws: a row is class 1 exactly where more than half of its draws are.

    It is fitted to all draws of all points as if each draw were a point. The score is the median of the draws' scores,
    of an even number the lower one. Attacks are shown single draws. The draws that a readout was fitted to flatter it,
    so planted points count by further ones, see :meth:`lasting`.
    """

    readout: Readout = setting(help="The readout of a single draw.")
    draws: int = setting(help="How many.", minimum=2, maximum=10_000)

    @property
    def shown(self) -> Readout:
        """The readout of a single draw."""
        return self.readout

    def measured(self, features: nn.Module, *, seed: int) -> nn.Module:
        """The features ``(N, draws, *F)``."""
        return Drawn(features, self.draws, seed=seed)

    def check(self, shape: tuple[int, ...]) -> None:
        """Check like the readout of a single draw."""
        self.readout.check(shape[1:])

    def fit(self, features: Tensor, planted: Tensor) -> dict[str, Tensor]:
        """Fit to features ``(B, n, draws, *F)``."""
        return self.readout.fit(features.flatten(1, 2), planted.repeat_interleave(self.draws))

    def score(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The median over draws."""
        own = {name: part.repeat_interleave(self.draws, 0) for name, part in parameters.items()}
        single = self.readout.score(features.flatten(0, 1), own)
        return single.view(len(features), self.draws).median(1).values

    def scores(self, features: Tensor, parameters: Fitted) -> Tensor:
        """The same of the features ``(B, n, draws, *F)`` of B problems."""
        single = self.readout.scores(features.flatten(1, 2), parameters)
        return single.view(*features.shape[:2], self.draws).median(2).values

    def lasting(self, features: Tensor, parameters: Fitted) -> Tensor:
        """Scores ``(B, n)`` above which points are by the majority of other draws, but for one time in a thousand.

        ``features`` ``(B, n, R, *F)`` are those of R draws that the readout was not fitted to, of which this is a low
        quantile, at the least the lowest.
        """
        draws = features.shape[2]
        single = self.readout.scores(features.flatten(1, 2), parameters).view(*features.shape[:3])
        rank = max(1, math.floor(_quantile(self.draws) * (draws + 1)))
        return single.kthvalue(rank, dim=2).values

    def anchored(self, parameters: dict[str, Tensor], edge: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Anchor like the readout of a single draw."""
        return self.readout.anchored(parameters, edge)


@cache
def _quantile(draws: int) -> float:
    """The largest share q, in hundredths, so that draws above the q-quantile are a majority, but for one in 1,000."""
    most = draws // 2

    def lost(share: float) -> float:
        return sum(math.comb(draws, k) * (1 - share) ** k * share ** (draws - k) for k in range(most + 1))

    return max((share / 100 for share in range(1, 50) if lost(share / 100) <= 1e-3), default=0.0)
