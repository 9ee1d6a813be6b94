"""Foolbox, imported in one place."""

from __future__ import annotations

from robust_ext.adapters.libraries import load_foolbox

foolbox = load_foolbox()

__all__ = ["foolbox"]
