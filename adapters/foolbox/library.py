"""Foolbox, imported in one place, without the warning that its import gives."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

with warnings.catch_warnings():
    # Foolbox 3.3.4 still imports gaussian_filter from where SciPy used to keep it.
    warnings.filterwarnings("ignore", message="Please import `gaussian_filter`", category=DeprecationWarning)
    foolbox: Any = importlib.import_module("foolbox")
