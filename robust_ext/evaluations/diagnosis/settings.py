"""Settings of a diagnosis."""

from __future__ import annotations

from typing import Any

from robust_ext.core.settings import setting, settings_class
from robust_ext.engine.judge import JudgedSettings
from robust_ext.evaluations.binarization.readout_settings import check_readout
from robust_ext.models.readouts import Readout


@settings_class
class DiagnosisSettings(JudgedSettings):
    """How much is spent on a diagnosis; the defaults take under a minute for a CIFAR-10 network on two cores."""

    label = "a diagnosis"

    planted: int = setting(
        default=16, help="Samples of the short binarization test, at most; 0 for none.", minimum=0, maximum=1_000_000
    )
    inner_points: int = setting(
        default=199, help="Inner points of each of its problems.", minimum=1, maximum=1_000_000, panel="planting"
    )
    layer: str | None = setting(
        default=None,
        help="Name of the layer whose input are the features, see docs/models.md; found when left out.",
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
        help="Begin nothing further after so long, and end what runs at its next forward pass; what was not run is "
        "stated. Probes of the model get a third at most.",
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
