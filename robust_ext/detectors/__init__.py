"""Detectors of adversarial examples, as modules."""

from robust_ext.detectors.base import Calibration as Calibration
from robust_ext.detectors.base import Detector as Detector
from robust_ext.detectors.dla import DLADetector as DLADetector
from robust_ext.detectors.ml_loo import MLLOODetector as MLLOODetector
from robust_ext.detectors.observation import Observation as Observation
from robust_ext.detectors.observation import observe as observe
from robust_ext.detectors.odds import OddsDetector as OddsDetector
from robust_ext.detectors.resolve import as_detector as as_detector
from robust_ext.detectors.scored import ScoreDetector as ScoreDetector
from robust_ext.detectors.trapdoor import TrapdoorDetector as TrapdoorDetector
from robust_ext.detectors.triggers import Triggers as Triggers
from robust_ext.detectors.triggers import make_triggers as make_triggers
