"""What an evaluation would cost against what it then took, and what the table of times adds up to."""

import re

import pytest
from torch import nn
from typer.testing import CliRunner

import robust_ext
from robust_ext.cli.app import app
from robust_ext.core.cost import Cost
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.defense import PassCounter, counted_parts
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.posing import planting_cost
from robust_ext.evaluations.binarization.problems import measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.evaluations.small import LINF, call
from tests.evaluations.subjects import SMALL, random_classifier, rounded

APGD, OTHER, PGD = "robust_ext:APGD(steps=10)", "foolbox:LinfPGD(steps=4)", "foolbox:LinfPGD(steps=12)"
GIVEN = NETWORK, INPUTS, LABELS = random_classifier()

# Evaluations by their kind, attacks and settings, and the phases whose rows are known exactly before; others take at
# most what is stated.
CALLS = {
    "binarization": (APGD, {"depths": (1,), "canaries": 0, **SMALL}, {"features", "attack", "verify"}),
    "robust_accuracy": ([APGD], {"epsilons": (0.05, 0.1)}, {"attack", "verify"}),
    "mead": ([APGD], {}, {"attack", "verify"}),
    "test_time": (APGD, {"defense": rounded}, {"attack", "verify"}),
    "binarization, deeper": ([APGD, OTHER], SMALL, {"features"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_before_and_after(tmp_path, name):
    attacks, settings, exact = CALLS[name]

    def run():
        return call(name.split(",")[0], NETWORK, attacks, INPUTS, LABELS, out=tmp_path / "run", **settings)

    before = robust_ext.estimate(run)
    assert not (tmp_path / "run").exists()
    assert before.done == 0
    content = run().content
    rows = {(row["phase"], row["of"]): row for row in content["time"]["phases"]}
    assert set(before.costs) <= {*rows, ("random", None)}
    for key, cost in before.costs.items():
        for way in ("forward", "backward"):
            stated, counted = getattr(cost, way), rows[key][way]
            assert counted == pytest.approx(stated) if key[0] in exact else counted <= stated + 1e-6
    for column in ("forward", "backward", "seconds"):
        assert sum(row[column] for row in rows.values()) == pytest.approx(content["time"]["total"][column])
    assert rows["rest", None]["seconds"] >= 0
    after = robust_ext.estimate(run)
    assert (after.samples, after.done, after.total.forward) == (before.samples, before.samples, 0)
    taken = sum(file.stat().st_size for kind in ("records.jsonl", "arrays.bin") for file in tmp_path.rglob(kind))
    assert taken / 3 < before.size < taken * 3


@pytest.mark.parametrize(("norm", "masked"), [("linf", False), pytest.param("l2", True, marks=pytest.mark.exhaustive)])
def test_an_evaluation_is_estimated_with_its_certificate_and_search_at_most(tmp_path, norm, masked):
    model = nn.Sequential(Rounding(), NETWORK).eval() if masked else NETWORK

    def call():
        options = {"budget": "quick", "planted": 8, "out": tmp_path / "run"}
        return robust_ext.evaluate(model, INPUTS, LABELS, ThreatModel(norm=norm, epsilon=0.02), **options).content

    before = robust_ext.estimate(call)
    assert not (tmp_path / "run").exists()
    content = call()
    taken = {"suite": Cost(), "rest": Cost()}
    names = {one["name"] for one in content["steps"]}
    for row in content["time"]["phases"]:
        suite = row["phase"] == "attack" and row["of"].split(" ")[0] in names and norm in row["of"]
        taken["suite" if suite else "rest"] += Cost(row["forward"], row["backward"])
    certificate, search = (before.costs[name, None] for name in ("certificate", "search"))
    stated = sum((cost for (phase, _), cost in before.costs.items() if phase == "attack"), Cost())
    assert not before.total.unknown
    # The search ends a step later at most.
    assert 0.1 * stated.forward < taken["suite"].forward <= 1.05 * stated.forward
    assert taken["suite"].backward <= 1.05 * stated.backward
    assert (content["search"] is not None) == masked
    most = certificate.forward + before.costs["verify", None].forward + masked * search.forward
    assert taken["rest"].forward <= most


@pytest.mark.parametrize(
    "words",
    [
        "mead --detector=lid --arm=linf:0.1=robust_ext:APGD()",
        pytest.param(f"binarization --attack={APGD} --eps=0.1", marks=pytest.mark.exhaustive),
        pytest.param(f"diagnose --attack={APGD} --eps=0.1", marks=pytest.mark.exhaustive),
        pytest.param("test-time --defense=hd(steps=2) --eps=0.1", marks=pytest.mark.exhaustive),
    ],
)
def test_a_dry_run_of_a_command_prints_its_cost_and_writes_nothing(tmp_path, words):
    out = tmp_path / "run"
    options = ["--samples=4", "--dry-run", f"--out={out}", "--model=digits", "--data=digits", "--in-process"]
    found = CliRunner().invoke(app, [*words.split(), *options])
    assert found.exit_code == 0, found.output
    assert re.search(r"^in all +[\d,]+ +[\d,]+ +[\d.]+$", found.output, re.M)
    assert not out.exists()


@pytest.mark.parametrize("settings", [{}, {"draws": 3}, {"boundary_points": 3, "inner_points": 7}])
def test_of_planting_is_exact(settings):
    checked = BinarizationSettings(threat_model=LINF, **{**SMALL, **settings})
    counter = PassCounter()
    features = counted_parts(NETWORK, INPUTS, checked, counter).features
    before = counter.forward
    measure(Forward(checked.fitting.measured(features, seed=0), 64), INPUTS, range(8), checked)
    assert counter.forward - before == planting_cost(checked).forward * 8


def estimated(call):
    """The rows forward and back that are stated before, and the result."""
    stated = robust_ext.estimate(call).total
    return [stated.forward, stated.backward], call().content


@pytest.mark.parametrize(
    ("attacks", "forward", "backward"),
    [
        (["robust_ext:APGD(steps=5,restarts=2,loss='margin')"], 12, 10),
        (["robust_ext:ObjectivePGD(steps=7,objective='kl',best=True)"], 9, 7),
        (["robust_ext:SpatialTransformation(mode='random',samples=4)"], 4, 0),
        ([APGD, PGD], 11 + 13, 22),
        (["art:ProjectedGradientDescent(max_iter=6)"], 7, 6),
    ],
)
def test_of_robust_accuracy(attacks, forward, backward):
    stated, content = estimated(lambda: robust_ext.robust_accuracy(NETWORK, attacks, INPUTS, LABELS, LINF))
    # One row an attack to verify what it found.
    assert stated == [8 * (forward + len(attacks)), 8 * backward]
    counted = [sum(one["passes"][way] for one in content["attacks"]) for way in ("forward", "backward")]
    assert counted[0] <= stated[0] <= 1.5 * counted[0]
    assert counted[1] <= stated[1] <= 1.5 * counted[1]


class Twice(nn.Module):
    def forward(self, x):
        return NETWORK(x) + NETWORK(x.flip(3))


def test_of_a_test_time_defense():
    stated, content = estimated(lambda: call("test_time", NETWORK, APGD, INPUTS, LABELS, defense=Twice().eval()))
    # Predictions of clean inputs and candidates, and the attack, of which each takes two rows of the static model.
    assert stated == [8 * (4 + 4 + 22), 8 * 20]
    (step,) = content["defended"]["attacks"]
    assert (step["passes"]["forward"], step["passes"]["backward"]) == (8 * 22, 8 * 20)
