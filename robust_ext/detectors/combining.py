"""One score out of those of several detectors: places among clean scores, and their mean, maximum or mixture.

Scores of different detectors have different scales. Each therefore becomes its rank among the scores of clean inputs, a
number in [0, 1], and the ranks are combined input by input.

Source of the mixture: Granese, Romanelli, Piantanida, "Optimal Zero-Shot Detector for Multi-Armed Attacks" (2024;
first as "A Minimax Approach Against Multi-Armed Adversarial Attacks Detection"), with ranks for the detectors'
probabilities, as most detectors give none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_choice

METHODS = ("mean", "max", "mixture")

Floats = NDArray[np.float64]

# Below it two terms of a series are exact in float64, and the gradient of the formula loses half of its digits.
_SMALL = 1e-8
_BELOW_ONE = 1 - 2.0**-53


def combine(scores: ArrayLike, clean: Sequence[ArrayLike], *, method: str) -> Floats:
    """One score an input out of those of K detectors, ``(K, ...)``, by their ranks among clean scores ``(n,)`` of each.

    Combined by :func:`combine_ranks`: float64 in [0, 1], ``(...)``. An input that one detector scores NaN gets NaN.
    InvalidArgumentError: these are no such numbers, or there is no such method.

    Example:
        >>> clean = [[0.0, 1.0, 2.0], [10.0, 20.0, 30.0]]
        >>> combine([[1.0, 2.0], [20.0, 20.0]], clean, method="mean").round(3).tolist()
        [0.5, 0.667]
    """
    check_choice("method", method, METHODS)
    found = _numbers("scores", scores)
    if found.ndim < 1 or not len(found) or len(found) != len(clean):
        got = f"shape {found.shape} beside clean scores of {len(clean)}"
        raise InvalidArgumentError("scores", got, "one row for each detector, (K, ...)")
    rows = []
    for number, (row, own) in enumerate(zip(found, clean, strict=True)):
        known = _numbers(f"clean[{number}]", own)
        if known.ndim != 1 or np.isnan(known).any() or not np.isfinite(known).any():
            shown = f"shape {known.shape}, {np.isnan(known).sum()} of them NaN, {np.isfinite(known).sum()} finite"
            expected = "scores (n,) without NaN, at least one of them finite"
            raise InvalidArgumentError(f"clean[{number}]", shown, expected)
        rows.append(ranks_among(torch.tensor(row), torch.from_numpy(np.sort(known))))
    out: Floats = combine_ranks(torch.stack(rows), method=method).numpy()
    return out


def ranks_among(scores: Tensor, clean: Tensor) -> Tensor:
    """The share of clean scores that lie below each score, ties counting half, made continuous, with gradients.

    Between neighbouring clean scores it is interpolated. Beyond the highest of n clean scores c, where only a share r
    (``1 / 2n`` without ties) is left, it is ``1 - r / (1 + t)`` with t the distance to c in units of the range of the
    clean scores (1 where they are all the same); below the lowest likewise. So it grows strictly with the score as far
    as float64 can tell, and a detector's ranks have the ROC curve of its scores.

    Clean scores are float64 ``(n,)`` in increasing order, without NaN, at least one of them finite; ranks are float64
    in [0, 1], of the shape of ``scores``. Infinite scores are in order, 0 or 1 where no clean score is infinite; NaN
    stays NaN.

    Example:
        >>> ranks_among(torch.tensor([0.0, 1.0, 1.5, 2.0, 3.0, torch.inf]), torch.tensor([1.0, 2.0]).double()).tolist()
        [0.125, 0.25, 0.5, 0.75, 0.875, 1.0]
    """
    scores, total = scores.double(), len(clean)
    below, above = int((clean == -torch.inf).sum()), int((clean == torch.inf).sum())
    finite = clean[below : total - above]
    half = [torch.searchsorted(clean, finite, right=right) for right in (False, True)]
    shares = (half[0] + half[1]).double() / (2 * total)
    low, high = finite[0], finite[-1]

    inside = scores.clamp(low, high)
    last = len(finite) - 1
    after = torch.searchsorted(finite, inside.detach().contiguous()).clamp(min(1, last), last)
    before = (after - 1).clamp_min(0)
    gap = finite[after] - finite[before]
    within = torch.lerp(shares[before], shares[after], (inside - finite[before]) / torch.where(gap > 0, gap, 1.0))

    unit = torch.where(high > low, high - low, 1.0)
    # The share that is left beyond the ends, less that of infinite clean scores; relu has no gradient at 0.
    upwards = 1 - 1 / (1 + ((scores - high) / unit).relu())
    downwards = 1 - 1 / (1 + ((low - scores) / unit).relu())
    found = within + ((total - above) / total - shares[-1]) * upwards - (shares[0] - below / total) * downwards
    found = found + (scores == torch.inf) * (above / (2 * total)) - (scores == -torch.inf) * (below / (2 * total))
    return found.clamp(0, 1)


def combine_ranks(numbers: Tensor, *, method: str) -> Tensor:
    """Combine ranks or probabilities of K detectors, in [0, 1], ``(K, ...)`` to ``(...)``, with gradients.

    ``"mean"``: the average. ``"max"``: the highest, so that what one detector finds counts. ``"mixture"``: the worst-
    case mixture of Granese et al. With each number q_k as the probability of a binary decision, it is the q that
    minimises ``max_k KL(q_k || q)``, which is ``sum_k w_k q_k`` with the weights that maximise the mutual information
    of the detector's index and its decision. Only the lowest number a and the highest b have weight, and
    ``logit q = (h(a) - h(b)) / (b - a)`` with h the binary entropy: the mean of the logit over [a, b], which is a where
    both are the same.

    Example:
        >>> numbers = torch.tensor([[0.0, 0.2], [0.5, 0.2], [1.0, 0.9]], dtype=torch.float64)
        >>> [combine_ranks(numbers, method=method)[0].item() for method in METHODS]
        [0.5, 1.0, 0.5]
        >>> round(combine_ranks(numbers[:2], method="mixture")[0].item(), 6)
        0.2
    """
    if check_choice("method", method, METHODS) == "mean":
        return numbers.mean(0)
    low, high = numbers.amin(0), numbers.amax(0)
    if method == "max":
        return high

    def power(whole: Tensor) -> Tensor:
        """``whole exp((1 - r) log(1 / (1 - r)) / r)`` of the share r = gap / whole; the exponent goes from 1 to 0."""
        share = ((high - low) / torch.where(whole > 0, whole, 1.0)).clamp_max(_BELOW_ONE)
        small = share < _SMALL
        safe = torch.where(small, 0.5, share)
        return whole * torch.where(small, 1 - share / 2, (safe - 1) * torch.log1p(-safe) / safe).exp()

    # The formula, with the logarithms of numbers that may be 0 taken out of the exponent.
    yes, no = power(high), power(1 - low)
    return yes / (yes + no)


def _numbers(argument: str, values: ArrayLike) -> Floats:
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "fiu":
            raise TypeError(f"dtype {found.dtype}")
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(argument, f"{type(values).__name__} ({error})", "an array of real numbers") from None
    return found.astype(np.float64)
