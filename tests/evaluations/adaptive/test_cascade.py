"""The cascade of attacks on a test-time defense: who is attacked by what, what may be stated of it, and its budget."""

import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_ext import ThreatModel, evaluate_defense
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.adaptive import Step, cascade
from robust_ext.evaluations.adaptive.content import _is_stated, _worst_case
from tests.evaluations.adaptive.test_evaluation import THREAT, Centred, Noise, accuracy, plain
from tests.evaluations.subjects import rounded
from tests.run_folders import runs_of

SHORT = {"steps": 8, "queries": 20}


@pytest.fixture(scope="module")
def subject():
    inputs, labels = load_dataset("digits").take(range(20))
    # Some samples are wrong without any attack.
    return digits_network(), inputs, torch.where(torch.arange(20) % 7 == 3, (labels + 1) % 10, labels)


def evaluate(subject, defense, attacks=None, *, threat=THREAT, **keywords):
    network, inputs, labels = subject
    return evaluate_defense(defense, attacks, inputs, labels, threat, classifier=network, **{**SHORT, **keywords})


def passes(result):
    return sum(sum(attack["passes"].values()) for attack in result.content["defended"]["attacks"])


def records_of(folder):
    """The records of each step by its title, and the titles in the order of a result."""
    return {one.run["settings"].get("name", "clean"): one.records() for one in runs_of(folder).values()}


@pytest.mark.parametrize("epsilon", [0.3, 0.1, pytest.param(0.05, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("defense", [rounded, pytest.param(lambda x: x, marks=pytest.mark.exhaustive)])
def test_what_would_be_left_is_stated_only_where_all_others_were_run(subject, defense, epsilon):
    """What a category's absence would leave is what a run of everything on everything says."""
    threat = ThreatModel(norm="linf", epsilon=epsilon)
    result, full = (evaluate(subject, defense, threat=threat, full=more) for more in (False, True))
    expected = {row["category"]: row for row in full.content["categories"]}
    partial = {one["name"] for one in result.content["not_run"]}
    assert partial
    for row in result.content["categories"]:
        for key in ("alone", "without"):
            assert row[key] is None or row[key] == pytest.approx(expected[row["category"]][key]), (row, key)


@pytest.mark.parametrize("defense", [rounded, Noise()], ids=["rounded", "noise"])
def test_each_step_runs_on_what_those_before_it_left(subject, tmp_path, defense):
    result = evaluate(subject, defense, out=tmp_path, repeats=3, draws=2)
    records, attacks = records_of(tmp_path), result.content["defended"]["attacks"]
    static, defended = (np.ones(20, dtype=bool) for _ in range(2))
    partial = {one["name"] for one in result.content["not_run"]}
    for name in ("clean", *(attack["name"] for attack in attacks)):
        exposure = next((attack["exposure"] for attack in attacks if attack["name"] == name), "clean")
        wanted = {"clean": np.ones(20, dtype=bool), "static": static | defended}.get(exposure, defended)
        indices = {record["index"] for record in records[name]}
        assert indices <= set(np.flatnonzero(wanted)), name
        # Of few the passes were not enough for all.
        assert len(indices) == wanted.sum() or name in partial, name
        for record in records[name]:
            static[record["index"]] &= record["static"]
            # Three predictions choose, three count.
            defended[record["index"]] &= any(record["right"][:3])
    for side in ("static", "defended"):
        clean, rows = result.content[side]["clean_accuracy"], result.content[side]["attacks"]
        assert all(row["robust_accuracy"] is None or row["robust_accuracy"] <= clean for row in rows)
        assert rows[-1]["still_robust"] == result.content[side]["worst_case"]["robust_accuracy"]


@pytest.mark.parametrize(
    "defense", [rounded, pytest.param(lambda x: x, marks=pytest.mark.exhaustive)], ids=["rounded", "none"]
)
def test_fewer_passes_for_as_low_a_worst_case(subject, tmp_path, defense):
    short = evaluate(subject, defense, out=tmp_path / "short")
    full = evaluate(subject, defense, full=True, out=tmp_path / "full")
    assert short.defended <= full.defended + 1e-9
    assert short.static <= full.static + 1e-9
    assert passes(short) < passes(full) / 3
    assert all(attack["samples"] == 20 for attack in full.content["defended"]["attacks"])
    assert full.content["not_run"] == []
    # What an attack does to a sample does not depend on the others that it is run on.
    few, every = (records_of(tmp_path / name) for name in ("short", "full"))
    # Through the defense APGD leaves out what it has broken.
    names = [name for name in few if name in every and ", " not in name]
    assert sum(len(few[name]) for name in names) < sum(len(every[name]) for name in names)
    for name in names:
        margins = {record["index"]: record["margin"] for record in every[name]}
        for record in few[name]:
            assert record["margin"] == pytest.approx(margins[record["index"]], abs=1e-4), name


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**30))
def test_what_is_stated_of_some_steps_is_what_they_would_have_left_alone(steps, samples, seed):
    """Against what every step would break of every sample, of which a cascade sees a part."""
    draw = np.random.default_rng(seed)
    breaks = draw.random((steps + 1, samples)) < 0.4
    lost = np.maximum.accumulate(breaks)
    there = np.vstack([np.ones((1, samples), dtype=bool), ~lost[:-1]])
    seen = np.where(there, ~breaks | ~there, ~breaks[0])
    right = seen[:, :, None].astype(float)
    places = [0, *np.flatnonzero(draw.random(steps) < 0.6) + 1]
    if _is_stated(places, there, right.max(2) == 0):
        left = _worst_case(right[places], right[places], there[places])[1].mean()
        assert left == pytest.approx((~breaks[places].any(0)).mean())
    chosen, everything = _worst_case(right, right, there)
    assert everything.mean() == pytest.approx((~lost[-1]).mean())
    assert there[chosen, np.arange(samples)].all(), "no sample is lost to a step that was not run on it"


def test_groups_are_run_whole_while_one_of_them_stands(subject, tmp_path):
    result = evaluate(subject, Centred, out=tmp_path, batch_size=8)
    counts = {attack["name"]: attack["samples"] for attack in result.content["defended"]["attacks"]}
    assert all(count % 4 == 0 for count in counts.values())
    for records in records_of(tmp_path).values():
        indices = {record["index"] for record in records}
        assert {index - index % 4 for index in indices} == {index for index in indices if index % 4 == 0}


class Still(Attack):
    """Returns its inputs, and tells a clock."""

    traits = AttackTraits(batching="full", gradients=False)

    def __init__(self, name, tell):
        self.name, self.tell = name, tell

    def search(self, target, inputs, labels, *, threat_model, generator):
        target.module(inputs)
        self.tell()
        return inputs


def test_a_budget_ends_with_a_result_that_can_be_gone_on_with(subject, tmp_path, monkeypatch):
    # Each attack takes a thousand seconds.
    tell = Mock()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * tell.call_count)
    monkeypatch.setattr(cascade, "time", clock)

    def run(**keywords):
        steps = [
            Step(name=name, category=kind, attack=Still(name, tell), exposure="defense")
            for name, kind in (("a", "naive"), ("b", "transfer"), ("c", "white-box"))
        ]
        return evaluate(subject, rounded, steps, **keywords)

    cut = run(minutes=20, out=tmp_path)
    assert [attack["name"] for attack in cut.content["defended"]["attacks"]] == ["a", "b"]
    assert cut.content["not_run"] == [{"name": "c", "reason": "The time that was given was over."}]
    assert any("upper bound" in warning for warning in cut.content["warnings"])
    tell.reset_mock()
    rest, whole = run(out=tmp_path), run(out=tmp_path.with_name(f"{tmp_path.name}_whole"))
    assert plain(rest.content) == plain(whole.content)
    assert rest.content["not_run"] == []


def test_categories_are_chosen(subject, tmp_path):
    weak = {"threat": ThreatModel(norm="linf", epsilon=0.02), "out": tmp_path}
    result = evaluate(subject, rounded, only=("naive", "transfer"), skip=("naive",), **weak)
    assert {attack["category"] for attack in result.content["defended"]["attacks"]} == {"transfer"}
    # What was run stays where more is run then.
    more = evaluate(subject, rounded, skip=("black-box",), **weak)
    assert {attack["category"] for attack in more.content["defended"]["attacks"]} == {"naive", "transfer", "white-box"}
    assert more.defended <= result.defended


def test_transfer_is_not_weaker_than_the_naive_attack(subject):
    """However few steps go through the defense."""
    found = accuracy(evaluate(subject, lambda x: x, steps=1, only=("naive", "transfer"), full=True))
    transfer = min(value for name, value in found.items() if name.startswith("APGD"))
    assert transfer <= found["PGD-20 on the static model"]
