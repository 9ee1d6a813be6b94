"""The case studies by name, in the order of Zimmermann et al. 2022, section 4."""

from __future__ import annotations

from importlib import import_module

from robust_ext.casestudies.base import CaseStudy
from robust_ext.core.validation import check_choice

CASE_STUDIES = {
    "thermometer": "Thermometer",
    "k_winners": "KWinners",
    "feature_scattering": "FeatureScattering",
    "pcl": "PrototypeConformity",
    "mixup_inference": "MixupInference",
    "empir": "Empir",
    "curriculum": "Curriculum",
    "adversarial_interpolation": "AdversarialInterpolation",
    "ecoc": "ErrorCorrectingCodes",
    "mmc": "MaxMahalanobis",
    "odds": "Odds",
    "trapdoor": "Trapdoor",
    "ml_loo": "MLLOO",
}
"""Name of each, which is that of its file, and its class there."""


def load_case_study(name: str) -> CaseStudy:
    """The case study of this name, one of :data:`CASE_STUDIES`; its file is imported now."""
    check_choice("name", name, tuple(CASE_STUDIES))
    made: CaseStudy = getattr(import_module(f"robust_ext.casestudies.{name}"), CASE_STUDIES[name])()
    return made
