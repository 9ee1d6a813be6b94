"""The cascade of attacks on a test-time defense: who is attacked by what, what may be stated of it, and its budget."""

import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_ext import ThreatModel, as_attack
from robust_ext.attacks._common.objectives import margin
from robust_ext.core.errors import AttackError
from robust_ext.defenses import HedgeDefense
from robust_ext.evaluations.adaptive import cascade
from robust_ext.evaluations.adaptive.content import _is_stated, _worst_case
from robust_ext.evaluations.adaptive.predictions import predict_afresh
from tests.evaluations.adaptive import test_evaluation as full
from tests.evaluations.adaptive.test_evaluation import NETWORK, Centred, Noise, Still, by_name, plain, step
from tests.evaluations.subjects import rounded
from tests.run_folders import runs_of

WEAK = ThreatModel(norm="linf", epsilon=0.04)
INPUTS = full.INPUTS[:20]
# Some samples are wrong without any attack.
LABELS = torch.where(torch.arange(20) % 7 == 3, (full.LABELS[:20] + 1) % 10, full.LABELS[:20])
evaluate = partial(full.evaluate, inputs=INPUTS, labels=LABELS, full=False)


def passes(result):
    return sum(sum(spent.values()) for spent in by_name(result, "passes").values())


def records_of(folder):
    """The records of each step by its title."""
    return {one.run["settings"].get("name", "clean"): one.records() for one in runs_of(folder).values()}


@pytest.mark.parametrize("epsilon", [0.3, 0.1, 0.05])
@pytest.mark.parametrize("defense", [rounded, lambda x: x], ids=["rounded", "none"])
def test_what_would_be_left_is_stated_only_where_all_others_were_run(defense, epsilon):
    """What a category's absence would leave is what a run of everything on everything says."""
    threat = ThreatModel(norm="linf", epsilon=epsilon)
    result, everything = (evaluate(defense, threat=threat, full=more) for more in (False, True))
    expected = {row["category"]: row for row in everything.content["categories"]}
    assert result.content["not_run"]
    for row in result.content["categories"]:
        for key in ("alone", "without"):
            assert row[key] is None or row[key] == pytest.approx(expected[row["category"]][key]), (row, key)


@pytest.mark.parametrize("defense", [rounded, Noise()], ids=["rounded", "noise"])
def test_each_step_runs_on_what_those_before_it_left(tmp_path, defense):
    result = evaluate(defense, out=tmp_path, repeats=3, draws=2)
    records, exposures = records_of(tmp_path), {"clean": "clean", **by_name(result, "exposure")}
    static, defended = (np.ones(20, dtype=bool) for _ in range(2))
    partial = {one["name"] for one in result.content["not_run"]}
    for name, exposure in exposures.items():
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
        worst, rows = result.content[side]["worst_case"], result.content[side]["attacks"]
        stated = [row["robust_accuracy"] for row in rows if row["robust_accuracy"] is not None]
        assert max(stated) <= result.content[side]["clean_accuracy"]
        assert worst["robust_accuracy"] <= min(stated) + 1e-12
        assert rows[-1]["still_robust"] == worst["robust_accuracy"]
    worst = result.content["defended"]["worst_case"]
    assert sum(worst["by"].values()) == round(20 * (1 - worst["majority"]))


@pytest.mark.parametrize("defense", [rounded, lambda x: x], ids=["rounded", "none"])
def test_fewer_passes_for_as_low_a_worst_case(tmp_path, defense):
    short = evaluate(defense, out=tmp_path / "short")
    whole = evaluate(defense, full=True, out=tmp_path / "full")
    assert short.defended <= whole.defended + 1e-9
    assert short.static <= whole.static + 1e-9
    assert passes(short) < passes(whole) / 3
    assert {*by_name(whole, "samples").values()} == {20}
    assert whole.content["not_run"] == []
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


def test_groups_are_run_whole_while_one_of_them_stands(tmp_path):
    result = evaluate(Centred, out=tmp_path, batch_size=8)
    assert all(count % 4 == 0 for count in by_name(result, "samples").values())
    for records in records_of(tmp_path).values():
        indices = {record["index"] for record in records}
        assert {index - index % 4 for index in indices} == {index for index in indices if index % 4 == 0}


def test_a_budget_ends_with_a_result_that_can_be_gone_on_with(tmp_path, monkeypatch):
    # Each attack takes a thousand seconds.
    tell = Mock()
    monkeypatch.setattr(cascade, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * tell.call_count))
    kinds = {"a": "naive", "b": "transfer", "c": "white-box"}
    run = partial(evaluate, rounded, [step(Still(name, does=tell), kind) for name, kind in kinds.items()])
    cut = run(minutes=20, out=tmp_path / "cut")
    assert [*by_name(cut)] == ["a", "b"]
    assert cut.content["not_run"] == [{"name": "c", "reason": "The time that was given was over."}]
    assert any("upper bound" in warning for warning in cut.content["warnings"])
    tell.reset_mock()
    rest, whole = run(out=tmp_path / "cut"), run(out=tmp_path / "whole")
    assert plain(rest.content) == plain(whole.content)
    assert rest.content["not_run"] == []


def test_categories_are_chosen(tmp_path):
    weak = {"threat": ThreatModel(norm="linf", epsilon=0.02), "out": tmp_path}
    result = evaluate(rounded, only=("naive", "transfer"), skip=("naive",), **weak)
    assert {*by_name(result, "category").values()} == {"transfer"}
    # What was run stays where more is run then.
    more = evaluate(rounded, skip=("black-box",), **weak)
    assert {*by_name(more, "category").values()} == {"naive", "transfer", "white-box"}
    assert more.defended <= result.defended


def test_transfer_is_not_weaker_than_the_naive_attack():
    """However few steps go through the defense."""
    found = by_name(evaluate(lambda x: x, steps=1, only=("naive", "transfer"), full=True))
    transfer = min(value for name, value in found.items() if name.startswith("APGD"))
    assert transfer <= found["PGD-20 on the static model"]


def test_no_attack_goes_beyond_the_quarter():
    """Nor one that comes after no other; naive ones come first in any case."""
    kinds = {"a": "naive", "b": "white-box", "c": "white-box", **dict.fromkeys("defgh", "black-box")}
    steps = [
        step(Still(name, passes=100), kind, after="a" if kind == "black-box" else "") for name, kind in kinds.items()
    ]
    result = evaluate(lambda x: x, steps, threat=WEAK)
    samples = by_name(result, "samples")
    stood = round(20 * result.content["defended"]["clean_accuracy"])
    assert samples["a"] == stood
    # A quarter of eight attacks on 20 samples, of a hundred passes; three more judge each sample.
    assert stood < sum(samples.values()) <= 4000 / 103
    assert min(samples.values()) < stood
    assert {one["name"] for one in result.content["not_run"]} > set("efgh")
    assert evaluate(lambda x: x, steps[1], threat=WEAK).content["not_run"] == []


def samples_of(*counts):
    """How many samples each attack is run on, of those that come after a first one and take so many passes."""
    later = [step(Still(f"{count} {place}", passes=count), after="first") for place, count in enumerate(counts)]
    first = step(Still("first", passes=10), "naive")
    return by_name(evaluate(lambda x: x, [first, *later], threat=WEAK), "samples")


def test_costly_attacks_share_samples_with_cheap_ones():
    """What follows is run on equally many samples, but for rounding; equal passes would be enough for all 20."""
    _, *samples = samples_of(*[100, 10] * 3).values()
    assert len(samples) == 6
    assert 5 >= max(samples) >= min(samples) >= 3


def test_what_costs_next_to_nothing_comes_before_costly_attacks_on_all_samples():
    """One pass, and three to be judged: on all 20 samples less than a twentieth of what there is for all attacks."""
    samples = samples_of(*[100] * 6, 1)
    assert list(samples)[:2] == ["first", "1 6"]
    assert samples["1 6"] == samples["first"] > max(samples[f"100 {place}"] for place in range(6))


def test_a_samples_draws_do_not_depend_on_what_is_judged_beside_it():
    defense = HedgeDefense(NETWORK, steps=1, radius=0.2, step_size=0.1)

    def margins(rows, number=0):
        return predict_afresh(defense, INPUTS[rows], LABELS[rows], ids=rows, seed=3, keys=("answers", number))[2]

    every = margins(list(range(20)))
    torch.testing.assert_close(margins([2, 5, 6]), every[[2, 5, 6]])
    assert (margins(list(range(20)), 1) != every).any(0)


def test_a_warm_start_is_the_best_point_so_far(tmp_path):
    # Also where a block's first sample is not attacked, as it is wrong without an attack.
    labels, starts = torch.where(torch.arange(20) % 8 == 0, (LABELS + 1) % 10, LABELS), []
    second = Still("second", does=lambda target: starts.append(target.starting_points), passes=0)
    first = step(as_attack("robust_ext:APGD(steps=3)", name="first"), "naive", exposure="static")
    run = {"labels": labels, "out": tmp_path, "threat": WEAK, "batch_size": 20}
    evaluate(lambda x: x, [first, step(second, warm=True)], **run)
    records = records_of(tmp_path)
    rows = [record["index"] for record in records["second"]]
    (points,) = (one[:, 0] for one in starts)
    assert rows
    assert not torch.equal(points, INPUTS[rows])
    best = [
        max(one["margin"] for name in ("clean", "first") for one in records[name] if one["index"] == row)
        for row in rows
    ]
    torch.testing.assert_close(margin(NETWORK(points), labels[rows]).detach(), torch.tensor(best))


@pytest.mark.parametrize("defense", [rounded, Noise()], ids=["rounded", "noise"])
def test_a_cascade_is_gone_on_with(tmp_path, defense):
    """What was spent, what is nearest and where searches begin are found again in the run folder."""

    def run(folder, error=None):
        mine = step(Still("mine", does=Mock(side_effect=error)))
        more = {"queries": 500, "repeats": 2, "draws": 2, "out": tmp_path / folder}
        return evaluate(defense, ["recommended", mine], threat=WEAK, **more)

    whole = run("whole")
    assert whole.content["not_run"]
    with pytest.raises(AttackError, match="stopped"):
        run("cut", RuntimeError("stopped"))
    for _ in range(2):
        assert plain(run("cut").content) == plain(whole.content)
