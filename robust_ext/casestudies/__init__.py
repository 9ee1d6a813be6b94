"""Thirteen published defenses, each with the evaluation that misjudged it and one that does not."""

from robust_ext.casestudies.api import run_case_studies
from robust_ext.casestudies.base import (
    CASE_STUDIES,
    CaseStudy,
    Measurement,
    Published,
    Recipe,
    Trained,
    load_case_study,
)

__all__ = [
    "CASE_STUDIES",
    "CaseStudy",
    "Measurement",
    "Published",
    "Recipe",
    "Trained",
    "load_case_study",
    "run_case_studies",
]
