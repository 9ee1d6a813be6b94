"""Settings and result of a whole evaluation."""

from __future__ import annotations

from typing import Any, ClassVar

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.tabular import Columns, Row
from robust_ext.core.wording import accuracy
from robust_ext.engine.evaluation_file import JudgedSettings
from robust_ext.evaluations.evaluate.publish import claim_sentence, latex_row, markdown_row, publishable
from robust_ext.evaluations.evaluate.suite import BUDGETS
from robust_ext.evaluations.result import EvaluationResult, bounds_of


class EvaluateResult(EvaluationResult):
    """A robust accuracy with the certificate of the attack behind it; see :class:`EvaluationResult`."""

    kind = "evaluation"
    columns: ClassVar[Columns] = {
        "attack": str,
        "samples": int,
        "broken": int,
        **dict.fromkeys(("robust_accuracy", "robust_accuracy_low", "robust_accuracy_high", "seconds"), float),
        **dict.fromkeys(("forward", "backward"), int),
        "description": str,
    }
    keys = ("attack",)
    value = "robust_accuracy"
    shown = ("attack", "samples", "broken", "robust_accuracy", "seconds")

    @property
    def verdict(self) -> str:
        """``"passed"``: the attack behind the number is certified; ``"failed"``, ``"inconclusive"`` otherwise."""
        return str(self.content["verdict"])

    @property
    def robust_accuracy(self) -> float | None:
        """The share of samples that no verified candidate broke; None where the setup stopped the evaluation."""
        worst = self.content["worst_case"]
        return None if worst is None else float(worst["robust_accuracy"])

    @property
    def headline(self) -> str:
        """The worst case and the certificate."""
        worst = self.content["worst_case"]
        if worst is None:
            return f"evaluation stopped: {self.content['stopped']}"
        return f"robust accuracy {accuracy(worst)}%, attack {self.content['certificate']['words']}"

    @property
    def paragraph(self) -> str:
        """The result in a paragraph to paste into a paper or a review."""
        return publishable(self.content)

    @property
    def claim(self) -> str:
        """The published claim against this result, in a sentence; empty without a claim."""
        return claim_sentence(self.content)

    def to_markdown(self) -> str:
        """A table of one row to paste, with its header."""
        return markdown_row(self.content)

    def to_latex_row(self) -> str:
        """A row of a LaTeX table to paste, with its columns in a comment; :meth:`to_latex` has a row an attack."""
        return latex_row(self.content)

    def rows(self) -> list[Row]:
        """One an attack of the suite in order, and one for the worst case over all."""
        worst = self.content["worst_case"]
        found = [self._row(one, attack=one["name"]) for one in self.content["steps"]]
        return found if worst is None else [*found, self._row(worst, attack="worst case")]

    def _row(self, one: dict[str, Any], *, attack: str) -> Row:
        return self.row(
            **{**one, **one.get("passes", {}), "attack": attack, **bounds_of("robust_accuracy", one.get("interval"))}
        )


@settings_class
class EvaluateSettings(JudgedSettings):
    """The budget of an evaluation, its certificate, and a claim to compare with."""

    label = "an evaluation"

    budget: str = setting(
        default="standard",
        help="How many passes the suite may take for a sample that stands to the end, see docs/evaluate.md.",
        choices=BUDGETS,
        panel="cost",
    )
    claim: float | None = setting(
        default=None,
        help="Robust accuracy in per cent that was published, to compare with: ``60`` for 60%.",
        minimum=0,
        maximum=100,
    )
    planted: int = setting(
        default=64,
        help="Samples of the binarization test that certifies the attack, at most; 0 for no certificate.",
        minimum=0,
        maximum=1_000_000,
    )
    search: bool = setting(default=True, help="Search for an attack that passes the test where the standard one fails.")
    accept_setup: bool = setting(
        default=False,
        help="Attack even where labels, input scale or outputs look wrong; the finding stays in the result.",
    )
    layer: str | None = setting(
        default=None,
        help="Name of the layer whose input are the features, see docs/features.md; found when left out.",
        panel="model",
    )
    detector_fpr: float = setting(
        default=0.05,
        help="Share of clean inputs that a detector without a threshold may flag, in (0, 1).",
        above=0,
        below=1,
        panel="detector",
    )
    minutes: float | None = setting(
        default=None,
        help="Minutes after which nothing new begins, and what runs ends at its next forward pass; the result lists "
        "the rest.",
        above=0,
        panel="run",
    )
    batch_size: int = setting(
        default=100,
        help="Samples attacked at once. Results of attacks that draw random numbers depend on it.",
        minimum=1,
        panel="run",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.claim is not None and 0 < self.claim < 1:
            raise InvalidArgumentError("claim", self.claim, "a percentage; write 60 for 60%")
