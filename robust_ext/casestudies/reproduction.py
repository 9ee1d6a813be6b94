"""Tables and figures of the four papers, as far as this package runs them, and where all the others are.

``papers.md`` is the list of every numbered item, docs/theory/papers.md. What runs here are small versions: defenses
trained on small images. So the papers' figures are compared with a tolerance, and what cannot be had has its reason.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from torch import nn

from robust_ext.casestudies import mead_tables
from robust_ext.casestudies.api import run_case_studies
from robust_ext.casestudies.base import CASE_STUDIES, Figure
from robust_ext.casestudies.hardness import compare_hardness
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.tabular import Columns, Row
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_integer, check_number
from robust_ext.core.wording import count
from robust_ext.datasets import load_dataset
from robust_ext.defenses.catalogue import TRAINED
from robust_ext.defenses.training.loop import TrainedPart
from robust_ext.defenses.training.parts import train
from robust_ext.demo.network import digits_network
from robust_ext.engine.identity import versions
from robust_ext.evaluations.adaptive import evaluate_defense
from robust_ext.evaluations.result import EvaluationResult

PAPERS = {
    "binarization": "Binarization test",
    "mead": "MEAD",
    "linear-region": "Linear-region attack",
    "test-time": "Adaptive test-time defenses",
}
"""Papers by what they are called here, and the headings of the list."""
_RANGE = re.compile(r"(table|figure|appendix)s? (\d+|B)(?: to (\d+))?$")
_EPSILON = 0.1
# Fewer steps and queries than the paper's, for two cores.
_SHORT: dict[str, Any] = {"steps": 20, "queries": 50, "draws": 4, "repeats": 5}
# What is run, by which step of it, and robust accuracy of the static model and of the defense in the paper (CIFAR-10,
# 8/255; clc 2/255), in per cent.
_TEST_TIME = {
    "table 1": (
        ("sodef", "worst", 53.9, 52.2),
        ("clc(learning_rate=0.05)", "worst", 0.0, 5.6),
        ("hd(radius=0.1, step_size=0.05)", "worst", 63.0, 61.0),
        ("anti-adversary", "worst", 66.6, 66.6),
        ("soap(flip=False, radii=4, steps=3, radius=0.033, step_size=0.02)", "worst", 0.0, 3.7),
        ("imf(radius=0.1)", "worst", 7.7, 12.6),
        ("aid(radius=0.1)", "worst", 49.3, 43.8),
        ("reverse(group_size=16, steps=8, step_size=0.025, radius=0.2, views=2)", "worst", 59.4, 58.4),
        ("adp(runs=2, steps=3)", "worst", 0.0, 33.7),
    ),
    "table 2": (("sodef", "transfer", 53.9, 52.2),),
    "table 3": (
        ("hd(radius=0.1, step_size=0.05)", "transfer", 63.0, 65.9),
        ("hd(radius=0.1, step_size=0.05)", "white-box", 63.0, 61.1),
        ("hd(radius=0.1, step_size=0.05)", "worst", 63.0, 61.0),
    ),
    "table 4": (("aid(radius=0.1)", "transfer", 49.3, 56.0), ("aid(radius=0.1)", "white-box", 49.3, 43.8)),
}
_STUDIES = {
    "figure 2": ("test score", ("score", "score"), ("weak_score", "right_score")),
    "figure 4": ("robust accuracy", ("claimed", "verified"), ("claimed", "true")),
}


@dataclass(frozen=True)
class Item:
    """A table, figure or appendix of a paper, with its place, as in the list."""

    paper: str
    name: str
    what: str
    where: str

    @property
    def runs(self) -> bool:
        """True if :func:`reproduce` runs it."""
        here = {"binarization": {*_STUDIES, "appendix B"}, "mead": {*mead_tables.ITEMS}, "test-time": {*_TEST_TIME}}
        return self.name in here.get(self.paper, ())


@cache
def items() -> tuple[Item, ...]:
    """Return every table and figure of the four papers, in their order."""
    text, found = (files("robust_ext.casestudies") / "papers.md").read_text(encoding="utf-8"), []
    for paper, title in PAPERS.items():
        section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) == 5 and (match := _RANGE.match(cells[1])):
                first, last = match[2], match[3] or match[2]
                numbers = range(int(first), int(last) + 1) if last.isdigit() else (first,)
                found += [Item(paper, f"{match[1]} {number}", cells[2], cells[3]) for number in numbers]
    return tuple(found)


class ReproductionResult(EvaluationResult):
    """A table or figure of a paper next to ours; see :class:`robust_ext.evaluations.result.EvaluationResult`."""

    kind = "reproduction"
    columns: ClassVar[Columns] = {
        **dict.fromkeys(("name", "quantity", "paper"), str),
        **dict.fromkeys(("ours", "difference"), float),
        "agrees": bool,
    }
    keys = ("name", "quantity")
    value = "ours"
    shown = ("name", "quantity", "paper", "ours", "difference", "agrees")

    @property
    def headline(self) -> str:
        """The number of figures that agree."""
        found = self.content
        agree = f"{found['agree']} of {found['compared']} figures within {found['tolerance']:g}"
        return f"{found['item']} of {found['paper']}: {agree}"

    def rows(self) -> list[Row]:
        """One a figure."""
        return [self.row(**one) for one in self.content["figures"]]


def reproduce(
    paper: str,
    item: str,
    *,
    data: str = "digits",
    data_root: str | os.PathLike[str] | None = None,
    samples: int = 64,
    only: Sequence[str] = (),
    model: object = None,
    suite: str | None = None,
    tolerance: float = 0.1,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    **run: Any,
) -> ReproductionResult:
    """Run the small version of a table or figure, and put the paper's figures next to ours.

    Test scores and robust accuracies are shares. Of test-time defenses the gain is compared, robust accuracy of the
    defense less that of its static model, as the networks are others.

    Args:
        paper: One of :data:`PAPERS`.
        item: A table or figure of it, as in ``"figure 2"``.
        data: Of case studies and MEAD: ``"digits"``, ``"mnist"`` or ``"cifar10"``; test-time defenses run on digits.
        data_root: Folder with its files.
        samples: Number of test images; where defenses treat 16 together, a multiple of that.
        only: Of the case studies of figures 2 and 4: names of those to run; all by default.
        model: Of MEAD: the network, as of :func:`robust_ext.mead`; the embedded one for digits when left out.
        suite: Of MEAD: other attacks than the paper's collection for the data of the table.
        tolerance: The largest difference that counts as agreement, at least 0.
        seed: Of every draw.
        out: Folder for ``result.json``, ``report.html`` and the runs.
        **run: Further keywords of :func:`~robust_ext.casestudies.run_case_studies` and
            :func:`~robust_ext.evaluations.adaptive.evaluate_defense` that both have: how it is run.

    Raises:
        InvalidArgumentError: There is no such item, or this package alone does not run it; the text names its place.
    """
    check_choice("paper", paper, tuple(PAPERS))
    known = {one.name: one for one in items() if one.paper == paper}
    asked = next((name for name in known if name.lower() == " ".join(item.split()).lower()), item)
    found = known[check_choice("item", asked, tuple(known))]
    check_number("tolerance", tolerance, minimum=0)
    check_integer("samples", samples, minimum=1)
    if not found.runs:
        here = " or ".join(f"{one.paper} {one.name!r}" for one in items() if one.runs)
        raise InvalidArgumentError("item", found.name, f"{here}; this one is not run here, but: {found.where}")
    folder, begun = None if out is None else Path(out), time.perf_counter()
    if paper == "binarization":
        given = {"data": data, "data_root": data_root, "samples": samples, "seed": seed, **run}
        setup = f"small versions of the defenses on {data}, {count(samples, 'test image')}"
        if found.name in _STUDIES:
            setup += f", {len(only)} of {len(CASE_STUDIES)} defenses" * bool(only)
            figures = _of_studies(found.name, folder, only, given)
        else:
            figures = compare_hardness(folder, **given)
    elif found.name == "figure 1":
        setup, figures = "means over 20 data sets", mead_tables.compare_objectives(seed)
    elif paper == "mead":
        given = {"model": model, "data": data, "data_root": data_root, "samples": samples, "suite": suite}
        setup = f"{'the embedded network' if model is None else 'a network that was given'}, {samples} images of {data}"
        figures = mead_tables.compare_tables(found.name, folder, **given, seed=seed, **run)
    else:
        check_choice("data", data, ("digits",))
        setup = f"small versions of the defenses on digits, linf {_EPSILON}, fewer steps and queries"
        setup += f", {count(samples, 'test image')}"
        figures = _of_defenses(found.name, folder, samples, {"seed": seed, **run})
    rows = [_compared(*one, tolerance=tolerance) for one in figures]
    content = {**_described(found, rows), "setup": setup, "tolerance": tolerance, "seed": seed}
    spent = {"seconds": time.perf_counter() - begun, "settings": {"data": data, "samples": samples}}
    return ReproductionResult({**content, **spent, "versions": versions()}).saved(folder)


def _described(item: Item, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the compared figures, and how many agree."""
    agreed = [bool(row["agrees"]) for row in rows if row["agrees"] is not None]
    return {
        "kind": "reproduction",
        "paper": PAPERS[item.paper],
        "item": item.name,
        "what": item.what,
        "where": item.where,
        "figures": rows,
        "agree": sum(agreed),
        "compared": len(agreed),
    }


def _compared(name: str, quantity: str, paper: float | str | None, ours: float | None, *, tolerance: float) -> Row:
    """Return a figure of the paper next to ours; a bound as text, ``"< .95"``, agrees where it holds."""
    row: dict[str, Any] = {"name": name, "quantity": quantity, "ours": ours, "difference": None, "agrees": None}
    row["paper"] = paper if paper is None or isinstance(paper, str) else f"{paper:.3f}"
    if ours is None or paper is None:
        return row
    if isinstance(paper, str):
        sign, bound = paper.split()
        return {**row, "agrees": {"<": ours < float(bound), ">": ours > float(bound)}.get(sign, ours >= float(bound))}
    return {**row, "difference": ours - paper, "agrees": abs(ours - paper) <= tolerance + 1e-9}


def _of_studies(item: str, folder: Path | None, only: Sequence[str], given: dict[str, Any]) -> Iterator[Figure]:
    quantity, ours, published = _STUDIES[item]
    result = run_case_studies(only, out=folder and folder / "runs", **given)
    for study in result.content["studies"]:
        for kind, own, paper in zip(("weak", "right"), ours, published, strict=True):
            recipe = study["recipes"][kind]
            value = recipe["score"] if own == "score" else recipe["robust_accuracy"][own]
            yield f"{study['title']}, {kind} recipe", quantity, study["published"][paper], value


def _of_defenses(item: str, folder: Path | None, samples: int, run: dict[str, Any]) -> Iterator[Figure]:
    network, threat_model = digits_network(), ThreatModel(norm="linf", epsilon=_EPSILON)
    inputs, labels = load_dataset("digits").take(range(samples))
    train_set = load_dataset("digits", split="train")
    known, results = _TEST_TIME[item], dict[str, Any]()
    for text, measured, static, defended in known:
        name = text.partition("(")[0]
        if text not in results:
            classifier: nn.Module = network
            weights = None
            with TemporaryDirectory() as temporary:
                if name in TRAINED or name == "soap":
                    part = train(name, network, *train_set.take(train_set.choose(1000, seed=0)), epsilon=_EPSILON)
                    if isinstance(part, TrainedPart):
                        weights = Path(temporary) / "part.safetensors"
                        part.save(weights)
                    else:
                        classifier = part
                results[text] = evaluate_defense(
                    text,
                    None,
                    inputs,
                    labels,
                    threat_model,
                    classifier=classifier,
                    defense_weights=weights,
                    out=folder and folder / "runs" / name,
                    full=any(one[1] != "worst" for one in known),
                    **_SHORT,
                    **run,
                ).content
        content = results[text]
        alone = {row["category"]: row["alone"] for row in content["categories"]}
        left = content["defended"]["worst_case"]["robust_accuracy"] if measured == "worst" else alone.get(measured)
        gain = None if left is None else left - content["static"]["worst_case"]["robust_accuracy"]
        words = "gain in the worst case" if measured == "worst" else f"gain under {measured} attacks"
        yield name, words, (defended - static) / 100, gain
