"""Two places where adv-lib 0.2.8 raises although the attack itself could go on, repaired while an attack runs.

Wherever adv-lib does not raise, results are those of adv-lib to the bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor


class _Numpy:
    """numpy, whose percentile of no values at all is 0."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def percentile(self, values: Any, q: float) -> Any:
        return np.percentile(values, q) if values.size else 0.0


@contextmanager
def repaired() -> Iterator[None]:
    """Let FMN (l0) and StrAttack end where they would raise.

    FMN for l0 takes the largest of the k largest changes, and raises where k is 0 in each row, that is, where one
    value suffices for all of them; in a batch with another row it takes k = 1 there, and so it does here. StrAttack's
    second phase takes a percentile of the changes found, and raises where none were found; here it then changes
    nothing.
    """
    fmn: Any = importlib.import_module("adv_lib.attacks.fast_minimum_norm")
    structured: Any = importlib.import_module("adv_lib.attacks.structured_adversarial_attack")
    original, numpy = fmn.l0_projection_, structured.np

    def project(δ: Tensor, ε: Tensor) -> Tensor:
        out: Tensor = original(δ=δ, ε=ε.clamp(min=1))
        return out

    fmn.l0_projection_, structured.np = project, _Numpy()
    try:
        yield
    finally:
        fmn.l0_projection_, structured.np = original, numpy
