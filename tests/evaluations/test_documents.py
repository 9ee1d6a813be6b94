"""The pages of docs name what results hold."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, diagnose, evaluate_defense, mead, robust_accuracy
from robust_ext.evaluations.result import EvaluationResult

DOCS = Path(__file__).parents[2] / "docs"
LINF = ThreatModel(norm="linf", epsilon=0.1)


def table(heading):
    return (DOCS / "result_json_worst_case.md").read_text(encoding="utf-8").split(f"| {heading} |")[1].split("\n\n")[0]


def names(text):
    return set(re.findall(r"`(\w+)(?:\[\])?`", text))


def documented(heading):
    rows = [line.split("|")[1] for line in table(heading).splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in names(cell)}


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 5)).eval()
    x = torch.rand(6, 1, 3, 3)
    with torch.no_grad():
        return network, x, network(x).argmax(1)


def test_robust_accuracy_and_adaptive_defenses(subject):
    network, x, y = subject
    content = robust_accuracy(network, "robust_ext:APGD(steps=2)", x, y, LINF).to_dict()
    assert documented("key of robust accuracy") == set(content)
    assert documented("key of its attacks") == set(content["attacks"][0])
    content = evaluate_defense(lambda x: x, None, x, y, LINF, classifier=network, steps=2, queries=5).to_dict()
    assert documented("key of a test-time evaluation") == set(content)
    for part in ("static", "defended"):
        assert documented("key of an attack on a defense") == set(content[part]["attacks"][0])


def test_diagnosis(subject):
    network, x, y = subject
    content = diagnose(network, "robust_ext:APGD(steps=2)", x, y, LINF, inner_points=9, queries=2).to_dict()
    section = (DOCS / "result_json.md").read_text(encoding="utf-8").split("## Diagnosis")[1].split("\n## ")[0]
    tables = [part for part in section.split("\n\n") if part.startswith("| key")]
    keys = [{name for line in part.splitlines()[2:] for name in names(line.split("|")[1])} for part in tables]
    assert keys == [set(content), set(content["attacks"][0])]


def test_mead(subject):
    network, x, y = subject
    detectors, pgd = {"spread": lambda x: x.flatten(1).std(1)}, "robust_ext:ObjectivePGD(steps=3)"
    threat_model = ThreatModel(norm="linf", epsilon=0.5)
    content = mead(network, pgd, x, y, threat_model, detectors=detectors, published=True, resamples=5).to_dict()
    assert documented("key of MEAD") == set(content)
    assert documented("key of a detector") == set(content["detectors"][0])
    assert documented("key of an arm") == set(content["arms"][0])
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
