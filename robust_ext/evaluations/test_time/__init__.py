"""Adaptive test-time defenses: whether they are more robust than the static model they defend."""

from robust_ext.evaluations.test_time.api import evaluate_defense as evaluate_defense
from robust_ext.evaluations.test_time.plan import Step as Step
from robust_ext.evaluations.test_time.plan import plan_steps as plan_steps
from robust_ext.evaluations.test_time.result import TestTimeResult as TestTimeResult
from robust_ext.evaluations.test_time.settings import TestTimeSettings as TestTimeSettings
