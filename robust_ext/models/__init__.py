"""Modules: whatever a model does is done by one of these."""

from robust_ext.models.binarized import BinarizedClassifier as BinarizedClassifier
from robust_ext.models.wrapping import Normalized as Normalized
