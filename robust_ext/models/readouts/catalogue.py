"""The readouts by name."""

from __future__ import annotations

from robust_ext.models.readouts.base import Readout
from robust_ext.models.readouts.code import Code
from robust_ext.models.readouts.ensemble import Ensemble
from robust_ext.models.readouts.linear import Logistic, MaxMargin
from robust_ext.models.readouts.mixing import Mixing
from robust_ext.models.readouts.nearest import Nearest
from robust_ext.models.readouts.prototypes import Prototypes

READOUTS: dict[str, type[Readout]] = {
    "logistic": Logistic,
    "max-margin": MaxMargin,
    "ensemble": Ensemble,
    "code": Code,
    "prototypes": Prototypes,
    "nearest": Nearest,
    "mixing": Mixing,
}
