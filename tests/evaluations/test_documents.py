"""The pages of docs name what results hold."""

import re
from pathlib import Path

import pytest

from robust_ext import ThreatModel
from robust_ext.evaluations.result import EvaluationResult
from tests.evaluations.small import INPUTS, LABELS, NETWORK, call

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = {
    "robust_accuracy": {},
    "test_time": {"steps": 2, "queries": 5},
    "mead": {"published": True, "resamples": 5},
    "diagnosis": {"inner_points": 9, "queries": 2, "planted": 64, "references": True},
}
# Parts of results, and the tables that name their keys.
TABLES = {
    "robust_accuracy": {"": "key of robust accuracy", "attacks": "key of its attacks"},
    "test_time": {
        "": "key of a test-time evaluation",
        "static attacks": "key of an attack on a defense",
        "defended attacks": "key of an attack on a defense",
    },
    "mead": {"": "key of MEAD", "detectors": "key of a detector", "arms": "key of an arm"},
    "diagnosis": {"": "key", "attacks": "key of an attack"},
}


def table(heading, kind="mead"):
    page = "result_json" if kind == "diagnosis" else "result_json_worst_case"
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8").split("## Diagnosis")[-1]
    return text.split(f"| {heading} |")[1].split("\n\n")[0]


def names(text):
    return set(re.findall(r"`(\w+)(?:\[\])?`", text))


def documented(heading, kind="mead"):
    return {name for line in table(heading, kind).splitlines()[1:] for name in names(line.partition(" | ")[0])}


@pytest.mark.parametrize("kind", TABLES)
def test_the_keys_of_results_are_those_of_the_tables(kind):
    attack, ball = "robust_ext:ObjectivePGD(steps=3)", ThreatModel(norm="linf", epsilon=0.5)
    content = call(kind, NETWORK, attack, INPUTS, LABELS, ball, **SETTINGS[kind]).to_dict()
    for place, heading in TABLES[kind].items():
        part = content
        for key in place.split():
            part = part[key]
        assert documented(heading, kind) == set(part if part is content else part[0]), place
    if kind == "mead":
        row = content["detectors"][0]["results"][0]
        assert documented("key of a result") <= set(row) <= names(table("key of a result"))
        assert set(content["averages"][0]) <= names(table("key of MEAD"))


def test_the_columns_of_results():
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    for cls in EvaluationResult.__subclasses__():
        (line,) = re.findall(rf"^\| `{cls.__name__}` \|[^|]*\|(.*)\|$", page, re.MULTILINE)
        assert re.findall(r"`(\w+)`", line) == list(cls.columns)
        assert {*cls.keys, *cls.shown, cls.value} <= {*cls.columns}


def test_theory_names_files_that_exist():
    root, pages = DOCS.parent, [page.read_text(encoding="utf-8") for page in (DOCS / "theory").glob("*.md")]
    folders = [root / name for name in ("robust_ext", "tests", "benchmarks", "examples")]
    files = [f"/{file.relative_to(root).as_posix()}" for folder in folders for file in folder.rglob("*.py")]
    named = {name for page in pages for name in re.findall(r"`((?:\w+/)*\w+\.py)`", page)}
    assert len(named) > 50
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()
