"""torchattacks has no models of its own: it attacks any module of PyTorch."""

from __future__ import annotations


def adapt_model(model: object) -> None:
    """None, whatever it is: objects of torchattacks are attacks."""
    return
