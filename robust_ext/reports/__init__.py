"""Reports: a result as a table for the terminal, as one self-contained page, and as files in a folder.

Matplotlib, jinja2 and Pillow are imported when a page is rendered, not when this package is imported.
"""

from __future__ import annotations

from robust_ext.reports.examples import Example
from robust_ext.reports.html import render_html
from robust_ext.reports.saving import save
from robust_ext.reports.table import table

__all__ = ["Example", "render_html", "save", "table"]
