"""MEAD: a detector against many attacks at once; a sample counts as detected only when all of them are."""

from robust_ext.evaluations.arms import Arm as Arm
from robust_ext.evaluations.mead.api import mead as mead
from robust_ext.evaluations.mead.fitting import fit_detector as fit_detector
from robust_ext.evaluations.mead.fitting import load_detector as load_detector
from robust_ext.evaluations.mead.metric import ArmLabel as ArmLabel
from robust_ext.evaluations.mead.metric import MultiArmed as MultiArmed
from robust_ext.evaluations.mead.metric import PublishedCurve as PublishedCurve
from robust_ext.evaluations.mead.metric import multi_armed as multi_armed
from robust_ext.evaluations.mead.metric import published_curve as published_curve
from robust_ext.evaluations.mead.roc import Average as Average
from robust_ext.evaluations.mead.roc import Detection as Detection
from robust_ext.evaluations.mead.roc import average as average
from robust_ext.evaluations.mead.settings import MeadResult as MeadResult
from robust_ext.evaluations.mead.settings import MeadSettings as MeadSettings
from robust_ext.evaluations.mead.suites import load_suite as load_suite
from robust_ext.evaluations.mead.suites import suite_names as suite_names
