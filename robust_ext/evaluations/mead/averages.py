"""Averages of the metric as in the paper's tables: of the rows of a norm, and of the four groups of attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from robust_ext.evaluations.mead.roc import Detection


@dataclass(frozen=True, kw_only=True)
class Average:
    """Unweighted means; None without rows that have a value."""

    auroc: float | None  # Mean of the rows' AUROC
    fpr_at_95_tpr: float | None  # Mean of the rows' FPR at 95% TPR
    tpr_at_5_fpr: float | None  # Mean of the rows' TPR at 5% FPR
    rows: int  # How many rows the means are over
    skipped: int  # How many rows have no value, as no attack succeeded

    def to_dict(self) -> dict[str, object]:
        """The fields, for JSON."""
        return dict(vars(self))


def average(rows: Sequence[Detection | Average]) -> Average:
    """Average rows, or averages of groups, each with the same weight, however many positives it has.

    Source: Granese et al., "MEAD" (2022), tables 1 to 3: the rows of a norm are averaged, and in table 3 the averages
    of the four groups (l1, l2, linf, no norm).
    """
    numbers = [
        (row.auroc, row.fpr_at_95_tpr, row.tpr_at_5_fpr)
        for row in rows
        if row.auroc is not None and row.fpr_at_95_tpr is not None and row.tpr_at_5_fpr is not None
    ]
    skipped = len(rows) - len(numbers)
    if not numbers:
        return Average(auroc=None, fpr_at_95_tpr=None, tpr_at_5_fpr=None, rows=0, skipped=skipped)
    auroc, fpr, tpr = (sum(column) / len(numbers) for column in zip(*numbers, strict=True))
    return Average(auroc=auroc, fpr_at_95_tpr=fpr, tpr_at_5_fpr=tpr, rows=len(numbers), skipped=skipped)
