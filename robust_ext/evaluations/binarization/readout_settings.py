"""Settings of the readout of the binarization test, and of the features that it reads."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from robust_ext.core.settings import setting, settings_class
from robust_ext.evaluations.binarization.depth_settings import DepthSettings
from robust_ext.models.readouts import Readout
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.models.readouts.majority import Majority
from robust_ext.registry.readout import as_readout


def check_readout(value: object) -> object:
    """A readout as it was given; InvalidArgumentError where it is none."""
    as_readout(value)
    return value


@settings_class
class ReadoutSettings(DepthSettings):
    """What is fitted to the features of inner and planted points."""

    layer: str | None = setting(
        default=None,
        help="Name of the layer whose input are the features, of any kind; with commas several. Left out, it is what "
        "the logits are made of, see docs/models.md.",
        panel="model",
    )
    readout: str | Readout = setting(
        default="logistic",
        help="How a readout is fitted: "
        + ", ".join(f'``"{name}"``' for name in READOUTS)
        + ', with settings or without (``"logistic(C=3)"``), or one of your own, ``"file.py:Class"``; see '
        'docs/binarization.md, "Readouts".',
        check=check_readout,
        panel="readout",
    )
    C: float = setting(
        default=10.0,
        help="Weight of the losses in logistic regression, of a readout that is given by its name, see "
        ":func:`robust_ext.models.readouts.fit_directions`; raised for the samples that it keeps from being separated.",
        above=0,
        cli="--C",
        panel="readout",
    )
    draws: int = setting(
        default=1,
        help="Above 1, the model is random: points are measured over so many draws, the readout is fitted to all of "
        "them, and the majority over so many fresh ones decides; attacks are shown single ones. It draws from the "
        "global generators, which are seeded for each draw of a batch.",
        minimum=1,
        maximum=10_000,
        panel="model",
    )

    @cached_property
    def fitting(self) -> Readout:
        """The readout, made."""
        found = as_readout(self.readout, C=self.C)
        return found if self.draws == 1 else Majority(readout=found, draws=self.draws)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, as plain values."""
        readout = self.readout if isinstance(self.readout, str) else self.readout.description
        return {**super().to_dict(), "readout": readout}
