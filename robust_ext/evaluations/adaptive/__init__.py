"""Adaptive test-time defenses: whether they are more robust than the static model they defend."""

from robust_ext.evaluations.adaptive.api import evaluate_defense as evaluate_defense
from robust_ext.evaluations.adaptive.plan import Step as Step
from robust_ext.evaluations.adaptive.plan import plan_steps as plan_steps
from robust_ext.evaluations.adaptive.settings import AdaptiveResult as AdaptiveResult
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings as AdaptiveSettings
