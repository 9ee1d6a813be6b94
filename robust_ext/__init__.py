"""Can this robustness evaluation be trusted? Tests of adversarial attacks for Foolbox, ART and PyTorch."""

import logging

from robust_ext._version import __version__ as __version__
from robust_ext.attacks.adapted import AdaptedAttack as AdaptedAttack
from robust_ext.attacks.base import Attack as Attack
from robust_ext.core.errors import AttackError as AttackError
from robust_ext.core.errors import AttackRefusedError as AttackRefusedError
from robust_ext.core.errors import DataError as DataError
from robust_ext.core.errors import DisturbedError as DisturbedError
from robust_ext.core.errors import InvalidArgumentError as InvalidArgumentError
from robust_ext.core.errors import MissingDependencyError as MissingDependencyError
from robust_ext.core.errors import ModelError as ModelError
from robust_ext.core.errors import RobustExtError as RobustExtError
from robust_ext.core.errors import RobustExtWarning as RobustExtWarning
from robust_ext.core.errors import RunFolderBusyError as RunFolderBusyError
from robust_ext.core.errors import RunFolderError as RunFolderError
from robust_ext.core.errors import SplitError as SplitError
from robust_ext.core.errors import WrongCallError as WrongCallError
from robust_ext.core.threat import ThreatModel as ThreatModel
from robust_ext.detectors.base import Detector as Detector
from robust_ext.engine.context import repairing as repairing
from robust_ext.engine.estimate import estimate as estimate
from robust_ext.evaluations.adaptive import AdaptiveResult as AdaptiveResult
from robust_ext.evaluations.adaptive import AdaptiveSettings as AdaptiveSettings
from robust_ext.evaluations.adaptive import evaluate_defense as evaluate_defense
from robust_ext.evaluations.arms import Arm as Arm
from robust_ext.evaluations.binarization import BinarizationResult as BinarizationResult
from robust_ext.evaluations.binarization import BinarizationSettings as BinarizationSettings
from robust_ext.evaluations.binarization import binarization_test as binarization_test
from robust_ext.evaluations.binarization import plant as plant
from robust_ext.evaluations.callbacks import Callback as Callback
from robust_ext.evaluations.callbacks import MLflowCallback as MLflowCallback
from robust_ext.evaluations.callbacks import TensorBoardCallback as TensorBoardCallback
from robust_ext.evaluations.callbacks import WandbCallback as WandbCallback
from robust_ext.evaluations.causes.finding import Finding as Finding
from robust_ext.evaluations.comparison import Comparison as Comparison
from robust_ext.evaluations.comparison import compare as compare
from robust_ext.evaluations.diagnosis import DiagnosisResult as DiagnosisResult
from robust_ext.evaluations.diagnosis import DiagnosisSettings as DiagnosisSettings
from robust_ext.evaluations.diagnosis import diagnose as diagnose
from robust_ext.evaluations.mead import MeadResult as MeadResult
from robust_ext.evaluations.mead import MeadSettings as MeadSettings
from robust_ext.evaluations.mead import fit_detector as fit_detector
from robust_ext.evaluations.mead import mead as mead
from robust_ext.evaluations.robust_accuracy import RobustAccuracyResult as RobustAccuracyResult
from robust_ext.evaluations.robust_accuracy import RobustAccuracySettings as RobustAccuracySettings
from robust_ext.evaluations.robust_accuracy import robust_accuracy as robust_accuracy
from robust_ext.evaluations.unfinished import load_result as load_result
from robust_ext.models.adaptive import AdaptiveDefense as AdaptiveDefense
from robust_ext.models.bpda import BPDA as BPDA
from robust_ext.models.eot import EoT as EoT
from robust_ext.models.function_purifier import purifier as purifier
from robust_ext.models.purifier import Purifier as Purifier
from robust_ext.registry.attack import as_attack as as_attack
from robust_ext.registry.defense import as_defense as as_defense
from robust_ext.registry.detector import as_detector as as_detector
from robust_ext.registry.model import as_module as as_module

logging.getLogger(__name__).addHandler(logging.NullHandler())
