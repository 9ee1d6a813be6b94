"""Modules for all that a model does."""

from robust_ext.models.binarized import BinarizedClassifier as BinarizedClassifier
from robust_ext.models.wrapping import Normalized as Normalized
