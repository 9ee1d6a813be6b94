"""The published detectors: those of the first list are fitted on training data by their name."""

from __future__ import annotations

from robust_ext.detectors.base import Detector
from robust_ext.detectors.dla import DLADetector
from robust_ext.detectors.feature_squeezing import FeatureSqueezingDetector
from robust_ext.detectors.kd_bu import KDBUDetector
from robust_ext.detectors.lid import LIDDetector
from robust_ext.detectors.magnet import MagNetDetector
from robust_ext.detectors.ml_loo import MLLOODetector
from robust_ext.detectors.nss import NSSDetector
from robust_ext.detectors.odds import OddsDetector
from robust_ext.detectors.trapdoor import TrapdoorDetector

DETECTORS: dict[str, type[Detector]] = {
    "nss": NSSDetector,
    "kd-bu": KDBUDetector,
    "lid": LIDDetector,
    "fs": FeatureSqueezingDetector,
    "magnet": MagNetDetector,
}
# The others need choices, or a training of the network, that no name stands for.
PUBLISHED: tuple[type[Detector], ...] = (
    *DETECTORS.values(),
    OddsDetector,
    TrapdoorDetector,
    MLLOODetector,
    DLADetector,
)
