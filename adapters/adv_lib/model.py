"""Models of adv-lib: there are none."""

from __future__ import annotations


def adapt_model(model: object) -> None:
    """Nothing, whatever comes: what adv-lib has of modules, such as its normaliser, are plain modules."""
