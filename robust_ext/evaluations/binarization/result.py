"""The result of a binarization test, as an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from robust_ext.core import tabular
from robust_ext.core.tabular import Columns, Row
from robust_ext.core.wording import share
from robust_ext.evaluations.result import EvaluationResult, bounds_of

if TYPE_CHECKING:
    import pandas

_RECORD = {"sample": int, "attack": str, "outcome": str, "reach": float, "random_reach": float}


class BinarizationResult(EvaluationResult):
    """The result of the binarization test; see :class:`EvaluationResult`.

    The records are one a sample; a pair of tests has none here, but in the run folder of each.
    """

    kind = "binarization"
    columns: ClassVar[Columns] = {
        "attack": str,
        "test": str,
        "verdict": str,
        "score": float,
        "score_low": float,
        "score_high": float,
        "random_score": float,
        "random_score_low": float,
        "random_score_high": float,
        "random_samples": int,
        "depth": float,
        "samples": int,
        "found": int,
        "canaries": int,
        "canaries_repaired": int,
        "seconds": float,
        "forward": int,
        "backward": int,
        "description": str,
    }
    keys = ("attack", "test")
    value = "score"
    shown = ("attack", "test", "verdict", "score", "random_score", "depth", "samples")

    @property
    def verdict(self) -> Literal["passed", "failed", "inconclusive"]:
        """The verdict on the best attack."""
        return cast('Literal["passed", "failed", "inconclusive"]', self.content["verdict"])

    @property
    def attacks(self) -> dict[str, Mapping[str, Any]]:
        """The numbers of each attack, by name."""
        return {attack["name"]: attack for attack in self.content["attacks"]}

    @property
    def score(self) -> float | None:
        """Test score of the best attack; None when no problem could be planted."""
        scores = [attack["score"] for attack in self.content["attacks"] if attack["score"] is not None]
        return max(scores) if scores else None

    @property
    def headline(self) -> str:
        """The verdict and the best score."""
        needed = self.content["settings"]["threshold"]
        best = (
            "nothing was planted" if self.score is None else f"score {share(self.score, needed)} of {needed:g} needed"
        )
        return f"binarization test {self.verdict}: {best}"

    def rows(self) -> list[Row]:
        """One an attack, or with a detector one an attack and test (``"regular"``, ``"inverted"``)."""
        return [
            {
                "attack": attack["name"],
                "test": test,
                "verdict": one["verdict"],
                "score": one["score"],
                **bounds_of("score", one["score_interval"]),
                "random_score": one["random_score"],
                **bounds_of("random_score", one["random_score_interval"]),
                "random_samples": one.get("random_samples", one["samples"]),
                "depth": one["depth"],
                "samples": one["samples"],
                "found": one["outcomes"]["found"],
                "canaries": one["canaries"]["planted"],
                "canaries_repaired": one["canaries"]["repaired"],
                "seconds": one["seconds"]["total"],
                **one["passes"],
                "description": attack.get("description"),
            }
            for attack in self.content["attacks"]
            for test, one in attack.get("tests", {None: attack}).items()
        ]

    def records_frame(self) -> pandas.DataFrame:
        """A data frame with a row a planted problem: sample, attack, outcome, and how far it and random search came.

        ``reach`` and ``random_reach`` are in units of the planted point's own, which is 1; the latter is missing where
        no random search was needed.
        """
        rows: list[Row] = [
            {
                "sample": record["sample"],
                "attack": name,
                "outcome": entry["outcome"],
                "reach": entry["reach"],
                "random_reach": record["random_reach"],
            }
            for record, name, entry in self._planted()
        ]
        frame: pandas.DataFrame = tabular.frame(_RECORD, rows)
        return frame

    def solved(self) -> dict[tuple[Any, ...], dict[int, bool]]:
        """Return whether each planted problem was found."""
        found: dict[tuple[Any, ...], dict[int, bool]] = {}
        for record, name, entry in self._planted():
            found.setdefault((name, None), {})[record["sample"]] = entry["outcome"] == "found"
        return found

    def _planted(self) -> list[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
        """The records of samples in which something was planted for an attack, with its name and its entry."""
        return [
            (record, name, entry)
            for record in self.records
            for name, entry in record["attacks"].items()
            if entry["outcome"] != "not_planted"
        ]
