"""Reports: a result as a table for the terminal, as one self-contained page, and as files in a folder.

Matplotlib, jinja2 and Pillow are imported when a page is rendered, not when this package is imported.
"""

from __future__ import annotations

from robust_ext.reports.adaptive import defense_table, render_defense_html
from robust_ext.reports.examples import Example
from robust_ext.reports.html import render_html
from robust_ext.reports.mead_html import render_mead_html
from robust_ext.reports.mead_table import mead_table
from robust_ext.reports.robust_accuracy import render_robust_accuracy_html, robust_accuracy_table
from robust_ext.reports.saving import save
from robust_ext.reports.table import table

__all__ = [
    "Example",
    "defense_table",
    "mead_table",
    "render_defense_html",
    "render_html",
    "render_mead_html",
    "render_robust_accuracy_html",
    "robust_accuracy_table",
    "save",
    "table",
]
