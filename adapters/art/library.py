"""ART, imported in one place and without writing to the user's home folder."""

from __future__ import annotations

from robust_ext.adapters.libraries import load_art

art = load_art()

__all__ = ["art"]
