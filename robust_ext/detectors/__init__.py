"""Detectors of adversarial examples, as modules."""

from typing import TYPE_CHECKING, Any

from robust_ext.detectors._features.non_local_means import NonLocalMeans as NonLocalMeans
from robust_ext.detectors._features.non_local_means import OpenCVNonLocalMeans as OpenCVNonLocalMeans
from robust_ext.detectors._features.squeezers import BitDepth as BitDepth
from robust_ext.detectors._features.squeezers import Median as Median
from robust_ext.detectors._features.squeezers import Squeezer as Squeezer
from robust_ext.detectors.base import Detector as Detector
from robust_ext.detectors.calibration import Calibration as Calibration
from robust_ext.detectors.combined import CombinedDetector as CombinedDetector
from robust_ext.detectors.dla import DLADetector as DLADetector
from robust_ext.detectors.feature_squeezing import FeatureSqueezingDetector as FeatureSqueezingDetector
from robust_ext.detectors.kd_bu import KDBUDetector as KDBUDetector
from robust_ext.detectors.lid import LIDDetector as LIDDetector
from robust_ext.detectors.magnet import MagNetDetector as MagNetDetector
from robust_ext.detectors.ml_loo import MLLOODetector as MLLOODetector
from robust_ext.detectors.nss import NSSDetector as NSSDetector
from robust_ext.detectors.observation import Observation as Observation
from robust_ext.detectors.observation import observe as observe
from robust_ext.detectors.odds import OddsDetector as OddsDetector
from robust_ext.detectors.scored import ScoreDetector as ScoreDetector
from robust_ext.detectors.trapdoor import TrapdoorDetector as TrapdoorDetector
from robust_ext.detectors.triggers import Triggers as Triggers
from robust_ext.detectors.triggers import make_triggers as make_triggers

if TYPE_CHECKING:
    from robust_ext.evaluations.mead.fitting import fit_detector as fit_detector


def __getattr__(name: str) -> Any:
    """Import ``fit_detector`` once it is used: it runs attacks, which no detector imports."""
    if name != "fit_detector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from robust_ext.evaluations.mead import fitting

    return fitting.fit_detector
