"""The multi-armed metric: a sample counts as detected only when every successful attack on it is detected.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022), section
4. Equation 7 there asks that all attacks succeed; here, as in the paper's text, figure 2 and remark, attacks that fail
are left out. At every threshold that is the curve of each sample's lowest score over the attacks that succeed on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_choice, check_integer
from robust_ext.evaluations.mead.roc import Detection, Floats, detect

NATURALS = ("kept", "filtered")

Numbers = Tensor | NDArray[np.floating]
Flags = Tensor | NDArray[np.bool_]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class ArmLabel:
    """The label of an arm."""

    name: str  # Unlike those of the other arms
    # What its attack maximises, such as "kl"; None where it has no choice of objectives. Such arms take part in the
    # result of every objective, as in the paper
    objective: str | None = None
    algorithm: str | None = None  # How, such as "pgd"; None: it takes part in no algorithm's result


@dataclass(frozen=True, kw_only=True)
class MultiArmed:
    """One row of the paper's tables: all arms against one detector."""

    all_arms: Detection  # Every arm together
    # By objective: the arms of this objective together with those that have none. The paper calls it single-armed. It
    # can lie below that of all arms, as it has fewer positives (remark in section 5.2.1)
    objectives: dict[str, Detection]
    algorithms: dict[str, Detection]  # By algorithm
    arms: dict[str, Detection]  # Each arm by itself
    # By arm, the share of positives in which it scored lowest, shared where several did; adds up to 1. None without
    # positives
    attribution: dict[str, float] | None
    # How many arms succeed on a sample, on average (tables 4 and 10); None without samples
    successes_per_sample: float | None
    samples: int  # How many samples were left

    def to_dict(self) -> dict[str, object]:
        """All numbers, for JSON; those of all arms at the top."""
        parts = {"objectives": self.objectives, "algorithms": self.algorithms, "arms": self.arms}
        return {
            **self.all_arms.to_dict(),
            **{part: {name: one.to_dict() for name, one in found.items()} for part, found in parts.items()},
            "attribution": self.attribution,
            "successes_per_sample": self.successes_per_sample,
            "samples": self.samples,
        }


def multi_armed(
    natural: Numbers,
    scores: Numbers,
    success: Flags,
    *,
    arms: Sequence[ArmLabel],
    correct: Flags | None = None,
    naturals: str = "kept",
    resamples: int = 1000,
    seed: int = 0,
) -> MultiArmed:
    """Measure a detector by its scores of natural samples and of every arm's results; higher means more adversarial.

    Everything is decided in float64. Infinite scores are in order; those that are no numbers are left out, and counted.
    InvalidArgumentError where shapes do not fit, flags are not bool, two arms have one name, or ``correct`` is missing.

    Args:
        natural: Scores of the samples as they are, ``(N,)``.
        scores: Of each arm's results, ``(L, N)``; what arms that failed scored does not matter.
        success: Where an arm's result is misclassified and allowed, bool ``(L, N)``.
        arms: The L arms.
        correct: Which samples are classified correctly as they are, bool ``(N,)``; needed to filter them.
        naturals: ``"kept"``: all samples count, and an arm succeeds on one that is misclassified already if it leaves
            it so, as in the paper. ``"filtered"``: samples that are misclassified already are left out altogether.
        resamples: For the intervals; 0 leaves them out.
        seed: Of the resamples.

    Example:
        >>> arms = [ArmLabel(name="a"), ArmLabel(name="b")]
        >>> scores, success = np.array([[0.9, 0.8], [0.2, 0.1]]), np.array([[True, True], [True, False]])
        >>> result = multi_armed(np.array([0.3, 0.1]), scores, success, arms=arms, resamples=0)
        >>> result.all_arms.auroc, result.arms["a"].auroc, result.attribution
        (0.75, 1.0, {'a': 0.5, 'b': 0.5})
    """
    natural, scores, success = _checked(natural, scores, success, arms)
    check_choice("naturals", naturals, NATURALS)
    check_integer("resamples", resamples, minimum=0)
    if naturals == "filtered":
        if correct is None:
            raise InvalidArgumentError("correct", None, "bools (N,) to filter by; or choose naturals='kept'")
        kept = _flags("correct", correct, natural.shape)
        natural, scores, success = natural[kept], scores[:, kept], success[:, kept]

    def detection(rows: list[int]) -> Detection:
        unscored = int(np.isnan(natural).sum() + (np.isnan(scores[rows]) & success[rows]).sum())
        worst = worst_scores(scores[rows], success[rows])
        return detect(natural, worst, resamples=resamples, seed=seed, unscored=unscored)

    numbered = list(enumerate(arms))
    objectives, algorithms = _distinct(arm.objective for arm in arms), _distinct(arm.algorithm for arm in arms)
    shares = attribution(scores, success)
    return MultiArmed(
        all_arms=detection(list(range(len(arms)))),
        objectives={one: detection([i for i, arm in numbered if arm.objective in (one, None)]) for one in objectives},
        algorithms={one: detection([i for i, arm in numbered if arm.algorithm == one]) for one in algorithms},
        arms={arm.name: detection([i]) for i, arm in numbered},
        attribution=None if shares is None else {arm.name: float(shares[i]) for i, arm in numbered},
        successes_per_sample=float(success.sum() / len(natural)) if len(natural) else None,
        samples=len(natural),
    )


def worst_scores(scores: Floats, success: Bools) -> Floats:
    """Each sample's lowest score over the arms that succeed, ``(N,)``; NaN where none does, or none has a score.

    Scores are float64 ``(L, N)``, success bool ``(L, N)``.
    """
    valid = success & ~np.isnan(scores)
    lowest: Floats = np.where(valid, scores, np.inf).min(0, initial=np.inf)
    return np.where(valid.any(0), lowest, np.nan)


def attribution(scores: Floats, success: Bools) -> Floats | None:
    """The share of positives in which each arm scored lowest, ``(L,)``; arms that tie share. None without positives."""
    lowest = success & (scores == worst_scores(scores, success))
    tied = lowest.sum(0)
    positives = int((tied > 0).sum())
    if positives == 0:
        return None
    shares: Floats = (lowest / np.maximum(tied, 1)).sum(1) / positives
    return shares


def _distinct(names: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))


def _checked(
    natural: Numbers, scores: Numbers, success: Flags, arms: Sequence[ArmLabel]
) -> tuple[Floats, Floats, Bools]:
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise InvalidArgumentError("arms", ", ".join(names), "a name of its own for each arm")
    found = _array(natural).astype(np.float64)
    if found.ndim != 1:
        raise InvalidArgumentError("natural", f"shape {found.shape}", "one score for each sample, (N,)")
    of_arms, shape = _array(scores).astype(np.float64), (len(arms), len(found))
    if of_arms.shape != shape:
        raise InvalidArgumentError("scores", f"shape {of_arms.shape}", f"shape {shape}, one row for each arm")
    return found, of_arms, _flags("success", success, shape)


def _flags(argument: str, flags: Flags, shape: tuple[int, ...]) -> Bools:
    array = _array(flags)
    if array.shape != shape or array.dtype != np.bool_:
        raise InvalidArgumentError(argument, f"{array.dtype} of shape {array.shape}", f"bool of shape {shape}")
    return array.astype(np.bool_, copy=False)


def _array(values: Tensor | NDArray[np.generic]) -> NDArray[np.generic]:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        # bfloat16 has no numpy form.
        return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())
    return np.asarray(values)


@dataclass(frozen=True, kw_only=True)
class PublishedCurve:
    """The curve, from the lowest thresholds to the highest."""

    fpr: Floats  # Share of natural samples flagged, (thresholds,)
    tpr: Floats  # Share of positives flagged, (thresholds,)
    auroc: float  # Area under it
    fpr_at_95_tpr: float  # FPR at 95% TPR

    def to_dict(self) -> dict[str, object]:
        """The two numbers, for JSON."""
        return {"auroc": self.auroc, "fpr_at_95_tpr": self.fpr_at_95_tpr}


def published_curve(natural: Floats, scores: Floats, success: Bools, *, thresholds: int = 200) -> PublishedCurve | None:
    """Compute the curve and its numbers as the public code does; higher scores mean more adversarial.

    Natural scores are float64 ``(N,)``, or ``(L, N)`` where they were taken again for each arm; scores (of successful
    and failed results) and success are ``(L, N)``; each arm has as many thresholds, at least 2. None without
    positives, and where a score is not finite. InvalidArgumentError where shapes do not fit.
    """
    check_integer("thresholds", thresholds, minimum=2)
    if scores.ndim != 2 or success.shape != scores.shape:
        raise InvalidArgumentError("success", f"shape {success.shape}", f"the shape of the scores, {scores.shape}")
    if natural.shape not in (scores.shape, scores.shape[1:]):
        expected = f"shape {scores.shape[1:]} or {scores.shape}"
        raise InvalidArgumentError("natural", f"shape {natural.shape}", expected)
    natural = np.broadcast_to(natural, scores.shape)
    possible = success.any(0)
    if not possible.any() or not (np.isfinite(natural).all() and np.isfinite(scores).all()):
        return None
    lowest = np.minimum(natural.min(1), scores.min(1))
    highest = np.maximum(natural.max(1), scores.max(1))
    fpr, tpr = np.empty(thresholds), np.empty(thresholds)
    for number, of_arms in enumerate(np.linspace(lowest, highest, thresholds)):
        fpr[number] = (natural > of_arms[:, None]).any(0).mean()
        missed = (success & ~(scores > of_arms[:, None])).any(0)
        tpr[number] = (possible & ~missed).sum() / possible.sum()
    x, y = np.sort(fpr), np.sort(tpr)
    area = float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum())
    return PublishedCurve(fpr=fpr, tpr=tpr, auroc=area, fpr_at_95_tpr=float(np.interp(0.95, y, x)))
