"""The tables and figure 1 of the MEAD paper beside ours, from a run of the paper's collection of attacks.

Source: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022).
``mead_tables.csv`` holds the paper's numbers, AUROC and FPR at 95% TPR in per cent, by group of attacks (tables 5 to 9
and 11 to 15), by norm and objective (tables 1 and 2), and successful attacks a sample (tables 4 and 10).
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.casestudies.base import Figure
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.mead.api import mead
from robust_ext.evaluations.mead.fitting import find_detectors
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.evaluations.unfinished import load_result
from robust_ext.registry.model import as_module

_DETECTORS = ("nss", "kd-bu", "lid", "fs", "magnet")
_NORMS = ("l1", "l2", "linf", "none")
_METRICS = {"auroc": "auroc", "fpr": "fpr_at_95_tpr"}
# The data and the detectors of a table; how often attacks succeed does not depend on one, and FS needs no training.
_TABLES: dict[int, tuple[str | None, tuple[str, ...]]] = {
    1: ("cifar10", _DETECTORS),
    2: ("mnist", _DETECTORS),
    3: (None, _DETECTORS),
    4: ("cifar10", ("fs",)),
    **{5 + place: ("cifar10", (name,)) for place, name in enumerate(_DETECTORS)},
    10: ("mnist", ("fs",)),
    **{11 + place: ("mnist", (name,)) for place, name in enumerate(_DETECTORS)},
}
ITEMS = ("figure 1", *(f"table {number}" for number in _TABLES))
"""What runs here."""
# Most images to fit detectors on, to attack for supervised ones, and to calibrate with; `robust-ext mead` takes more.
_FITTED, _ATTACKED, _CALIBRATING = 2000, 400, 400


@cache
def published() -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the paper's numbers by data, row and objective (``"all"``), as shares; those it does not give are absent.

    Example:
        >>> published()["cifar10", "linf 0.125", "all"]["nss auroc"]
        0.094
    """
    text = (files("robust_ext.casestudies") / "mead_tables.csv").read_text(encoding="utf-8")
    found = {}
    for row in csv.DictReader(text.splitlines()):
        place = (row.pop("data"), row.pop("row"), row.pop("objective"))
        # Successes are counts, all others per cent.
        found[place] = {
            name: float(value) if name == "successes" else round(float(value) / 100, 4)
            for name, value in row.items()
            if value
        }
    return found


def compare_tables(
    item: str,
    folder: Path | None,
    *,
    model: object = None,
    data: str,
    data_root: str | os.PathLike[str] | None,
    samples: int,
    suite: str | None = None,
    seed: int,
    **run: Any,
) -> Iterator[Figure]:
    """Attack a network by the collection of a table's data, and yield the paper's numbers and ours.

    The detectors are fitted on training images of ``data``; tables of one collection share a run in the folder. Without
    a model the network is that of the digits. ``suite`` replaces the collection.
    """
    number = int(item.split()[1])
    source, names = _TABLES[number]
    source = source or ("cifar10" if data == "cifar10" else "mnist")
    network = as_module(digits_network() if model is None else model).module
    train_set, test_set = (load_dataset(data, root=data_root, split=split) for split in ("train", "test"))
    calibrating = min(_CALIBRATING, len(train_set) // 4)
    fitted = min(_FITTED, len(train_set) - calibrating)
    rows = train_set.choose(fitted + calibrating, seed=seed)
    place = folder and folder / "runs" / (suite or f"paper-{source}").replace(os.sep, "-")
    detectors = find_detectors(
        sorted({*names, *_detectors_of(place)}),
        network,
        *train_set.take(rows[:fitted]),
        attacked=min(_ATTACKED, fitted // 2),
        preset="auto",
        bounds=(0.0, 1.0),
        seed=seed,
        folder=folder and folder / "detectors",
        report=lambda _: None,
    )
    result = mead(
        network,
        suite or f"paper-{source}",
        *test_set.take(range(samples)),
        ThreatModel(norm="linf", epsilon=1.0),
        detectors=detectors,
        detector_data=train_set.take(rows[fitted:])[0],
        out=place,
        seed=seed,
        **run,
    )
    content = {
        "detectors": [one for one in result.content["detectors"] if one["name"] in names],
        "averages": [one for one in result.content["averages"] if one["detector"] in names],
    }
    yield from _TABLE_ROWS.get(number, _of_groups)(content, source)


def _detectors_of(place: Path | None) -> set[str]:
    """Return the detectors that a run has scores of, which have to take part again."""
    file = place and place / "result.json"
    return {one["name"] for one in load_result(file).content["detectors"]} if file and file.is_file() else set()


def _of_norms(content: dict[str, Any], data: str) -> Iterator[Figure]:
    """Tables 1 and 2: averages over the groups of a norm, of all attacks and by objective."""
    for one in content["averages"]:
        if one["norm"] != "all":
            row = (data, one["norm"] or "none", one["objective"] or "all")
            for short, metric in _METRICS.items():
                words = f"{_WORDS[short]}, {row[1]}, {row[2]}"
                yield one["detector"], words, published().get(row, {}).get(f"{one['detector']} {short}"), one[metric]


def _of_detectors(content: dict[str, Any], data: str) -> Iterator[Figure]:
    """Table 3: the averages of the norms of all attacks."""
    for one in content["averages"]:
        if one["norm"] == "all" and one["objective"] is None:
            for short, metric in _METRICS.items():
                known = [published()[data, norm, "all"][f"{one['detector']} {short}"] for norm in _NORMS]
                yield one["detector"], _WORDS[short], round(float(np.mean(known)), 4), one[metric]


def _of_successes(content: dict[str, Any], data: str) -> Iterator[Figure]:
    """Tables 4 and 10: successful attacks a sample, as a share of the attacks of a group."""
    sizes = Counter(arm.group for arm in load_suite(f"paper-{data}"))
    for row in content["detectors"][0]["results"]:
        known = published().get((data, row["group"], "all"))
        if known and row["objective"] is row["algorithm"] is None:
            theirs = known["successes"] / sizes[row["group"]]
            yield row["group"], "successful attacks", theirs, row["successes_per_sample"] / row["arms"]


def _of_groups(content: dict[str, Any], data: str) -> Iterator[Figure]:
    """Tables 5 to 9 and 11 to 15: a detector by group, of all attacks."""
    (entry,) = content["detectors"]
    for row in entry["results"]:
        known = published().get((data, row["group"], "all"))
        if known and row["objective"] is row["algorithm"] is None:
            for short, metric in _METRICS.items():
                yield row["group"], _WORDS[short], known.get(f"{entry['name']} {short}"), row[metric]


_WORDS = {"auroc": "AUROC", "fpr": "FPR at 95% TPR"}
_TABLE_ROWS = {1: _of_norms, 2: _of_norms, 3: _of_detectors, 4: _of_successes, 10: _of_successes}


# Figure 1 (section 3.3): budgets, and the accuracies of classifier and detectors; the rest is not in the paper.
_BUDGETS = {"ace": 1.2, "gini": 5.0}
_REACH = 16.0
_SETS = 20
_FIGURE_1 = (
    *((f"classifier attacked by {one}", "accuracy", ("classifier", one), 0.5) for one in _BUDGETS),
    ("detector trained on ace, tested on ace", "accuracy", ("ace", "ace"), 0.71),
    ("detector trained on ace, tested on gini", "accuracy", ("ace", "gini"), 0.62),
    ("detector trained on gini, tested on gini", "accuracy", ("gini", "gini"), 0.87),
    ("detector trained on gini, tested on ace", "accuracy", ("gini", "ace"), 0.63),
    ("detector trained on both, tested on gini", "accuracy", ("both", "gini"), 0.798),
    ("detector trained on both, tested on ace", "accuracy", ("both", "ace"), 0.663),
)


def compare_objectives(seed: int) -> Iterator[Figure]:
    """Train detectors on points that one objective makes, test them on those of another; means over 20 data sets.

    Two normal clouds of 300 points, 70% of which train a network of one hidden layer. Half of the others, with their
    adversarial points, train a support vector machine; the other half tests it.
    """
    found = [_objectives_once(derive_seed(seed, "figure 1", number)) for number in range(_SETS)]
    for name, quantity, key, paper in _FIGURE_1:
        yield name, quantity, paper, float(np.mean([one[key] for one in found]))


def _objectives_once(seed: int) -> dict[tuple[str, str], float]:
    """Return the accuracies of one data set, by what was trained on and tested on."""
    from sklearn.svm import SVC

    with seeded_globals(seed):
        labels = torch.arange(600) % 2
        points = torch.randn(600, 2) + (1.0 - 2.0 * labels)[:, None]
        network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        for _ in range(20):
            for rows in torch.split(torch.randperm(420), 32):
                optimizer.zero_grad()
                torch.autograd.backward(nn.functional.cross_entropy(network(points[rows]), labels[rows]))
                optimizer.step()
    network.eval().requires_grad_(requires_grad=False)
    clean, truth, adversarial = points[420:], labels[420:], dict[str, Tensor]()
    target = Target(module=network, bounds=(-_REACH, _REACH), classes=2, input_shape=(2,), device=clean.device)
    for name, epsilon in _BUDGETS.items():
        threat_model = ThreatModel(norm="linf", epsilon=epsilon, bounds=(-_REACH, _REACH))
        attack, draws = ObjectivePGD(objective=name), stream(seed, name)
        adversarial[name] = run_attack(attack, target, clean, truth, threat_model=threat_model, generator=draws)
    found = {
        ("classifier", name): float((network(x).argmax(1) == truth).float().mean()) for name, x in adversarial.items()
    }
    half = len(clean) // 2
    for trained, names in {"ace": ["ace"], "gini": ["gini"], "both": ["ace", "gini"]}.items():
        detector = SVC(kernel="rbf").fit(*_labelled(clean[:half], [adversarial[name][:half] for name in names]))
        for tested in _BUDGETS:
            held_out = _labelled(clean[half:], [adversarial[tested][half:]])
            found[trained, tested] = float(detector.score(*held_out))
    return found


def _labelled(clean: Tensor, adversarial: list[Tensor]) -> tuple[Any, Any]:
    """Return points, and whether they are adversarial."""
    flags = np.repeat([0, 1], [len(clean), sum(map(len, adversarial))])
    return torch.cat([clean, *adversarial]).numpy(), flags
