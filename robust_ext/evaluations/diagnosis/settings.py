"""Settings and result of a diagnosis."""

from __future__ import annotations

from typing import Any, ClassVar

from robust_ext.core.settings import setting, settings_class
from robust_ext.core.tabular import Columns, Row
from robust_ext.engine.evaluation_file import JudgedSettings
from robust_ext.evaluations.binarization.readout_settings import check_readout
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.result import EvaluationResult, bounds_of
from robust_ext.models.readouts import Readout


class DiagnosisResult(EvaluationResult):
    """Faults of an attack or a model, and remedies; see :class:`EvaluationResult`."""

    kind = "diagnosis"
    columns: ClassVar[Columns] = {
        "attack": str,
        "reference": bool,
        "verdict": str,
        "robust_accuracy": float,
        "robust_accuracy_low": float,
        "robust_accuracy_high": float,
        "epsilon": float,
        "score": float,
        "score_low": float,
        "score_high": float,
        "random_score": float,
        "planted": int,
        "not_attacked": int,
        "error": str,
        "seconds": float,
        "forward": int,
        "backward": int,
        "description": str,
    }
    keys = ("attack",)
    value = "robust_accuracy"
    shown = ("attack", "reference", "verdict", "robust_accuracy", "score", "random_score", "seconds")

    @property
    def likely(self) -> Finding | None:
        """The most likely cause of a failure; None where nothing of weight was found."""
        return next((one for one in self.findings if one.weight != "low"), None)

    @property
    def headline(self) -> str:
        """The code of the likely cause, with the attack it is about."""
        if self.likely is None:
            return "diagnosis: none of the known causes applies"
        return f"diagnosis: {self.likely.code} ({self.likely.attack or 'the model'})"

    def rows(self) -> list[Row]:
        """One an attack, and one a reference that it is compared with."""
        return [
            {
                "attack": one["name"],
                "reference": "not_planted" not in one,
                "verdict": one.get("verdict"),
                "robust_accuracy": one["robust_accuracy"],
                **bounds_of("robust_accuracy", one["interval"]),
                "epsilon": one["epsilon"],
                "score": one.get("score"),
                **bounds_of("score", one.get("score_interval")),
                "random_score": one.get("random_score"),
                "planted": one.get("planted"),
                "not_attacked": one["not_attacked"],
                "error": one["error"],
                "seconds": one["seconds"],
                **{way: one["passes"].get(way) for way in ("forward", "backward")},
                "description": one["description"],
            }
            for one in (*self.content["attacks"], *self.content["references"])
        ]


@settings_class
class DiagnosisSettings(JudgedSettings):
    """The budget of a diagnosis; the defaults take under a minute for a CIFAR-10 network on two cores."""

    label = "a diagnosis"

    planted: int = setting(
        default=16, help="Samples of the short binarization test, at most; 0 for none.", minimum=0, maximum=1_000_000
    )
    inner_points: int = setting(
        default=149, help="Inner points of each of its problems.", minimum=1, maximum=1_000_000, panel="planting"
    )
    layer: str | None = setting(
        default=None,
        help="Name of the layer whose input are the features, see docs/features.md; found when left out.",
        panel="model",
    )
    readout: str | Readout = setting(
        default="logistic",
        help='How a readout is fitted to planted problems, as in the binarization test: ``"logistic(C=3)"``, '
        '``"file.py:Class"``.',
        check=check_readout,
        panel="model",
    )
    references: bool = setting(
        default=True,
        help="Compare with other attacks on the same samples: one gradient step, APGD on the margin and on the "
        "smoothed model, Square, random points, and the attack itself with larger budgets.",
    )
    queries: int = setting(
        default=200, help="Queries of Square, for each sample.", minimum=1, maximum=1_000_000, panel="cost"
    )
    random_points: int = setting(
        default=100, help="Random points, for each sample.", minimum=1, maximum=1_000_000, panel="cost"
    )
    affordable: int = setting(
        default=500,
        help="Passes, backward ones counted twice, that an attack may take for each sample to be run with larger "
        "budgets too.",
        minimum=0,
        panel="cost",
    )
    minutes: float | None = setting(
        default=None,
        help="Minutes after which nothing new begins, and what runs ends at its next forward pass; the result lists "
        "the rest. Probes of the model get a third at most.",
        above=0,
        panel="run",
    )
    batch_size: int = setting(
        default=100,
        help="Samples attacked at once. Results of attacks that draw random numbers depend on it.",
        minimum=1,
        panel="run",
    )

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, as plain values."""
        readout = self.readout if isinstance(self.readout, str) else self.readout.description
        return {**super().to_dict(), "readout": readout}
