"""KD-BU: kernel density in feature space and uncertainty under dropout.

Feinman, Curtin, Shintre, Gardner, "Detecting Adversarial Samples from Artifacts" (2017).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_integer, check_labels, check_number
from robust_ext.detectors._features.density import log_density
from robust_ext.detectors._features.dropout import dropout_layers, dropout_variance
from robust_ext.detectors._features.regression import Regression
from robust_ext.detectors._features.three_sets import three_sets
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation, observe
from robust_ext.models.features import LayerInput, split

logger = logging.getLogger(__name__)


class KDBUDetector(Detector):
    """Logistic regression on a kernel density and a dropout variance (Feinman et al. 2017).

    Two features: the log density of a hidden layer under a Gaussian kernel density of training data of the predicted
    class, and the variance of the predicted probabilities over passes with dropout, averaged over classes. Both are
    standardised. The score is the regression's log-odds: above 0 where it holds an input for adversarial.

    Only dropout modules are switched on for these passes, never batch normalisation. A network without dropout modules
    has a variance of 0 for every input, so that the density decides alone; :meth:`fit` logs a warning then.

    Args:
        classifier: The network it watches.
        layer: Name of the layer whose output is the hidden layer. Left out, it is what enters the last linear layer, at
            the cost of one more forward pass.
        bandwidth: Of the kernel: 1.2 for MNIST, 0.26 for CIFAR-10.
        passes: With dropout, at least 2.
        chunk: References compared at once.

    Attributes:
        references: Hidden layers of the training data, ``(R, F)``; empty until fitted.
        owners: The classes they belong to, int64 ``(R,)``, in increasing order.
        regression: On the log density and the variance.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> clean, _ = load_dataset("digits", split="train").take(range(300))
        >>> detector = KDBUDetector(digits_network(), bandwidth=1.2)
        >>> detector.fit(clean, 1 - clean)
        >>> bool(detector.score(1 - clean).mean() > detector.score(clean).mean())
        True
    """

    references: Tensor
    owners: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        *,
        layer: str | None = None,
        bandwidth: float = 1.2,
        passes: int = 50,
        chunk: int = 4096,
    ) -> None:
        super().__init__(classifier)
        linear = [name for name, part in classifier.named_modules() if isinstance(part, nn.Linear)]
        if layer is None and not linear:
            raise InvalidArgumentError("layer", layer, "the name of a layer, as the classifier has no nn.Linear")
        if layer is not None and not isinstance(layer, str):
            raise InvalidArgumentError("layer", layer, "the name of a layer, or None")
        self.layer = layer
        self.layers = () if layer is None else (layer,)
        self.readout = linear[-1] if layer is None else None
        self.bandwidth = check_number("bandwidth", bandwidth, minimum=0, open_minimum=True)
        self.passes = check_integer("passes", passes, minimum=2)
        self.chunk = check_integer("chunk", chunk, minimum=1)
        self.random = bool(dropout_layers(classifier))
        self.register_buffer("references", torch.empty(0))
        self.register_buffer("owners", torch.empty(0, dtype=torch.int64))
        self.regression = Regression()

    @property
    def settings(self) -> dict[str, Any]:
        """What the constructor was given."""
        return {"layer": self.layer, "bandwidth": self.bandwidth, "passes": self.passes, "chunk": self.chunk}

    def fit(
        self,
        clean: Tensor,
        adversarial: Tensor,
        *,
        references: Tensor | None = None,
        labels: Tensor | None = None,
        noise: float | None = None,
        bounds: Sequence[float] | None = (0.0, 1.0),
        folds: int = 5,
        batch_size: int = 256,
        seed: int = 0,
    ) -> None:
        """Take the density of training data, and fit the regression against clean and noisy inputs.

        Args:
            clean: Clean inputs ``(N, ...)``, floating point.
            adversarial: Adversarial ones ``(M, ...)``, made by whatever attack is to be told apart. Unless both
                ``references`` and ``noise`` are given, row i is made from clean row i.
            references: Training data of the density ``(R, ...)``, without the clean inputs. Left out, half of the clean
                rows, drawn by the seed, become references, and neither they nor what was made from them is trained on:
                an input lies on the peak of its own kernel, where no later input lies.
            labels: Classes of the references (of ``clean``, where these are left out), int64. Without, the predicted
                classes.
            noise: Standard deviation of the Gaussian noise of the noisy inputs. Left out, their perturbations are as
                large as the adversarial ones, as root mean square.
            bounds: What noisy inputs are clipped to; None to leave them.
            folds: Of the cross-validation, at least 2.
            batch_size: Inputs in one pass.
            seed: Of the rows, the noise and the dropout; global generators are left alone.

        Raises:
            InvalidArgumentError: These are no such tensors or settings.
            DataError: A class has no reference.
            MissingDependencyError: scikit-learn is not installed.
            ModelError: Features are not finite.
            SplitError: The last linear layer does not make the logits; name a layer.
        """
        check_integer("batch_size", batch_size, minimum=1)
        sets = three_sets(
            clean,
            adversarial,
            references=references,
            apart=len(clean) // 2 if isinstance(clean, Tensor) and clean.dim() else 0,
            noise=noise,
            bounds=bounds,
            folds=folds,
            seed=seed,
        )
        if labels is not None:
            own = check_labels("labels", labels, samples=len(clean if references is None else references))
            labels = own[sets.apart.to(own.device)] if references is None else own
        if not self.random:
            logger.warning(
                "detector KDBUDetector: the classifier has no dropout modules, so that its uncertainty is 0 for every "
                "input; the kernel density decides alone"
            )
        if self.readout is not None:
            split(self.classifier, sets.references[:2].to(module_device(self.classifier)), layer=self.readout)
        self._take_references(sets.references, labels, batch_size)
        with seeded_globals(seed):
            noisy_and_clean = [self._features_of_all(part, batch_size) for part in (sets.clean, sets.noisy)]
            self.regression.fit(noisy_and_clean, self._features_of_all(sets.adversarial, batch_size), folds=folds)

    def features_of(self, seen: Observation) -> Tensor:
        """Log density and dropout variance of a forward pass, ``(N, 2)``, with gradients; further passes are made."""
        variance = dropout_variance(self.classifier, seen.inputs, passes=self.passes)
        return torch.stack([self.density_of(seen), variance], 1)

    def density_of(self, seen: Observation) -> Tensor:
        """Log density of the hidden layer among references of the predicted class, ``(N,)``, with gradients.

        Raises:
            ModelError: The detector is not fitted, or to another network or another layer.
        """
        if not self.references.numel():
            raise ModelError("detector KDBUDetector: is not fitted; call fit(clean_inputs, adversarial_inputs) first")
        hidden = self._hidden(seen)
        groups = torch.split(self.references, torch.bincount(self.owners).tolist())
        if hidden.shape[1] != self.references.shape[1] or len(groups) != seen.logits.shape[1]:
            raise ModelError(
                f"detector KDBUDetector: was fitted to {self.references.shape[1]} units and {len(groups)} classes and "
                f"meets {hidden.shape[1]} and {seen.logits.shape[1]}; fit it to this classifier"
            )
        predicted = seen.predicted
        densities = hidden.new_zeros(len(hidden))
        for label in sorted(set(predicted.tolist())):
            rows = (predicted == label).nonzero().squeeze(1)
            found = log_density(hidden[rows], groups[label], bandwidth=self.bandwidth, chunk=self.chunk)
            densities = densities.index_put((rows,), found)
        return densities

    def score_of(self, seen: Observation) -> Tensor:
        """The log-odds that the input is adversarial, ``(N,)``.

        Raises:
            ModelError: The detector is not fitted, or to another network.
        """
        out: Tensor = self.regression(self.features_of(seen))
        return out

    def _hidden(self, seen: Observation) -> Tensor:
        if self.readout is None:
            return seen.layers[self.layers[0]].flatten(1)
        hidden: Tensor = LayerInput(self.classifier, self.readout)(seen.inputs)
        return hidden.flatten(1)

    def _take_references(self, inputs: Tensor, labels: Tensor | None, batch_size: int) -> None:
        hidden, owners, classes = [], [], 0
        device = module_device(self.classifier)
        with torch.no_grad():
            for batch in torch.split(inputs, batch_size):
                seen = observe(self.classifier, batch.to(device), self.layers)
                hidden.append(self._hidden(seen))
                owners.append(seen.predicted)
                classes = seen.logits.shape[1]
        found = torch.cat(owners)
        if labels is not None:
            found = check_labels("labels", labels, samples=len(found), classes=classes).to(found.device)
        counts = torch.bincount(found, minlength=classes)
        if not bool(counts.all()):
            empty = ", ".join(map(str, (counts == 0).nonzero().flatten().tolist()))
            raise DataError(f"references: none of class {empty}; give more clean inputs, of every class")
        self.owners, order = found.sort(stable=True)
        self.references = torch.cat(hidden)[order]

    def _features_of_all(self, inputs: Tensor, batch_size: int) -> Tensor:
        device = module_device(self.classifier)
        with torch.no_grad():
            parts = torch.split(inputs, batch_size)
            return torch.cat([self.features_of(observe(self.classifier, x.to(device), self.layers)) for x in parts])
