"""The network of ECOC: code words, features of every bit, and the decoder.

Source: Verma and Swami, "Error Correcting Output Codes Improve Probability Estimation and Adversarial Robustness of
Deep Neural Networks" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robust_ext.casestudies.networks import small_features

BITS = 32
_TRUNKS = 4
_TRUNK_FEATURES, _BIT_FEATURES = 64, 64
# What the decoder adds before it takes the logarithm.
_FLOOR = 1e-6


def hadamard(size: int) -> Tensor:
    """The Hadamard matrix of Sylvester, entries -1 and 1, float32 ``(size, size)`` for a power of two.

    Example:
        >>> hadamard(2).tolist()
        [[1.0, 1.0], [1.0, -1.0]]
    """
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def code_words(classes: int, *, generator: torch.Generator) -> Tensor:
    """Words of -1 and 1, ``(classes, 32)``: rows of a Hadamard matrix in random order.

    Before, the first column, which is constant, changes its sign in every second row; then columns are shuffled too.
    """
    matrix = hadamard(BITS)
    matrix[::2, 0] *= -1
    rows, columns = (torch.randperm(BITS, generator=generator) for _ in range(2))
    return matrix[rows][:, columns][:classes]


class BitFeatures(nn.Module):
    """Features of every bit, ``(N, 32, F)``: eight branches on each of four trunks."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(small_features(shape, _TRUNK_FEATURES) for _ in range(_TRUNKS))
        each = BITS // _TRUNKS * _BIT_FEATURES
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(_TRUNK_FEATURES, each), nn.ELU()) for _ in self.trunks)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        parts = [branch(trunk(x)) for trunk, branch in zip(self.trunks, self.branches, strict=True)]
        return torch.cat([part.unflatten(1, (-1, _BIT_FEATURES)) for part in parts], 1)


class Decoder(nn.Module):
    """From features ``(N, 32, F)`` to logits ``log(max(tanh(o) . word, 0) + 1e-6)`` of bits o; or to correlations.

    With ``linear`` the logits are the correlations of the raw bits, without tanh, ReLU and logarithm.
    """

    words: Tensor

    def __init__(self, classes: int, *, linear: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(BITS, _BIT_FEATURES) / _BIT_FEATURES**0.5)
        self.bias = nn.Parameter(torch.zeros(BITS))
        self.register_buffer("words", torch.ones(classes, BITS))
        self.linear = linear

    def bits(self, features: Tensor) -> Tensor:
        """Raw bits ``(N, 32)``, of which the sign counts."""
        return (features * self.weight).sum(2) + self.bias

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)``."""
        bits = self.bits(features)
        return bits @ self.words.mT if self.linear else decoded(bits, self.words)


def decoded(bits: Tensor, words: Tensor) -> Tensor:
    """Logits ``(N, K)`` of raw bits ``(N, 32)`` and words ``(K, 32)``."""
    return ((torch.tanh(bits) @ words.mT).clamp_min(0) + _FLOOR).log()
