"""adv-lib, imported without the packages that only its plots and pretrained networks need, and repaired as it runs.

Wherever adv-lib does not raise, results are those of adv-lib to the bit.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

# What adv-lib imports when it is imported: for its plots, for LPIPS, and from Pythons before 3.12.
_WANTED = {"visdom": (), "torchvision": ("models",), "distutils": ("version",)}


class _LooseVersion:
    """The part of ``distutils.version.LooseVersion`` for adv-lib: comparisons of torch releases."""

    def __init__(self, text: str) -> None:
        self.numbers = [int(number) for number in re.findall(r"\d+", text.split("+")[0])]

    def __ge__(self, other: _LooseVersion) -> bool:
        return self.numbers >= other.numbers


def load_adv_lib() -> Any:
    """Import adv-lib with its attacks on classifiers.

    adv-lib 0.2.8 imports visdom and torchvision, which no attack needs unless it draws plots or measures LPIPS, and
    ``distutils``, which Python 3.12 dropped. Where they are not installed, or cannot be imported, empty modules stand
    in for them during the import, and are gone when this returns. The attacks on segmentation are left alone: their
    import compiles code.
    """
    with _stand_ins(), warnings.catch_warnings():
        # distutils warns wherever it still exists; one docstring holds a backslash that is not a Python escape.
        warnings.filterwarnings("ignore", message=".*distutils", category=DeprecationWarning)
        for category in (DeprecationWarning, SyntaxWarning):
            warnings.filterwarnings("ignore", message=".*invalid escape sequence", category=category)
        importlib.import_module("adv_lib.attacks")
    return sys.modules["adv_lib"]


def _importable(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    before = set(sys.modules)
    try:
        for full in (name, *(f"{name}.{part}" for part in _WANTED[name])):
            importlib.import_module(full)
    except Exception:
        # A torchvision for another torch, say; what it imported before it failed would hide the stand-ins.
        for full in set(sys.modules) - before:
            if full.split(".")[0] == name:
                del sys.modules[full]
        return False
    return True


@contextmanager
def _stand_ins() -> Iterator[None]:
    missing = [name for name in _WANTED if name not in sys.modules and not _importable(name)]
    added = [full for name in missing for full in (name, *(f"{name}.{part}" for part in _WANTED[name]))]
    for full in added:
        module = ModuleType(full)
        # Without a path, Python would not look for parts inside; with one, it takes them from sys.modules.
        module.__path__ = []
        sys.modules[full] = module
        parent, _, part = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], part, module)
    if "distutils" in missing:
        sys.modules["distutils.version"].LooseVersion = _LooseVersion  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for full in added:
            sys.modules.pop(full, None)


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


adv_lib = load_adv_lib()
