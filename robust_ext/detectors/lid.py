"""LID: local intrinsic dimensionality in several layers.

Ma, Li, Wang, Erfani, Wijewickrema, Schoenebeck, Song, Houle, Bailey, "Characterizing Adversarial Subspaces Using Local
Intrinsic Dimensionality" (2018).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class
from robust_ext.core.random import stream
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_integer
from robust_ext.detectors._features.layers import activation_layers, check_names
from robust_ext.detectors._features.references import ReferenceDetector
from robust_ext.detectors.observation import Observation

# The estimate where all neighbours are equally far, which is infinite by the formula.
LARGEST = 1e4
# Distances below this share of a point's norm are rounding.
_ROUNDING = 1e-5
# Values of a layer that are compared at once.
_CHUNK = 8192


@module_class
class LIDDetector(ReferenceDetector):
    """Logistic regression on the local intrinsic dimensionality of several layers (Ma et al. 2018).

    One feature for the input and one for each named layer: the estimate :func:`local_dimension` among reference
    inputs, of flattened activations. Features are moved to [0, 1]. The score is the regression's log-odds: above 0
    where an input is likelier adversarial.

    References are one fixed set of training data, of which ``size`` are drawn by the seed. The authors' code takes the
    minibatch at hand, in which every noisy or adversarial input meets its own clean twin: the distance to the twin
    then separates the kinds, which no defender has, and scores depend on the batch.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits", split="train").take(range(300))
        >>> detector = LIDDetector(digits_network(), layers=["1", "3", "6", "7"])
        >>> detector.fit(clean, 1 - clean)
        >>> bool(detector.score(1 - clean).mean() > detector.score(clean).mean())
        True
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"mnist": {"neighbours": 20}, "cifar10": {"neighbours": 30}}
    scaling = "minmax"

    layers: Sequence[str] = setting(
        help="Names of layers in addition to the input, as in ``classifier.named_modules()``; the authors take all.",
        check=check_names,
    )
    neighbours: int = setting(
        default=20, help="Number of neighbours, at least 2: 20 for MNIST, 30 for CIFAR-10.", minimum=2
    )
    size: int = setting(
        default=100,
        help="How many references, more than ``neighbours``; the authors' minibatches have 100 inputs.",
        minimum=2,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("size", self.size, minimum=self.neighbours + 1)
        for position in range(len(self.layers) + 1):
            self.register_buffer(f"references_{position}", torch.empty(0))

    @classmethod
    def training_settings(
        cls, classifier: nn.Module, clean: Tensor, constants: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """All layers that describe an input, unless some are given."""
        if "layers" not in given:
            given = {**given, "layers": activation_layers(classifier, clean[:2].to(module_device(classifier)))}
        return {**constants, **given}

    def reference_count(self, rows: int) -> tuple[int, int]:
        """Return the number of references that the detector keeps."""
        return self.size, self.size

    def take_references(self, inputs: Tensor, labels: Tensor | None, *, batch_size: int, seed: int) -> None:
        """Keep the activations of some references."""
        if len(inputs) < self.size:
            expected = f"at least size = {self.size} clean inputs"
            raise InvalidArgumentError("references", f"{len(inputs)} inputs", expected)
        order = torch.randperm(len(inputs), generator=stream(seed, "references"))[: self.size]
        passes = self.over_batches(inputs[order.to(inputs.device)], self._activations, batch_size)
        for position, found in enumerate(zip(*passes, strict=True)):
            setattr(self, f"references_{position}", torch.cat(found))

    def features_of(self, observed: Observation) -> Tensor:
        """The estimates of a forward pass, ``(N, 1 + layers)``, the input first, with gradients."""
        features = []
        for position, points in enumerate(self._activations(observed)):
            references: Tensor = getattr(self, f"references_{position}")
            self.check_fitted(references.numel())
            name = f"layer {self.layers[position - 1]!r}" if position else "the input"
            self.check_same(references.shape[1], points.shape[1], f"values of {name}")
            features.append(local_dimension(points, references, neighbours=self.neighbours))
        return torch.stack(features, 1)

    def _activations(self, observed: Observation) -> list[Tensor]:
        return [observed.inputs.flatten(1), *(observed.units(name, pool=False) for name in self.layers)]


def local_dimension(points: Tensor, references: Tensor, *, neighbours: int) -> Tensor:
    """Local intrinsic dimensionality of points ``(N, F)`` among references ``(R, F)``, with gradients for the points.

    With ``r_1 <= ... <= r_k`` the distances to the k nearest references, it is ``-k / sum_j log(r_j / r_k)``
    (Amsaleg et al. 2015; Ma et al. 2018, equation 4). A reference at no distance, up to rounding, is the point itself,
    and not one of its neighbours. Where fewer than k others are left, k is their number. Estimates ``(N,)`` are in
    [0, 10000]: 0 where fewer than two references are elsewhere, at most 10000 where all neighbours are equally far.
    """
    distances = _distances(points, references)
    itself = distances <= _ROUNDING * points.detach().norm(dim=1, keepdim=True)
    nearest = distances.masked_fill(itself, torch.inf).topk(neighbours, dim=1, largest=False).values
    count = (~itself).sum(1).clamp_max(neighbours)
    there = torch.arange(neighbours, device=points.device) < count[:, None]
    # Absent neighbours are taken out before the logarithm, whose gradient they would make NaN.
    nearest = torch.where(there, nearest, torch.ones_like(nearest))
    farthest = nearest.gather(1, (count - 1).clamp_min(0)[:, None])
    logs = torch.where(there, (nearest / farthest).log(), torch.zeros_like(nearest)).sum(1)
    found = count / (-logs).clamp_min(count.clamp_min(1).to(logs) / LARGEST)
    return torch.where(count > 1, found, torch.zeros_like(found))


def _distances(points: Tensor, references: Tensor) -> Tensor:
    """Euclidean distances ``(N, R)``, with gradients for the points; that of a distance of 0 is 0.

    Those of float32 are products of matrices in float64, which take a tenth of the time and are as exact down to
    distances that count as rounding; others are taken directly.
    """
    if points.dtype != torch.float32:
        return torch.cdist(points, references, compute_mode="donot_use_mm_for_euclid_dist")
    squares = points.new_zeros(len(points), len(references), dtype=torch.float64)
    for x, r in zip(torch.split(points, _CHUNK, 1), torch.split(references, _CHUNK, 1), strict=True):
        x, r = x.double(), r.double()
        squares = squares + x.square().sum(1, keepdim=True) + r.square().sum(1) - 2 * x @ r.mT
    apart = squares > 0
    return torch.where(apart, squares.where(apart, 1).sqrt(), 0).to(points.dtype)
