"""Detectors that compare inputs with references: trained on clean, noisy and adversarial inputs next to these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.validation import check_bounds, check_inputs, check_integer, check_labels, check_number
from robust_ext.detectors._features.regression import Regression
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation
from robust_ext.detectors.training import ANY, TrainingSet, check_kinds

# Rows from which the size of the noise is taken.
_ROWS = 1000


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
        """Return the number of references needed, and of training rows to set apart where they are fewer."""
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
            adversarial: Adversarial ones ``(M, ...)``, made by the attacks to detect. Unless both
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


@dataclass(frozen=True)
class ThreeSets:
    """The training data of a detector: inputs ``(R, ...)``, ``(N, ...)``, ``(N, ...)`` and ``(M, ...)``.

    No reference is in ``clean``. ``apart`` holds the rows of the given clean inputs that became references (empty where
    references were given), ``noise`` the standard deviation of the noise before clipping.
    """

    references: Tensor
    clean: Tensor
    noisy: Tensor
    adversarial: Tensor
    apart: Tensor
    noise: float


def three_sets(
    clean: Tensor,
    adversarial: Tensor,
    *,
    references: Tensor | None,
    apart: int,
    noise: float | None,
    bounds: Sequence[float] | None,
    folds: int,
    seed: int,
) -> ThreeSets:
    """Check the inputs of a fit, set references apart and add noise; see ``ReferenceDetector.fit``.

    Without references ``apart`` rows of ``clean`` are drawn; of each kind ``folds`` inputs are needed at least.
    """
    check_integer("folds", folds, minimum=2)
    check_integer("seed", seed, minimum=0)
    clip = None if bounds is None else check_bounds(bounds)
    clean, adversarial = check_kinds(clean, adversarial, fewest=0)
    if clean.shape != adversarial.shape and (references is None or noise is None):
        got = f"shape {tuple(adversarial.shape)} beside clean inputs {tuple(clean.shape)}"
        expected = "one for each clean input, in order; or references and noise as well"
        raise InvalidArgumentError("adversarial", got, expected)
    chosen = torch.empty(0, dtype=torch.int64)
    if references is not None:
        references = check_inputs("references", references, bounds=ANY)
        if not len(references):
            raise InvalidArgumentError("references", "no references", "a tensor of at least one clean input")
    else:
        chosen, rest = _set_apart(len(clean), apart, folds, seed)
        references, clean, adversarial = clean[chosen], clean[rest], adversarial[rest]
    clean, adversarial = check_kinds(clean, adversarial, fewest=folds, reason="folds = ")
    draw = torch.randn(clean.shape, generator=stream(seed, "noise")).to(clean.device)
    if noise is None:
        noise = _matched(clean, adversarial, draw, clip)
    check_number("noise", noise, minimum=0)
    noisy = _noisy(clean, draw, noise, clip)
    return ThreeSets(references, clean, noisy, adversarial, chosen, noise)


def _set_apart(count: int, apart: int, folds: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that become references and rows that are trained on, of ``count`` clean ones."""
    order = torch.randperm(count, generator=stream(seed, "references"))
    chosen, rest = order[:apart].sort().values, order[apart:].sort().values
    if len(rest) < folds or not len(chosen):
        least = max(apart, 1)
        expected = f"at least {least + folds}, of which {least} become references; or give references"
        raise InvalidArgumentError("clean", f"{count} inputs", expected)
    return chosen, rest


def _noisy(clean: Tensor, draw: Tensor, noise: float, bounds: tuple[float, float] | None) -> Tensor:
    moved = clean + noise * draw
    return moved if bounds is None else moved.clamp(*bounds)


def _matched(clean: Tensor, adversarial: Tensor, draw: Tensor, bounds: tuple[float, float] | None) -> float:
    """The standard deviation at which clipped noise is as large as the perturbations."""
    clean, draw = clean[:_ROWS], draw[:_ROWS]
    wanted = float((adversarial[:_ROWS] - clean).double().square().mean().sqrt())
    if bounds is None or not wanted:
        return wanted

    def size(noise: float) -> float:
        return float((_noisy(clean, draw, noise, bounds) - clean).double().square().mean().sqrt())

    low, high = 0.0, wanted
    # Beyond the width of the bounds more noise hardly adds anything.
    while size(high) < wanted and high < bounds[1] - bounds[0]:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) < wanted else (low, middle)
    return high
