"""Robust accuracy: security curves of a model under many attacks, and the worst case over them."""

from robust_ext.evaluations.robust_accuracy.api import robust_accuracy as robust_accuracy
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracyResult as RobustAccuracyResult
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings as RobustAccuracySettings
