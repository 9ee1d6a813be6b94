"""Settings of the binarization test's depths, readout and features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_number
from robust_ext.engine.evaluation_file import JudgedSettings
from robust_ext.models.readouts import Readout
from robust_ext.models.readouts.catalogue import READOUTS
from robust_ext.models.readouts.majority import Majority
from robust_ext.registry.readout import as_readout

DEPTHS = (1.0, 2.0, 4.0, 8.0)


def check_depths(value: Any) -> tuple[float, ...]:
    """Depths as a tuple of increasing numbers that begins with 1, the planted point's."""
    expected = "increasing numbers that begin with 1, as in (1, 2, 4, 8); (1,) alone for no further depths"
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgumentError("depths", repr(value), expected)
    depths = tuple(float(check_number("depths", depth, minimum=1, maximum=1e6)) for depth in value)
    if depths[:1] != (1.0,) or any(second <= first for first, second in pairwise(depths)):
        raise InvalidArgumentError("depths", tuple(value), expected)
    return depths


@settings_class
class DepthSettings(JudgedSettings):
    """Settings of problems beyond the planted point, see :mod:`robust_ext.evaluations.binarization.witnesses`."""

    depths: tuple[float, ...] = setting(
        default=DEPTHS,
        help="Where the boundary is placed, in multiples of the way from the closest inner point to the planted one: 1 "
        "is the test itself, and deeper problems are posed where a witness proves that they can be solved. ``(1,)`` "
        "for none.",
        check=check_depths,
        panel="depth",
    )
    least_depth: float = setting(
        default=1.0,
        help="The depth from which on an attack may pass, as a calibration chooses it.",
        minimum=1,
        cli=None,
    )
    witness_steps: int = setting(
        default=20,
        help="Steps that this project's APGD takes to find deeper points, and half as many with the mean of four "
        "gradients nearby (not with a detector); 0 for none.",
        minimum=0,
        panel="depth",
    )
    witness_queries: int = setting(
        default=200,
        help="Queries that Square makes for the same from the planted point, without gradients; 0 for none. It needs "
        "images, and is not run with a detector.",
        minimum=0,
        panel="depth",
    )

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, as plain values."""
        return {**super().to_dict(), "depths": list(self.depths)}


def check_readout(value: object) -> object:
    """A readout as it was given; InvalidArgumentError for anything else."""
    as_readout(value)
    return value


@settings_class
class ReadoutSettings(DepthSettings):
    """Settings of the readout of inner and planted points."""

    layer: str | None = setting(
        default=None,
        help="Name of the layer whose input are the features, of any kind; with commas several. Left out, it is what "
        "the logits are made of, see docs/features.md.",
        panel="model",
    )
    readout: str | Readout = setting(
        default="logistic",
        help="How a readout is fitted: "
        + ", ".join(f'``"{name}"``' for name in READOUTS)
        + ', with settings or without (``"logistic(C=3)"``), or one of your own, ``"file.py:Class"``; see '
        "docs/readouts.md.",
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
