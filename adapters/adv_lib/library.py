"""adv-lib, imported without the packages that only its plots and pretrained networks need, and repaired as it runs.

Wherever adv-lib does not raise, results are those of adv-lib to the bit.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.torch_version import TorchVersion

# What adv-lib imports when it is imported: for its plots, for LPIPS, and from Pythons before 3.12.
_WANTED = {"visdom": (), "torchvision": ("models",), "distutils": ("version",)}


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


@contextmanager
def _stand_ins() -> Iterator[None]:
    added = []
    for name, parts in _WANTED.items():
        before, full = set(sys.modules), [name, *(f"{name}.{part}" for part in parts)]
        try:
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name)
            for one in full:
                importlib.import_module(one)
        except Exception:
            # A torchvision for another torch, say; what it imported before it failed would hide the stand-ins.
            for one in [one for one in set(sys.modules) - before if one.split(".")[0] == name]:
                del sys.modules[one]
            for one in full:
                module: Any = ModuleType(one)
                # Without a path, Python would not look for parts inside; with one, it takes them from sys.modules.
                module.__path__ = []
                # Of distutils, adv-lib compares releases of torch.
                module.LooseVersion = TorchVersion
                parent, _, part = one.rpartition(".")
                if parent:
                    setattr(sys.modules[parent], part, module)
                sys.modules[one] = module
            added += full
    try:
        yield
    finally:
        for one in added:
            sys.modules.pop(one, None)


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
