"""DLA: a small network that separates clean activations from adversarial ones.

Sperl, Kao, Chen, Lei, Böttinger, "DLA: Dense-Layer-Analysis for Adversarial Example Detection" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from robust_ext.core.modules import module_class
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import setting
from robust_ext.detectors._features.layers import check_names
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation
from robust_ext.detectors.training import check_kinds, check_training, minimise


@module_class
class DLADetector(Detector):
    """A multilayer perceptron on dense activations, trained on clean and adversarial inputs (Sperl et al. 2019).

    Its inputs are the outputs of the named layers, flattened, and the logits. For the network of the binarization paper
    (512 penultimate units, 10 classes) its sizes are 522-100-50-10-1, with SELU between; the score is its output before
    the sigmoid: above 0 where it classifies an input as adversarial.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits", split="train").take(range(100))
        >>> detector = DLADetector(digits_network(), layers=["6"])
        >>> losses = detector.fit(clean, 1 - clean, epochs=20)
        >>> bool(detector.score(1 - clean).mean() > detector.score(clean).mean())
        True
    """

    supervised = True

    layers: Sequence[str] = setting(
        help="Names of the layers whose activations it takes in addition to the logits, as in "
        "``classifier.named_modules()``: the activation before the last linear layer, or those of all dense layers.",
        check=check_names,
    )
    widths: Sequence[int] = setting(default=(100, 50, 10), help="Sizes of its hidden layers.", minimum=1)
    features: int | None = setting(default=None, help="How many values it takes; :meth:`fit` finds out.", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alarm = nn.Sequential() if self.features is None else self._make(self.features)

    def fit(
        self,
        clean: Tensor,
        adversarial: Tensor,
        *,
        epochs: int = 50,
        learning_rate: float = 1e-3,
        batch_size: int = 100,
        seed: int = 0,
    ) -> list[float]:
        """Train by Adam on the binary cross-entropy, in which clean and adversarial inputs weigh the same in total.

        See :class:`Detector` for the arguments; ``epochs`` are passes over the data. Returns the mean loss of each
        epoch.
        """
        check_training(epochs, batch_size, learning_rate, seed)
        kinds = check_kinds(clean, adversarial)
        parts = [torch.cat(self.over_batches(kind, self._activations, batch_size)) for kind in kinds]
        rows = torch.cat(parts)
        if not bool(torch.isfinite(rows).all()):
            raise self.error("activations of the training inputs are not finite")
        targets = torch.cat([torch.full((len(part),), float(kind)) for kind, part in enumerate(parts)]).to(rows.device)
        balance = torch.tensor(len(parts[0]) / len(parts[1]), device=rows.device)
        with seeded_globals(seed), torch.enable_grad():
            alarm = self._make(rows.shape[1]).to(rows.device).requires_grad_(True)

            def loss(step: Tensor) -> tuple[Tensor, Tensor]:
                found = nn.functional.binary_cross_entropy_with_logits(
                    alarm(rows[step]).squeeze(1), targets[step], pos_weight=balance
                )
                return found, found

            losses = minimise(alarm, loss, len(rows), epochs, batch_size, learning_rate)
        self.features = rows.shape[1]
        self.alarm = alarm.requires_grad_(False)
        return losses

    def score_of(self, observed: Observation) -> Tensor:
        """The network's output, ``(N,)``."""
        self.check_fitted(len(self.alarm))
        out: Tensor = self.alarm(self._activations(observed))
        return out.squeeze(1)

    def _activations(self, observed: Observation) -> Tensor:
        return torch.cat([*(observed.layers[name].flatten(1) for name in self.layers), observed.logits], 1)

    def _make(self, features: int) -> nn.Sequential:
        sizes = (features, *self.widths)
        hidden = [part for before, after in pairwise(sizes) for part in (nn.Linear(before, after), nn.SELU())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], 1)).eval().requires_grad_(False)
