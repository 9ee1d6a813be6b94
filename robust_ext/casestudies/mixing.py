"""A network behind mixes of its input with images of other classes: what mixup inference consists of."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from robust_ext.core.random import stream


class MixedFeatures(nn.Module):
    """Features ``(N, mixes, F)`` of mixes ``weight x + (1 - weight) s``, with images s of a pool drawn at each call.

    The pool ``(K, P, *shape)`` holds P images of each class; s is one of a class other than the network's prediction
    at x. Draws are from torch's global generator, but where a table ``(2, K, mixes)`` states once and for all which
    images (class, number) are mixed in where a class is predicted.

    Args:
        features: Of the network, from inputs ``(N, *shape)`` to ``(N, F)``.
        last: Its last layer, to logits ``(N, K)``.
        pool: See above.
        mixes: How many.
        weight: Of the input, between 0 and 1.
    """

    pool: Tensor
    table: Tensor | None

    def __init__(self, features: nn.Module, last: nn.Linear, pool: Tensor, *, mixes: int, weight: float) -> None:
        super().__init__()
        self.features, self.last, self.mixes, self.weight = features, last, mixes, weight
        self.register_buffer("pool", pool)
        self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        with torch.no_grad():
            predicted = self.last(self.features(x)).argmax(1)
        mixed = self.weight * x[:, None] + (1 - self.weight) * self.partners(predicted)
        found: Tensor = self.features(mixed.flatten(0, 1))
        return found.view(len(x), self.mixes, -1)

    def partners(self, predicted: Tensor) -> Tensor:
        """Images to be mixed in where these classes ``(N,)`` are predicted, ``(N, mixes, *shape)``."""
        if self.table is not None:
            return self.pool[self.table[0, predicted], self.table[1, predicted]]
        classes, images = self.pool.shape[:2]
        shape, device = (len(predicted), self.mixes), predicted.device
        others = (predicted[:, None] + torch.randint(1, classes, shape, device=device)) % classes
        return self.pool[others, torch.randint(images, shape, device=device)]

    def fixed(self, seed: int) -> MixedFeatures:
        """A copy that shares the network and always mixes in the same images for a predicted class."""
        classes, images = self.pool.shape[:2]
        generator, shape = stream(seed, "partners"), (classes, self.mixes)
        others = (torch.arange(classes)[:, None] + torch.randint(1, classes, shape, generator=generator)) % classes
        made = MixedFeatures(self.features, self.last, self.pool, mixes=self.mixes, weight=self.weight)
        made.table = torch.stack([others, torch.randint(images, shape, generator=generator)]).to(self.pool.device)
        return made.train(self.training)


class BareFeatures(nn.Module):
    """Features ``(N, 1, F)`` of the input itself, in the place of those of mixes."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.training = features.training

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        found: Tensor = self.features(x)
        return found[:, None]


class MeanSoftmax(nn.Module):
    """From the features ``(N, mixes, F)`` to the logarithm of the mean softmax over mixes, ``(N, K)``."""

    def __init__(self, last: nn.Linear) -> None:
        super().__init__()
        self.last = last

    def forward(self, features: Tensor) -> Tensor:
        """See the class."""
        logs: Tensor = self.last(features).log_softmax(2)
        return logs.logsumexp(1) - math.log(logs.shape[1])
