"""The readouts by name."""

from __future__ import annotations

from robust_ext.models.readouts.base import Readout
from robust_ext.models.readouts.linear import Logistic, MaxMargin

READOUTS: dict[str, type[Readout]] = {
    "logistic": Logistic,
    "max-margin": MaxMargin,
}
