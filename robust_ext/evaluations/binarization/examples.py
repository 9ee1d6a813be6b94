"""Examples for the report, kept in the run folder as npz without pickle."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from robust_ext.core.files import replace_file
from robust_ext.reports import Example

_FILE = "examples.npz"


def save_examples(folder: Path, examples: Sequence[Example]) -> None:
    """Keep examples; those kept before are replaced."""
    about = [{"attack": e.attack, "sample": e.sample, "outcome": e.outcome, "bounds": e.bounds} for e in examples]
    arrays: dict[str, Any] = {f"clean{i}": e.clean for i, e in enumerate(examples)}
    arrays |= {f"candidate{i}": e.candidate for i, e in enumerate(examples)}
    content = io.BytesIO()
    np.savez_compressed(content, about=np.array(json.dumps(about)), **arrays)
    replace_file(folder / _FILE, content.getvalue())


def load_examples(folder: Path) -> list[Example]:
    """The examples kept in a folder; none where there are none."""
    if not (folder / _FILE).exists():
        return []
    with np.load(folder / _FILE, allow_pickle=False) as kept:
        return [
            Example(
                attack=one["attack"],
                sample=one["sample"],
                outcome=one["outcome"],
                clean=kept[f"clean{i}"],
                candidate=kept[f"candidate{i}"],
                bounds=(one["bounds"][0], one["bounds"][1]),
            )
            for i, one in enumerate(json.loads(str(kept["about"])))
        ]
