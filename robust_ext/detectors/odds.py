"""Odds: how the logits move under random noise, against how they move on clean data.

Roth, Kilcher, Hofmann, "The Odds are Odd: A Statistical Test for Detecting Adversarial Examples" (2019); what the
paper leaves open (clipping, which data make the statistics) follows the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.modules import buffer, module_class
from robust_ext.core.settings import setting
from robust_ext.core.validation import check_bounds, check_choice, check_inputs, check_labels, check_number
from robust_ext.detectors.base import Detector, check_clean
from robust_ext.detectors.observation import Observation, repeatable
from robust_ext.detectors.training import ANY

KINDS = ("normal", "sign", "uniform")
NOISES = tuple((kind, level) for level in (0.003, 0.005, 0.008) for kind in KINDS)
# Below three inputs a standard deviation means nothing; the authors' code skips such classes.
_FEWEST = 3


def _check_noises(noises: Any) -> tuple[tuple[str, float], ...]:
    pairs = list(noises) if isinstance(noises, (list, tuple)) else []
    if not pairs or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise InvalidArgumentError("noises", noises, "pairs (kind, level), as in [('normal', 0.1), ('sign', 0.005)]")
    return tuple(
        (check_choice("noises", kind, KINDS), check_number("noises", level, minimum=0, open_minimum=True))
        for kind, level in pairs
    )


@module_class
class OddsDetector(Detector):
    """The largest standardised change of a log-odds under noise (Roth et al. 2019).

    With f the logits and y the predicted class, ``g_z = (f_z - f_y)(x + noise) - (f_z - f_y)(x)``; for a linear
    readout that is ``(w_z - w_y) . (phi(x + noise) - phi(x))``. The mean of g_z over the draws is standardised by its
    mean and standard deviation on clean data, for each (y, z, noise); the score is the maximum over z other than y of
    the average over noises. Noise moves adversarial examples back towards their own class more than it moves clean
    inputs anywhere. The authors flag scores above 3.09: ``detector.threshold = torch.tensor(3.09)``.

    As in the authors' code noisy inputs are clipped to the bounds and each input has draws of its own. Inputs are
    treated one after the other, so under one seed of torch's global generator the scores do not depend on how a data
    set is cut into batches. Gradients flow through the noisy passes and the clean one; where they need several passes,
    a pass is repeated on the way back with the same noise, so that memory stays that of one.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> inputs, _ = load_dataset("digits", split="train").take(range(300))
        >>> detector = OddsDetector(digits_network(), noises=[("normal", 0.1)], draws=8)
        >>> detector.fit(inputs)
        >>> detector.score(inputs[:4]).shape
        torch.Size([4])
    """

    random = True

    noises: Sequence[Sequence[Any]] = setting(
        default=NOISES,
        help='Pairs (kind, level), in units of the bounds\' width: ``"normal"``: the level is the standard deviation; '
        '``"sign"``: each value moves by the level up or down; ``"uniform"``: by at most the level. The binarization '
        'paper also uses ``[("normal", 30 / 255)]``.',
        check=_check_noises,
    )
    draws: int = setting(default=256, help="Noisy copies of an input for each noise, at least 1.", minimum=1)
    bounds: tuple[float, float] | None = setting(
        default=(0.0, 1.0), help="Bounds to which noisy inputs are clipped; None for no clipping.", check=check_bounds
    )
    batch_size: int = setting(default=2048, help="Most noisy inputs in one pass.", minimum=1)
    means: Tensor = buffer("Clean means by (y, noise, z), ``(K, noises, K)``; empty until fitted.")
    deviations: Tensor = buffer("Clean standard deviations, alike.")

    def fit(self, inputs: Tensor, labels: Tensor | None = None) -> None:
        """Take the statistics of clean training data, by predicted class; randomness is torch's global.

        See :class:`Detector`; the paper uses 10,000 inputs. With ``labels``, int64 ``(N,)``, only inputs that are
        classified correctly count. DataError: fewer than three inputs are of some predicted class. ModelError: the
        statistics of a class are not finite, or do not vary.
        """
        inputs = check_inputs("inputs", inputs, bounds=self.bounds or ANY)
        check_clean(inputs, self.batch_size)
        if labels is not None:
            labels = check_labels("labels", labels, samples=len(inputs))
        size = min(self.batch_size, 256)
        passes = self.over_batches(inputs, lambda one: (self._changes(one), one.predicted), size)
        changes, classes = (torch.cat(part) for part in zip(*passes, strict=True))
        if labels is not None:
            right = classes == labels.to(classes.device)
            changes, classes = changes[right], classes[right]
        self.means, self.deviations = _statistics(changes, classes)

    def score_of(self, observed: Observation) -> Tensor:
        """The largest standardised statistic, ``(N,)``."""
        self.check_fitted(self.means.numel(), on="clean_training_inputs")
        classes = observed.logits.shape[1]
        self.check_same(len(self.means), classes, "classes")
        y = observed.predicted
        standardised = (self._changes(observed) - self.means[y]) / self.deviations[y]
        own = nn.functional.one_hot(y, classes).bool()
        return standardised.mean(1).masked_fill(own, -torch.inf).amax(1)

    def _changes(self, observed: Observation) -> Tensor:
        """g_z averaged over draws, ``(N, noises, K)``."""
        x, logits = observed.inputs, observed.logits
        work = [(row, noise) for row in range(len(x)) for noise in range(len(self.noises))]
        size = max(1, self.batch_size // self.draws)
        parts = [work[start : start + size] for start in range(0, len(work), size)]
        several = len(parts) > 1 and torch.is_grad_enabled()
        # Draws inside are repeated on the way back: the generator's state is kept, not the noise.
        means = [
            repeatable(several, self._average, x[[row for row, _ in part]], [noise for _, noise in part])
            for part in parts
        ]
        noisy = torch.cat(means or [logits[:0]]).view(len(x), len(self.noises), logits.shape[1])
        moved = noisy - logits[:, None]
        return moved - moved.gather(2, observed.predicted.view(-1, 1, 1).expand(-1, moved.shape[1], 1))

    def _average(self, rows: Tensor, which: list[int]) -> Tensor:
        """Logits of each row under its noise, averaged over draws, ``(n, K)``."""
        # One draw call for each row and noise: torch's draws of a whole tensor depend on how many rows it has.
        noise = torch.stack([self._draw(row, *self.noises[index]) for row, index in zip(rows, which, strict=True)])
        low, high = self.bounds or ANY
        noisy = (rows[:, None] + noise * (high - low if self.bounds else 1)).clamp(low, high)
        passes = [self.classifier(part) for part in torch.split(noisy.flatten(0, 1), self.batch_size)]
        return torch.cat(passes).view(len(rows), self.draws, -1).mean(1)

    def _draw(self, like: Tensor, kind: str, level: float) -> Tensor:
        noise = torch.empty((self.draws, *like.shape), dtype=like.dtype, device=like.device)
        if kind == "normal":
            return noise.normal_().mul_(level)
        if kind == "sign":
            return noise.bernoulli_(0.5).mul_(2 * level).sub_(level)
        return noise.uniform_(-level, level)


def _statistics(changes: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of g_z by (y, noise, z), as float32; on the diagonal 0 and 1."""
    classes = changes.shape[2]
    counts = torch.bincount(predicted, minlength=classes)
    few = [f"{label} ({int(counts[label])})" for label in range(classes) if counts[label] < _FEWEST]
    if few:
        raise DataError(
            f"inputs: predicted classes with fewer than {_FEWEST} clean inputs: {', '.join(few)}; give more inputs, "
            "of every class"
        )
    own = torch.eye(classes, dtype=torch.bool, device=changes.device)[:, None]
    groups = [changes[predicted == label].double() for label in range(classes)]
    means = torch.stack([group.mean(0) for group in groups]).masked_fill(own, 0)
    deviations = torch.stack([group.std(0, correction=0) for group in groups]).masked_fill(own, 1)
    bad = ~(torch.isfinite(means) & torch.isfinite(deviations) & (deviations > 0)).flatten(1).all(1)
    if bool(bad.any()):
        shown = ", ".join(map(str, bad.nonzero().flatten().tolist()))
        raise ModelError(
            f"detector OddsDetector: under noise the logits of clean inputs of predicted class {shown} are not finite, "
            "or all change alike; give more inputs, or stronger noise"
        )
    return means.float(), deviations.float()
