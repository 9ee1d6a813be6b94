"""A diagnosis: whether an attack works on a model, and if not, why and what to do."""

from robust_ext.evaluations.diagnosis.api import diagnose as diagnose
from robust_ext.evaluations.diagnosis.settings import DiagnosisResult as DiagnosisResult
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings as DiagnosisSettings
