"""The binarization test: plant adversarial examples, and see whether an attack finds them."""

from robust_ext.evaluations.binarization.api import binarization_test as binarization_test
from robust_ext.evaluations.binarization.planting import Planted as Planted
from robust_ext.evaluations.binarization.planting import plant as plant
from robust_ext.evaluations.binarization.result import BinarizationResult as BinarizationResult
from robust_ext.evaluations.binarization.settings import BinarizationSettings as BinarizationSettings
