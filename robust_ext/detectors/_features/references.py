"""Detectors that compare inputs with references: trained on clean, noisy and adversarial inputs next to these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.validation import check_bounds, check_inputs, check_integer, check_labels, check_number
from robust_ext.detectors._features.regression import RegressionDetector
from robust_ext.detectors.training import ANY, TrainingSet, check_kinds

# Rows from which the size of the noise is taken.
_ROWS = 1000


@module_class
class ReferenceDetector(RegressionDetector):
    """Logistic regression on features of inputs among references."""

    @abstractmethod
    def take_references(self, inputs: Tensor, labels: Tensor | None, *, batch_size: int, seed: int) -> None:
        """Keep the needed part of the references ``(R, ...)``, with their classes ``(R,)`` where these were given."""

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
        """Take the references, and fit the regression against clean and noisy inputs; see :class:`Detector`.

        Args:
            clean: Clean inputs.
            adversarial: Adversarial ones. Unless both ``references`` and ``noise`` are given, row i is made from clean
                row i.
            references: Training data ``(R, ...)`` without the clean inputs. Left out, some of the clean rows, drawn by
                the seed, become references, and neither they nor what was made from them is trained on: an input is
                nearer to its own clean twin than any later input is to a reference.
            labels: Classes of the references (of ``clean``, where these are left out), int64, for detectors that tell
                references apart by class (DataError: one has none). Without, the predicted classes.
            noise: Standard deviation of the Gaussian noise of the noisy inputs. Left out, their perturbations are as
                large as the adversarial ones, as root mean square.
            bounds: What noisy inputs are clipped to; None to leave them.
            folds: Of the cross-validation, at least 2.
            batch_size: Inputs in one pass.
            seed: Of the references, the noise and random features.
        """
        check_integer("batch_size", batch_size, minimum=1)
        rows = len(clean) if isinstance(clean, Tensor) and clean.dim() else 0
        given = {"references": references, "noise": noise, "bounds": bounds, "folds": folds, "seed": seed}
        sets = three_sets(clean, adversarial, apart=self.reference_count(rows)[1], **given)
        if labels is not None:
            labels = check_labels("labels", labels, samples=rows if references is None else len(references))
            labels = labels[sets.apart.to(labels.device)] if references is None else labels
        self.take_references(sets.references, labels, batch_size=batch_size, seed=seed)
        with seeded_globals(seed):
            parts = (sets.clean, sets.noisy, sets.adversarial)
            *negatives, positives = (torch.cat(self.over_batches(part, self.features_of, batch_size)) for part in parts)
            self.regression.fit(negatives, positives, folds=folds)

    def fit_to(self, data: TrainingSet, settings: Mapping[str, Any], *, seed: int) -> None:
        """Fit it on drawn rows, with the others as references if there are enough of them."""
        chosen, others = data.split(seed)
        wanted, apart = self.reference_count(len(chosen))
        enough, folds, apart = len(others) >= wanted, settings.get("folds", 5), max(apart, 1)
        if not enough and len(chosen) < apart + folds:
            smaller = ", or a smaller size" if "size" in self.settings else ""
            got = f"{len(chosen)} inputs to train on, of which {apart} become references"
            more = "give more training inputs, or others beside those with adversarial ones"
            raise InvalidArgumentError("clean", got, f"at least {folds} beside the references; {more}{smaller}")
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
    references: Any,
    apart: int,
    noise: Any,
    bounds: Any,
    folds: Any,
    seed: Any,
) -> ThreeSets:
    """Check the inputs of a fit, set references apart and add noise; see ``ReferenceDetector.fit``.

    Without references ``apart`` rows of ``clean`` are drawn; of each kind ``folds`` inputs are needed at least.
    """
    check_integer("folds", folds, minimum=2)
    check_integer("seed", seed, minimum=0)
    clip = ANY if bounds is None else check_bounds(bounds)
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
        order = torch.randperm(len(clean), generator=stream(seed, "references"))
        chosen, rest = order[:apart].sort().values, order[apart:].sort().values
        if len(rest) < folds or not len(chosen):
            least = max(apart, 1)
            expected = f"at least {least + folds}, of which {least} become references; or give references"
            raise InvalidArgumentError("clean", f"{len(clean)} inputs", expected)
        references, clean, adversarial = clean[chosen], clean[rest], adversarial[rest]
    clean, adversarial = check_kinds(clean, adversarial, fewest=folds, reason="folds = ")
    draw = torch.randn(clean.shape, generator=stream(seed, "noise")).to(clean.device)
    if noise is None:
        noise = _matched(clean[:_ROWS], adversarial[:_ROWS], draw[:_ROWS], clip)
    check_number("noise", noise, minimum=0)
    return ThreeSets(references, clean, (clean + noise * draw).clamp(*clip), adversarial, chosen, noise)


def _matched(clean: Tensor, adversarial: Tensor, draw: Tensor, bounds: tuple[float, float]) -> float:
    """The standard deviation at which clipped noise is as large as the perturbations."""

    def size(moved: Tensor) -> float:
        return float((moved.clamp(*bounds) - clean).double().square().mean().sqrt())

    wanted = float((adversarial - clean).double().square().mean().sqrt())
    if bounds == ANY or not wanted:
        return wanted
    low, high = 0.0, wanted
    # Beyond the width of the bounds more noise hardly adds anything.
    while size(clean + high * draw) < wanted and high < bounds[1] - bounds[0]:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if size(clean + middle * draw) < wanted else (low, middle)
    return high
