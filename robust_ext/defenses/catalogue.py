"""The published defenses: what is in this list can be made by name, on the command line and in tests of all of them."""

from __future__ import annotations

from robust_ext.defenses.adp import AdaptiveDenoising
from robust_ext.defenses.aid import AIDPurifier
from robust_ext.defenses.anti_adversary import AntiAdversary
from robust_ext.defenses.clc import ClosedLoopControl
from robust_ext.defenses.hd import HedgeDefense
from robust_ext.defenses.imf import IMF
from robust_ext.defenses.input_transformations import BitDepthReduction, JPEGCompression, MedianSmoothing
from robust_ext.defenses.randomized_smoothing import RandomizedSmoothing
from robust_ext.defenses.resize_pad import RandomResizePad
from robust_ext.defenses.reverse import ContrastiveReversal
from robust_ext.defenses.soap import SOAP
from robust_ext.defenses.sodef import SODEF
from robust_ext.models.adaptive import AdaptiveDefense

DEFENSES: tuple[type[AdaptiveDefense], ...] = (
    HedgeDefense,
    AntiAdversary,
    SOAP,
    IMF,
    AIDPurifier,
    SODEF,
    ClosedLoopControl,
    ContrastiveReversal,
    AdaptiveDenoising,
    BitDepthReduction,
    MedianSmoothing,
    JPEGCompression,
    RandomResizePad,
    RandomizedSmoothing,
)

NAMED = {defense.name: defense for defense in DEFENSES}
"""Each by its name."""

TRAINED = tuple(name for name, defense in NAMED.items() if defense.part_class is not None)
"""Names of the defenses that need a trained part from a file."""
