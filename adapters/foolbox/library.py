"""Foolbox, imported in one place."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # Foolbox 3.3.4 still imports gaussian_filter from where SciPy used to keep it.
    warnings.filterwarnings("ignore", message="Please import `gaussian_filter`", category=DeprecationWarning)
    import foolbox

__all__ = ["foolbox"]
