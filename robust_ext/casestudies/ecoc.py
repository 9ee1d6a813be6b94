"""ECOC: every class has a code word, and a network a bit; the nearest word decides.

Sources: Verma and Swami, "Error Correcting Output Codes Improve Probability Estimation and Adversarial Robustness of
Deep Neural Networks" (2019); Zimmermann et al. 2022, appendix A.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.casestudies.base import CaseStudy, Measurement, Published, Recipe
from robust_ext.casestudies.networks import small_features
from robust_ext.casestudies.recipes import PredictedLabels, ThroughOtherLogits
from robust_ext.core.random import stream
from robust_ext.core.settings import settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses.training.loop import train_network
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.readouts.code import Code

BITS = 32
_TRUNKS = 4
_TRUNK_FEATURES, _BIT_FEATURES = 64, 64
# What the decoder adds before it takes the logarithm.
_FLOOR = 1e-6
# Of the noise in training, and of the share of another image that is blended in.
_NOISE = 0.032
_SHARE = 0.5


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


@settings_class
class ThroughCorrelations(ThroughOtherLogits):
    """Any attack, shown the correlations that a decoder takes ReLU and logarithm of; of a network, without tanh.

    Example:
        >>> ThroughCorrelations(attack=APGD(loss="margin")).name
        'APGD-MARGIN through correlations'
    """

    @property
    def words(self) -> str:
        """See the base."""
        return "through correlations"

    def other(self, part: nn.Module) -> nn.Module | None:
        """See the base."""
        if isinstance(part, Decoder):
            decoder = copy.copy(part)
            decoder.linear = True
            return decoder
        if isinstance(part, BinarizedClassifier) and isinstance(part.readout, Code):
            classifier = copy.copy(part)
            classifier.readout = replace(part.readout, decoder="linear")
            return classifier
        return None


class ErrorCorrectingCodes(CaseStudy):
    """A network of 32 bits, whose decoder takes the logarithm of what is left after a ReLU."""

    title = "ECOC"
    source = "Verma and Swami 2019"
    published = Published(weak_score="< .95", right_score=">= .95", source="Zimmermann et al. 2022, section 4")
    causes = ("zero_gradient", "saturated_loss", "flat_loss", "unmoved", "predicted_labels")
    settings: ClassVar[Mapping[str, Any]] = {"readout": "code"}
    notes = (
        "In the paper's test every value that an attack changes is set to epsilon or -epsilon afterwards, whatever it "
        "was, and the improved recipe is judged on a network without tanh; here candidates are judged as they are, on "
        "the decoder as it is."
    )

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        """See :meth:`CaseStudy.build`."""
        return nn.Sequential(BitFeatures(shape), Decoder(classes))

    def train(self, module: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int) -> None:
        """By the hinge loss of the raw bits, on images with noise and a little of another image."""
        features, decoder = _parts(module)
        decoder.words = code_words(len(decoder.words), generator=stream(seed, 0, "code words"))

        def loss(rows: Tensor) -> Tensor:
            x = inputs[rows]
            x = x + _NOISE * (x[torch.randperm(len(x))] - x) + _NOISE * torch.randn_like(x)
            bits = decoder.bits(features(x.clamp(0, 1)))
            return (1 - bits * decoder.words[labels[rows]]).clamp_min(0).mean()

        epochs = 12 if inputs[0].numel() < 200 else 6
        train_network(module, len(inputs), loss, epochs=epochs, batch_size=32)

    def measure(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, *, seed: int
    ) -> Measurement:
        """How often the cross-entropy has no gradient, between the predicted word and its opposite."""
        features, decoder = _parts(module)
        with torch.no_grad():
            bits = decoder.bits(features(inputs))
            correlations = torch.tanh(bits) @ decoder.words.mT
            predicted = decoder.words[correlations.argmax(1)]
            zeros = torch.zeros_like(labels)
            dead = correlations.topk(2).values[:, 1] <= 0
        with torch.enable_grad():
            towards = (bits * predicted).requires_grad_(True)
            pair = decoded(towards, torch.stack([torch.ones(BITS), -torch.ones(BITS)]).to(bits))
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(pair, zeros, reduction="sum"), towards)
        values = {
            "share of zero gradients": float((gradient == 0).all(1).double().mean()),
            "median correlation": float(correlations.amax(1).median()),
            "no other word correlates": float(dead.double().mean()),
        }
        words = (
            "the cross-entropy between the predicted word and its opposite, the two words of the test, has a gradient "
            f"of exactly 0 in float32 for at least {_SHARE:.0%} of images; it has where the correlation is above 16.8"
        )
        return Measurement(values=values, present=values["share of zero gradients"] >= _SHARE, words=words)

    def weak(self, threat_model: ThreatModel) -> Recipe:
        """PGD on the cross-entropy of the decoder's logits, with predicted labels."""
        return Recipe(
            attack=PredictedLabels(attack=ObjectivePGD(steps=200, rel_step_size=2 / 3)),
            words="PGD on the cross-entropy, 200 steps of two thirds of epsilon, with predicted labels, through a "
            "logarithm and a ReLU that leave no gradient",
        )

    def right(self, threat_model: ThreatModel) -> Recipe:
        """APGD on the margin of the correlations."""
        return Recipe(
            attack=ThroughCorrelations(attack=APGD(steps=100, loss="margin", restarts=3)),
            words="APGD on the margin of the plain correlations, 3 times 100 steps with true labels; the decoder "
            "judges as it is",
        )

    def parts(self, module: nn.Module) -> object:
        """Features of the bits and the decoder."""
        return _parts(module)


def _parts(module: nn.Module) -> tuple[nn.Module, Decoder]:
    features, decoder = cast(nn.Sequential, module)
    return features, cast(Decoder, decoder)
