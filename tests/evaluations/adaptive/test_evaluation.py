"""The evaluation of test-time defenses: masked gradients, randomness, groups, warnings; the cascade and its budget."""

import json
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_ext import ThreatModel, as_attack, evaluate_defense
from robust_ext.attacks._common.objectives import margin
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError, RunFolderError
from robust_ext.datasets import load_dataset
from robust_ext.defenses import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.demo.run import Rounded
from robust_ext.evaluations.adaptive import AdaptiveSettings, Step, cascade
from robust_ext.evaluations.adaptive.content import _is_stated, _worst_case
from robust_ext.evaluations.adaptive.findings import find_signs
from robust_ext.evaluations.adaptive.predictions import predict_afresh
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.company import one_image
from robust_ext.models.rows import Solution
from tests.evaluations.small import timeless
from tests.evaluations.subjects import rounded
from tests.run_folders import runs_of

THREAT = ThreatModel(norm="linf", epsilon=0.15)
SHORT = {"steps": 8, "queries": 20, "full": True}
NETWORK = digits_network()
INPUTS, LABELS = load_dataset("digits").take(range(24))
APGD = tuple(f"APGD-{loss}" for loss in ("ce", "margin"))


class Noise:
    random = True

    def __call__(self, x):
        return (x + 0.15 * torch.randn_like(x)).clamp(0, 1)


class Centred(AdaptiveDefense):
    """Takes the mean of its group of four off every image: what one row gets depends on the others."""

    batch_level = True

    def __init__(self, classifier):
        super().__init__(classifier, group_size=4)

    def solve(self, x, rng, *, record):
        return Solution(x - 0.1 * (x.mean(0, keepdim=True) - x.mean()), (x,))


class Still(Attack):
    """Returns its inputs, after passes of the target and whatever ``does`` does with it."""

    def __init__(self, name, *, does=lambda target: None, passes=1, batching="full"):
        self.name, self.does, self.passes = name, does, passes
        self.traits = AttackTraits(batching=batching, gradients=False)

    def cost(self, threat_model, *, classes):
        return Cost(self.passes)

    def search(self, target, inputs, labels, *, threat_model, generator):
        for _ in range(self.passes):
            target.module(inputs)
        self.does(target)
        return inputs


def step(attack, category="black-box", **more):
    return Step(name=attack.name, category=category, attack=attack, **{"exposure": "defense", **more})


def evaluate(defense, attacks=None, inputs=INPUTS, labels=LABELS, threat=THREAT, **settings):
    return evaluate_defense(defense, attacks, inputs, labels, threat, **{"classifier": NETWORK, **SHORT, **settings})


def by_name(result, key="robust_accuracy", part="defended"):
    return {attack["name"]: attack[key] for attack in result.content[part]["attacks"]}


def plain(content):
    return timeless(json.loads(json.dumps(content)))


def test_rounding_hides_from_gradients_and_from_nothing_else():
    result = evaluate(rounded)
    found = by_name(result)
    assert min(found[f"{name}, plain gradients"] for name in APGD) > 0.9
    assert max(found[f"{name}, BPDA identity"] for name in APGD) < 0.3
    assert result.defended < 0.3
    assert any("gradients are zero on 100%" in warning for warning in result.content["warnings"])
    # The paper's finding: no more robust than the static model.
    low, high = result.content["gain"]["interval"]
    assert low <= 0.05
    assert low <= result.content["gain"]["robust_accuracy"] <= high


def test_a_defense_without_a_graph_is_attacked_by_the_rest():
    """What needs its gradients is refused and told of, the naive attack too; the identity gets through."""
    result = evaluate(lambda x: rounded(x.detach()))
    refused = {f"{name}, plain gradients" for name in (*APGD, "APGD-targeted-dlr")} | {"PGD-20 on the defense"}
    assert {entry["name"] for entry in result.content["refused"]} == refused
    assert result.defended < 0.3
    assert {row["category"] for row in result.content["categories"]} == {"naive", "transfer", "black-box", "white-box"}


def test_losses_restarts_and_aims_of_every_apgd():
    """A targeted loss takes a run for each class it aims at, and every restart as much again."""
    run = {"losses": ["dlr", "targeted-dlr"], "restarts": 2, "target_classes": 2}
    run["skip"] = ["naive", "black-box", "white-box"]
    # 50 steps, the last point's loss, and a pass that ranks the classes.
    assert by_name(evaluate(lambda x: x, **run), "passes") == {
        f"APGD-{loss} on the static model": {"forward": 24 * (51 * count + ranked), "backward": 24 * 50 * count}
        for loss, count, ranked in (("dlr", 2, 0), ("targeted-dlr", 4, 1))
    }


def test_full_adds_held_draws_and_fewer_inner_steps():
    defense = HedgeDefense(NETWORK, steps=8, radius=0.1, step_size=0.05)
    run = {"steps": 2, "draws": 3, "repeats": 2, "losses": ["ce"], "only": ["white-box"], "classifier": None}
    spent = by_name(evaluate(defense, None, INPUTS[:4], LABELS[:4], **run), "passes")
    # Three points are queried, two of them with a gradient, for which several draws are made once more. A query is all
    # inner steps and the readout, whose pass back is the gradient.
    for words, draws, queries, inner in (("", 3, 5, 8), (", one draw held", 1, 3, 8), (", 2 inner steps", 3, 5, 2)):
        wanted = {"forward": 4 * draws * queries * (inner + 1), "backward": 4 * draws * (queries * inner + 2)}
        assert spent[f"APGD-ce, BPDA identity{words}"] == wanted
    held = step(as_attack("robust_ext:APGD()"), "white-box", exposure="identity", held=True)
    first, again, other = (held.module(defense, AdaptiveSettings(seed=seed))(INPUTS) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_judged_by_fresh_answers():
    """Of attacks that do nothing, one is always lucky on a sample; fresh answers see through it."""
    first, second = (torch.rand(2, 20, 400, 3, generator=torch.Generator().manual_seed(0)) < 0.9).double().numpy()
    worst, left = _worst_case(first, second, np.ones((20, 400), dtype=bool))
    assert first.mean(2).min(0).mean() < 0.6
    assert 0.85 < left.mean() < 0.92
    assert worst.shape == (400,)


def test_groups_keep_their_composition():
    result = evaluate(Centred, [step(Still("in order"))], batch_size=10)
    assert result.content["batch_level"]
    # Blocks of two whole groups; one of ten rows would be refused by the defense.
    expected = float((Centred(NETWORK)(INPUTS).argmax(1) == LABELS).double().mean())
    assert result.content["defended"]["clean_accuracy"] == pytest.approx(expected)
    with pytest.raises(InvalidArgumentError, match="multiple of 4"):
        evaluate(Centred, None, INPUTS[:6], LABELS[:6])
    with pytest.raises(AttackRefusedError):
        evaluate(Centred, [step(Still("other order", batching="any"))])


def test_one_image_is_attacked_beside_negatives_that_stay():
    """Rows on their own are attacked in any batches, and no group has to be whole."""
    inputs, labels, negatives = INPUTS[:6], LABELS[:6], INPUTS[-5:]
    given = [step(Still("any order", batching="any"))], inputs, labels
    result = evaluate(Centred, *given, negatives=negatives)
    alone = torch.cat([Centred(NETWORK)(torch.cat([row[None], negatives[:3]]))[:1] for row in inputs])
    expected = float((alone.argmax(1) == labels).double().mean())
    assert result.content["defended"]["clean_accuracy"] == pytest.approx(expected)
    made = evaluate(one_image(Centred(NETWORK), negatives[:3]), *given, classifier=None)
    assert made.defended == result.defended
    for defense, images in ((Centred, negatives[:2]), (rounded, negatives)):
        with pytest.raises(InvalidArgumentError):
            evaluate(defense, *given, negatives=images)


def test_signs_of_a_weak_evaluation():
    def signs(**kinds):
        attacks = [
            {"name": name, "deviation": 0.0, "exposure": "defense", "category": category, "robust_accuracy": left}
            for name, (category, left) in ({"a": ("white-box", 0.5)} | kinds).items()
        ]
        parts = {"static": {"clean_accuracy": 0.9}, "defended": {"clean_accuracy": 0.9, "attacks": attacks}}
        content = {"samples": 100, "random": False, "settings": {"draws": 4}, "not_run": [], **parts}
        return find_signs(content, dict.fromkeys(["a", *kinds], (100, 0)))

    found = [signs(FGSM=("white-box", 0.3)), signs(b=("black-box", 0.3)), signs(b=("transfer", 0.3))]
    assert [len(one) for one in found] == [1, 1, 1]
    assert len({one[0] for one in found}) == 3
    # One sample is no sign.
    assert signs() == signs(b=("transfer", 0.49)) == []


def test_points_are_transferred_from_further_networks(tmp_path):
    run = {"classifier": Rounded(NETWORK), "surrogates": {"bare": NETWORK}, "only": ["transfer"], "out": tmp_path}
    result = evaluate(lambda x: x, **run)
    static, defended = by_name(result, part="static"), by_name(result)
    assert min(static[f"{name} on the static model"] for name in APGD) > 0.9
    assert max(static[f"{name} on bare"] for name in APGD) < 0.3
    assert static["APGD-ce on bare"] == defended["APGD-ce on bare"]
    assert result.defended <= defended["APGD-ce on bare"]
    # Another network of that name is another run.
    other = digits_network()
    with torch.no_grad():
        next(iter(other.parameters())).add_(0.01)
    with pytest.raises(RunFolderError, match="surrogates"):
        evaluate(lambda x: x, **run | {"surrogates": {"bare": other}})


# The cascade: who is attacked by what, and what may be stated of it.
WEAK = ThreatModel(norm="linf", epsilon=0.04)
SOME = INPUTS[:20]
# Some samples are wrong without any attack.
THEIRS = torch.where(torch.arange(20) % 7 == 3, (LABELS[:20] + 1) % 10, LABELS[:20])
cascaded = partial(evaluate, inputs=SOME, labels=THEIRS, full=False)


def passes(result):
    return sum(sum(spent.values()) for spent in by_name(result, "passes").values())


def records_of(folder):
    """The records of each step by its title."""
    return {one.run["settings"].get("name", "clean"): one.records() for one in runs_of(folder).values()}


@pytest.mark.parametrize("defense", [rounded, Noise()], ids=["rounded", "noise"])
def test_each_step_runs_on_what_those_before_it_left(tmp_path, defense):
    result = cascaded(defense, out=tmp_path, repeats=3, draws=2)
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


def test_fewer_passes_for_as_low_a_worst_case(tmp_path):
    short, whole = (cascaded(rounded, full=name == "full", out=tmp_path / name) for name in ("short", "full"))
    assert short.defended <= whole.defended + 1e-9
    assert short.static <= whole.static + 1e-9
    assert passes(short) < passes(whole) / 3
    assert {*by_name(whole, "samples").values()} == {20}
    assert whole.content["not_run"] == []
    # What a category alone or without it would leave is stated only as a run of everything on everything says it.
    assert short.content["not_run"]
    expected = {row["category"]: row for row in whole.content["categories"]}
    for row in short.content["categories"]:
        for key in ("alone", "without"):
            assert row[key] is None or row[key] == pytest.approx(expected[row["category"]][key]), (row, key)
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
    result = cascaded(Centred, out=tmp_path, batch_size=8)
    assert all(count % 4 == 0 for count in by_name(result, "samples").values())
    for records in records_of(tmp_path).values():
        indices = {record["index"] for record in records}
        assert {index - index % 4 for index in indices} == {index for index in indices if index % 4 == 0}


def test_a_budget_ends_with_a_result_that_can_be_gone_on_with(tmp_path, monkeypatch):
    # Each attack takes a thousand seconds.
    tell = Mock()
    monkeypatch.setattr(cascade, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * tell.call_count))
    kinds = {"a": "naive", "b": "transfer", "c": "white-box"}
    run = partial(cascaded, rounded, [step(Still(name, does=tell), kind) for name, kind in kinds.items()])
    cut = run(minutes=20, out=tmp_path / "cut")
    assert [*by_name(cut)] == ["a", "b"]
    assert cut.content["not_run"] == [{"name": "c", "reason": "The time that was given was over."}]
    assert any("upper bound" in warning for warning in cut.content["warnings"])
    tell.reset_mock()
    rest, whole = run(out=tmp_path / "cut"), run(out=tmp_path / "whole")
    assert plain(rest.content) == plain(whole.content)
    assert rest.content["not_run"] == []


def test_no_attack_goes_beyond_the_quarter():
    """Nor one that comes after no other; naive ones come first in any case."""
    kinds = {"a": "naive", "b": "white-box", "c": "white-box", **dict.fromkeys("defgh", "black-box")}
    steps = [
        step(Still(name, passes=100), kind, after="a" if kind == "black-box" else "") for name, kind in kinds.items()
    ]
    result = cascaded(lambda x: x, steps, threat=WEAK)
    samples = by_name(result, "samples")
    stood = round(20 * result.content["defended"]["clean_accuracy"])
    assert samples["a"] == stood
    # A quarter of eight attacks on 20 samples, of a hundred passes; three more judge each sample.
    assert stood < sum(samples.values()) <= 4000 / 103
    assert min(samples.values()) < stood
    assert {one["name"] for one in result.content["not_run"]} > set("efgh")
    assert cascaded(lambda x: x, steps[1], threat=WEAK).content["not_run"] == []


def test_a_samples_draws_do_not_depend_on_what_is_judged_beside_it():
    defense = HedgeDefense(NETWORK, steps=1, radius=0.2, step_size=0.1)

    def margins(rows, number=0):
        return predict_afresh(defense, SOME[rows], THEIRS[rows], ids=rows, seed=3, keys=("answers", number))[2]

    every = margins(list(range(20)))
    torch.testing.assert_close(margins([2, 5, 6]), every[[2, 5, 6]])
    assert (margins(list(range(20)), 1) != every).any(0)


def test_a_warm_start_is_the_best_point_so_far(tmp_path):
    # Also where a block's first sample is not attacked, as it is wrong without an attack.
    labels, starts = torch.where(torch.arange(20) % 8 == 0, (THEIRS + 1) % 10, THEIRS), []
    second = Still("second", does=lambda target: starts.append(target.starting_points), passes=0)
    first = step(as_attack("robust_ext:APGD(steps=3)", name="first"), "naive", exposure="static")
    run = {"labels": labels, "out": tmp_path, "threat": WEAK, "batch_size": 20}
    cascaded(lambda x: x, [first, step(second, warm=True)], **run)
    records = records_of(tmp_path)
    rows = [record["index"] for record in records["second"]]
    (points,) = (one[:, 0] for one in starts)
    assert rows
    assert not torch.equal(points, SOME[rows])
    best = [
        max(one["margin"] for name in ("clean", "first") for one in records[name] if one["index"] == row)
        for row in rows
    ]
    torch.testing.assert_close(margin(NETWORK(points), labels[rows]).detach(), torch.tensor(best))


def test_a_cascade_is_gone_on_with(tmp_path):
    """What was spent, what is nearest and where searches begin are found again in the run folder."""

    def run(folder, error=None):
        mine = step(Still("mine", does=Mock(side_effect=error)))
        more = {"queries": 500, "steps": 2, "losses": ["ce"], "repeats": 2, "draws": 2, "out": tmp_path / folder}
        return cascaded(Noise(), ["recommended", mine], threat=WEAK, **more)

    whole = run("whole")
    assert whole.content["not_run"]
    with pytest.raises(AttackError, match="stopped"):
        run("cut", RuntimeError("stopped"))
    for _ in range(2):
        assert plain(run("cut").content) == plain(whole.content)


@pytest.mark.exhaustive
def test_a_random_defense_is_asked_afresh():
    short = partial(evaluate, Noise(), None, INPUTS[:8], LABELS[:8], losses=["ce"], steps=3)
    first, again, other = (short(repeats=3, draws=2, seed=seed) for seed in (0, 0, 1))
    single = short(repeats=1, draws=1)
    assert plain(first.content) == plain(again.content)
    assert plain(first.content) != plain(other.content)
    assert first.content["random"]
    assert any(attack["deviation"] > 0 for attack in first.content["defended"]["attacks"])
    assert any("single draw" in warning for warning in single.content["warnings"])
