"""Can this robustness evaluation be trusted? Tests of adversarial attacks for Foolbox, ART and PyTorch."""

import logging

from robust_ext._version import __version__ as __version__
from robust_ext.core.threat import ThreatModel as ThreatModel
from robust_ext.evaluations.binarization import BinarizationResult as BinarizationResult
from robust_ext.evaluations.binarization import binarization_test as binarization_test
from robust_ext.evaluations.binarization import plant as plant
from robust_ext.evaluations.mead import MeadResult as MeadResult
from robust_ext.evaluations.mead import mead as mead
from robust_ext.evaluations.robust_accuracy import RobustAccuracyResult as RobustAccuracyResult
from robust_ext.evaluations.robust_accuracy import robust_accuracy as robust_accuracy
from robust_ext.registry.attack import as_attack as as_attack

logging.getLogger(__name__).addHandler(logging.NullHandler())
