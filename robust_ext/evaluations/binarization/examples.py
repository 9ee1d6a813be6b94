"""A few candidates of each attack beside what was planted, as images, kept for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from robust_ext.engine.store import Store
from robust_ext.evaluations.binarization.attacking import Attacked
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.reports import Example

# Samples of each attack that the report shows.
_EXAMPLES = 3


def example_arrays(problems: Problems, results: Mapping[str, Attacked], bounds: tuple[float, float]) -> dict[str, Any]:
    """Examples for the report, as arrays to be kept."""
    about: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for name, result in results.items():
        for row, sample in enumerate(problems.samples[:_EXAMPLES]):
            arrays[f"clean{len(about)}"] = problems.inputs[row].cpu().numpy()
            arrays[f"candidate{len(about)}"] = result.candidates[sample].cpu().numpy()
            arrays[f"planted{len(about)}"] = problems.planted[row, 0].cpu().numpy()
            outcome = result.records[sample]["outcome"]
            about.append({"attack": name, "sample": sample, "outcome": outcome, "bounds": bounds})
    return {"about": np.array(json.dumps(about)), **arrays}


def load_examples(store: Store) -> list[Example]:
    """The examples that are kept; none where there are none."""
    kept = store.load("examples")
    if kept is None:
        return []
    return [
        # Folders of versions before planted points were shown have none.
        Example(
            **about | {"bounds": tuple(about["bounds"])},
            clean=kept[f"clean{i}"],
            planted=kept.get(f"planted{i}"),
            candidate=kept[f"candidate{i}"],
        )
        for i, about in enumerate(json.loads(str(kept["about"])))
    ]
