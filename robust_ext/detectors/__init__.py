"""Detectors of adversarial examples, as modules."""

from robust_ext.detectors.base import Calibration as Calibration
from robust_ext.detectors.base import Detector as Detector
from robust_ext.detectors.observation import Observation as Observation
from robust_ext.detectors.observation import observe as observe
