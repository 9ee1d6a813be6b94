"""The modules in ``robust_ext.models`` as native models of ART and Foolbox; each is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_ext.estimators.binarized_art import BinarizedPyTorchClassifier as BinarizedPyTorchClassifier
    from robust_ext.estimators.binarized_foolbox import BinarizedPyTorchModel as BinarizedPyTorchModel
    from robust_ext.estimators.defended_art import DefendedPyTorchClassifier as DefendedPyTorchClassifier
    from robust_ext.estimators.defended_foolbox import DefendedPyTorchModel as DefendedPyTorchModel
    from robust_ext.estimators.defended_foolbox import Undetected as Undetected

_MODULES = {
    "BinarizedPyTorchClassifier": "binarized_art",
    "BinarizedPyTorchModel": "binarized_foolbox",
    "DefendedPyTorchClassifier": "defended_art",
    "DefendedPyTorchModel": "defended_foolbox",
    "Undetected": "defended_foolbox",
}

__all__ = [
    "BinarizedPyTorchClassifier",
    "BinarizedPyTorchModel",
    "DefendedPyTorchClassifier",
    "DefendedPyTorchModel",
    "Undetected",
]


def __getattr__(name: str) -> Any:
    # One library's users need not have the other installed.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
