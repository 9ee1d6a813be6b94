"""Conversions of names and objects to attacks, models, detectors and defenses; and the adapters of libraries."""

from robust_ext.registry.attack import as_attack as as_attack
from robust_ext.registry.base import AdaptedModel as AdaptedModel
from robust_ext.registry.base import Adapter as Adapter
from robust_ext.registry.base import AttackListing as AttackListing
from robust_ext.registry.base import adapters as adapters
from robust_ext.registry.defense import as_defense as as_defense
from robust_ext.registry.detector import as_detector as as_detector
from robust_ext.registry.model import as_module as as_module
