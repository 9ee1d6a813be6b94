"""Detectors that compare inputs with references: trained on clean, noisy and adversarial inputs beside these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class
from robust_ext.core.random import seeded_globals
from robust_ext.core.validation import check_integer, check_labels
from robust_ext.detectors._features.regression import Regression
from robust_ext.detectors._features.three_sets import three_sets
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation
from robust_ext.detectors.training import TrainingSet


@module_class
class ReferenceDetector(Detector):
    """Logistic regression on features of inputs among references.

    Attributes:
        regression: On the features.
        scaling: Of the features, see ``Regression``.
    """

    supervised = True
    scaling: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.regression = Regression(scaling=self.scaling)

    @abstractmethod
    def features_of(self, observed: Observation) -> Tensor:
        """The features of a forward pass, ``(N, F)``, with gradients."""

    @abstractmethod
    def take_references(self, inputs: Tensor, labels: Tensor | None, *, batch_size: int, seed: int) -> None:
        """Keep what is needed of the references ``(R, ...)``, with their classes ``(R,)`` where these were given."""

    def reference_count(self, rows: int) -> tuple[int, int]:
        """How many references are enough beside so many training rows, and how many of these are set apart else."""
        return rows, rows // 2

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
        """Take the references, and fit the regression against clean and noisy inputs.

        Args:
            clean: Clean inputs ``(N, ...)``, floating point.
            adversarial: Adversarial ones ``(M, ...)``, made by whatever attack is to be told apart. Unless both
                ``references`` and ``noise`` are given, row i is made from clean row i.
            references: Training data ``(R, ...)`` without the clean inputs. Left out, some of the clean rows, drawn by
                the seed, become references, and neither they nor what was made from them is trained on: an input is
                nearer to its own clean twin than any later input is to a reference.
            labels: Classes of the references (of ``clean``, where these are left out), int64, for detectors that tell
                references apart by class. Without, the predicted classes.
            noise: Standard deviation of the Gaussian noise of the noisy inputs. Left out, their perturbations are as
                large as the adversarial ones, as root mean square.
            bounds: What noisy inputs are clipped to; None to leave them.
            folds: Of the cross-validation, at least 2.
            batch_size: Inputs in one pass.
            seed: Of the references, the noise and random features; global generators are left alone.

        Raises:
            InvalidArgumentError: These are no such tensors or settings.
            DataError: A class has no reference.
            MissingDependencyError: scikit-learn is not installed.
            ModelError: Features are not finite.
        """
        check_integer("batch_size", batch_size, minimum=1)
        rows = len(clean) if isinstance(clean, Tensor) and clean.dim() else 0
        sets = three_sets(
            clean,
            adversarial,
            references=references,
            apart=self.reference_count(rows)[1],
            noise=noise,
            bounds=bounds,
            folds=folds,
            seed=seed,
        )
        if labels is not None:
            labels = check_labels("labels", labels, samples=rows if references is None else len(references))
            labels = labels[sets.apart.to(labels.device)] if references is None else labels
        self.take_references(sets.references, labels, batch_size=batch_size, seed=seed)
        with seeded_globals(seed):
            parts = (sets.clean, sets.noisy, sets.adversarial)
            *negatives, positives = (torch.cat(self.over_batches(part, self.features_of, batch_size)) for part in parts)
            self.regression.fit(negatives, positives, folds=folds)

    def score_of(self, observed: Observation) -> Tensor:
        """The log-odds that the input is adversarial, ``(N,)``."""
        out: Tensor = self.regression(self.features_of(observed))
        return out

    def fit_to(self, data: TrainingSet, settings: Mapping[str, Any], *, seed: int) -> None:
        """Fit it on drawn rows, with the others as references if there are enough of them."""
        chosen, others = data.split(seed)
        wanted, apart = self.reference_count(len(chosen))
        enough, folds, apart = len(others) >= wanted, settings.get("folds", 5), max(apart, 1)
        if not enough and len(chosen) < apart + folds:
            smaller = ", or a smaller size" if "size" in self.settings else ""
            expected = (
                f"at least {folds} beside the references; give more training inputs, or others beside those with "
            )
            got = f"{len(chosen)} inputs to train on, of which {apart} become references"
            raise InvalidArgumentError("clean", got, f"{expected}adversarial ones{smaller}")
        self.fit(
            data.clean[chosen],
            data.adversarial_of(chosen, self.classifier),
            references=data.clean[others] if enough else None,
            labels=data.labels[others if enough else chosen],
            seed=seed,
            **settings,
        )
