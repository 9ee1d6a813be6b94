"""MEAD: a detector against many attacks at once; a sample counts as detected only when all of them are."""

from robust_ext.evaluations.arms import Arm as Arm
from robust_ext.evaluations.mead.api import mead as mead
from robust_ext.evaluations.mead.fitting import fit_detector as fit_detector
from robust_ext.evaluations.mead.fitting import load_detector as load_detector
from robust_ext.evaluations.mead.settings import MeadResult as MeadResult
from robust_ext.evaluations.mead.settings import MeadSettings as MeadSettings
from robust_ext.evaluations.mead.suites import load_suite as load_suite
from robust_ext.evaluations.mead.suites import suite_names as suite_names
