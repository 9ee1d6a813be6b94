"""ART, imported without writing to the user's home folder, and workarounds for numpy 2 and repeatable attacks.

Nothing here changes ART for others.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tqdm.auto


def _load_art() -> Any:
    """Import ART with the subpackages used here.

    The first import of ART creates a folder ``.art`` in the home folder. Where there is none and nobody imported ART
    before, its configuration is read with a temporary home folder instead, which is gone when this returns; ART's data
    path is then set to where it would have been, so that whoever has ART download something still finds it there.
    """
    first = "art" not in sys.modules and not (Path.home() / ".art" / "config.json").exists()
    package = importlib.util.find_spec("art") if first else None
    folders = list(package.submodule_search_locations or []) if package is not None else []
    config = _config_elsewhere(Path(folders[0], "config.py")) if folders else None
    for name in ("art", "art.attacks.evasion", "art.estimators.classification"):
        importlib.import_module(name)
    art: Any = sys.modules["art"]
    if config is not None:
        # Imported before its package, the module is not yet an attribute of it.
        art.config = config
    return art


def _config_elsewhere(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("art.config", file) if file.is_file() else None
    if spec is None or spec.loader is None:
        return None
    config: Any = importlib.util.module_from_spec(spec)
    data_path = str(Path.home() / ".art" / "data")
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, HOME=folder, USERPROFILE=folder):
        spec.loader.exec_module(config)
    config.ART_DATA_PATH = data_path
    sys.modules["art.config"] = config
    return config


art = _load_art()


@contextmanager
def seeded_states() -> Iterator[None]:
    """Seed from numpy's global generator what would take its seed from the system.

    HopSkipJump, Boundary and Brendel-Bethge make a ``RandomState()`` of their own, which no global seed reaches.
    """
    original = np.random.RandomState

    class Seeded(original):  # type: ignore[misc,valid-type]
        def __init__(self, seed: Any = None) -> None:
            super().__init__(np.random.randint(2**31) if seed is None else seed)

    with mock.patch.object(np.random, "RandomState", Seeded):
        yield


def without_bars() -> AbstractContextManager[Any]:
    """Hide the progress bar that Brendel-Bethge always shows."""
    return mock.patch.object(tqdm.auto, "trange", lambda *steps, **settings: range(*steps))


def constructible(attack_class: type) -> type:
    """Return the class, or a subclass that can be constructed in its place.

    ``AdversarialPatchNumpy`` raises an AttributeError whenever clip values are given: it starts with their middle,
    which is a numpy float32, and its ``reset_patch`` takes anything but a Python float for the patch itself.
    """
    if attack_class.__name__ != "AdversarialPatchNumpy":
        return attack_class
    reset = attack_class.reset_patch  # type: ignore[attr-defined]

    def reset_patch(self: Any, value: Any) -> None:
        reset(self, float(value) if isinstance(value, np.floating) else value)

    return type(attack_class.__name__, (attack_class,), {"reset_patch": reset_patch})


def repair(attack: Any) -> None:
    """Let an attack object of ART 1.20 run on numpy 2, in silence and without writing files.

    GeoDA makes its basis by ``np.mat`` and the laser's generator its steps by ``np.asfarray``, both gone from numpy 2.
    GeoDA also saves its basis in the current folder, and loads any file of that name as the basis.
    GRAPHITE in its white-box form goes on for ever once its mask is empty and the input itself passes for its target.
    The attacks inside others show progress bars of their own. The methods concerned are replaced on this object alone,
    by the same code with other names around it.
    """
    for part in getattr(attack, "attacks", ()):
        _silence(part)
    if hasattr(attack, "_get_attack"):
        make = attack._get_attack
        attack._get_attack = lambda *args, **settings: _silence(make(*args, **settings))
    if type(attack).__name__ == "GRAPHITEWhiteboxPyTorch":
        evaluate = attack._eval
        attack._eval = lambda x, x_adv, mask, *rest: evaluate(x, x_adv, mask, *rest) if bool(mask[0].any()) else 0.0
    if type(attack).__name__ == "GeoDA":
        elsewhere = _Stand(os, path=_Stand(os.path, exists=lambda path: False))
        numpy = _Stand(np, mat=np.asarray, save=lambda path, array: None)
        attack._generate_2d_dct_basis = _renamed(attack._generate_2d_dct_basis, np=numpy)
        attack.generate = types.MethodType(_renamed(attack.generate.__func__, np=numpy, os=elsewhere), attack)
    generator: Any = getattr(attack, "_laser_generator", None)
    if hasattr(generator, "_random_direction"):
        numpy = _Stand(np, asfarray=lambda values: np.asarray(values, dtype=np.float64))
        generator._random_direction = _renamed(generator._random_direction, np=numpy)


def _silence(attack: Any) -> Any:
    if hasattr(attack, "verbose"):
        attack.verbose = False
    return attack


class _Stand:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _renamed(function: Any, **names: Any) -> Callable[..., Any]:
    """Copy a function with other objects under these global names."""
    around = {**function.__globals__, **names}
    made = types.FunctionType(function.__code__, around, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
