"""A number to publish: robust accuracy under a standard suite, and a certificate of the attack behind it."""

from robust_ext.evaluations.evaluate.api import evaluate as evaluate
from robust_ext.evaluations.evaluate.settings import EvaluateResult as EvaluateResult
from robust_ext.evaluations.evaluate.settings import EvaluateSettings as EvaluateSettings
