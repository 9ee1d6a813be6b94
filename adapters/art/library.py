"""ART, imported in one place and without writing to the user's home folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any


def _load_art() -> Any:
    """Import ART with the subpackages used here.

    The first import of ART creates a folder ``.art`` in the home folder. Where there is none and nobody imported ART
    before, its configuration is read with a temporary home folder instead, which is gone when this returns; ART's data
    path is then set to where it would have been, so that whoever has ART download something still finds it there.
    """
    first = "art" not in sys.modules and not (Path.home() / ".art" / "config.json").exists()
    config = _load_config_elsewhere() if first else None
    for name in ("art", "art.attacks.evasion", "art.estimators.classification"):
        importlib.import_module(name)
    art = sys.modules["art"]
    if config is not None:
        # Imported before its package, the module is not yet an attribute of it.
        art.config = config  # type: ignore[attr-defined]
    return art


def _load_config_elsewhere() -> ModuleType | None:
    package = importlib.util.find_spec("art")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    file = Path(folders[0], "config.py") if folders else Path()
    spec = importlib.util.spec_from_file_location("art.config", file) if file.is_file() else None
    if spec is None or spec.loader is None:
        return None
    config = importlib.util.module_from_spec(spec)
    data_path = str(Path.home() / ".art" / "data")
    variables = ("HOME", "USERPROFILE")
    before = {name: os.environ.get(name) for name in variables}
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.environ.update(dict.fromkeys(variables, folder))
            spec.loader.exec_module(config)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    config.ART_DATA_PATH = data_path  # type: ignore[attr-defined]
    sys.modules["art.config"] = config
    return config


art = _load_art()
