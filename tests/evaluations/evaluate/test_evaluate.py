"""Whole evaluations: stops, certificates, random models, defenses, detectors; the cascade; claims and texts."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.core.statistics import proportion_interval
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
from robust_ext.engine.run import candidates_name
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.evaluate import api, publish
from robust_ext.evaluations.evaluate import certificate as certificates
from robust_ext.evaluations.evaluate.certificate import ERROR_RATE, certificate_of, draws_to_plant
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.evaluate.suite import Member
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.registry.attack import as_attack
from robust_ext.registry.defense import as_defense
from tests.evaluations import small
from tests.evaluations.diagnosis.models import Apply
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.reports.results import make_evaluation
from tests.run_folders import records_of, runs_of

GIVEN = {"budget": "quick", "planted": 8, "batch_size": 4, "claim": 60, "judge_seed": 1}


def evaluate(**given):
    return robust_ext.evaluate(small.NETWORK, small.INPUTS, small.LABELS, small.LINF, **GIVEN, **given)


@pytest.mark.parametrize("after", [2, 11, 18])
def test_what_was_stopped_goes_on_to_the_same_result(after, tmp_path):
    whole = evaluate(out=tmp_path / "whole")
    stop = Mock(
        spec=["on_record", "on_result"], **{"on_record.side_effect": [*[None] * (after - 1), KeyboardInterrupt]}
    )
    with pytest.raises(KeyboardInterrupt):
        evaluate(out=tmp_path / "stopped", callbacks=[stop])
    assert not (tmp_path / "stopped" / "result.json").exists()
    resumed = evaluate(out=tmp_path / "stopped")
    assert small.essence(resumed) == small.essence(whole)
    assert records_of(tmp_path / "stopped") == records_of(tmp_path / "whole")
    assert robust_ext.load_result(tmp_path / "stopped") == whole == evaluate()


def test_wrong_labels_stop_it_with_the_reason(tmp_path):
    given = small.NETWORK, small.INPUTS.repeat(3, 1, 1, 1), (small.LABELS.repeat(3) + 1) % 3, small.LINF
    result = robust_ext.evaluate(*given, out=tmp_path, **GIVEN)
    assert (result.verdict, result.robust_accuracy, result.content["steps"]) == ("inconclusive", None, [])
    assert result.claim == ""
    assert "labels" in result.content["stopped"]
    assert not (tmp_path / "attacks").exists()
    assert robust_ext.load_result(tmp_path) == result
    accepted = robust_ext.evaluate(*given, out=tmp_path, **GIVEN, accept_setup=True)
    assert accepted.robust_accuracy == 0.0
    assert {one["reason"] for one in accepted.content["not_tried"]} == {"no sample was left standing"}
    assert [one["code"] for one in accepted.content["findings"]][:1] == ["label_offset"]


NETWORK = digits_network().requires_grad_(False)
INPUTS, LABELS = load_dataset("digits").take(range(8))
MANY = load_dataset("digits").take(range(64))
LINF, WIDE = ThreatModel(norm="linf", epsilon=0.1), ThreatModel(norm="linf", epsilon=0.25)


def digits(model=NETWORK, **given):
    result = robust_ext.evaluate(model, INPUTS, LABELS, WIDE, **{"budget": "quick", "planted": 0, **given})
    return result.content, result.content["certificate"]


def test_an_attack_that_works_on_this_model_is_certified():
    result = robust_ext.evaluate(NETWORK, *MANY, LINF, budget="quick", claim=10)
    certificate = result.content["certificate"]
    assert (result.verdict, certificate["certified"]) == ("passed", True)
    assert certificate["found"] == certificate["planted"] == 64
    assert certificate["depth"] >= 2
    assert certificate["attack"] in [one["name"] for one in result.content["steps"]]


@pytest.mark.exhaustive
def test_none_that_falls_behind_is():
    """One step finds all that is planted at depth 1, and less than APGD does farther out."""
    certified = []
    for size, steps in ((1.0, 1), (0.125, 20)):
        attack = as_attack(f"robust_ext:ObjectivePGD(steps={steps}, rel_step_size={size}, start='input')")
        result = robust_ext.binarization_test(NETWORK, attack, MANY[0], ThreatModel(norm="l2", epsilon=1.0), seed=0)
        assert result.verdict == "passed"
        certified.append(certificate_of(attack, result.content)["certified"])
    assert certified == [False, True]


@pytest.mark.parametrize("masked", [False, True])
def test_queries_alone_are_certified_where_the_head_masks_no_gradients(masked):
    """Of a head that returns whole votes, problems are planted in the votes."""
    model = nn.Sequential(NETWORK, Apply(lambda x: (2 * x).round().detach()) if masked else nn.Identity()).eval()
    attack = as_attack("robust_ext:Square(queries=500)")
    result = robust_ext.binarization_test(
        model, attack, load_dataset("digits").take(range(64))[0], WIDE, inner_points=99
    )
    certificate = certificate_of(attack, result.content)
    assert (result.verdict, certificate["certified"], "queries alone" in certificate["words"]) == (
        "passed",
        not masked,
        masked,
    )


class Noisy(nn.Module):
    def __init__(self, deviation, network=NETWORK):
        super().__init__()
        self.deviation, self.network = deviation, network
        self.eval()

    def forward(self, x):
        return self.network(x + self.deviation * torch.randn_like(x))


def test_a_random_model_is_broken_as_its_static_twin_is_and_certified_by_its_own_attack(monkeypatch):
    # Fewer draws than elsewhere: what is planted over five lasts here.
    monkeypatch.setattr(certificates, "_DRAWS", (5,))
    content, certificate = digits(Noisy(0.05), search=False, planted=64)
    assert digits(search=False)[0]["worst_case"]["robust_accuracy"] == 0
    assert content["worst_case"]["robust_accuracy"] < 0.05
    assert content["worst_case"]["broken"] == sum(one is not None for one in content["found_by"]) >= 6
    assert content["defense"] == {**content["defense"], "random": True, "repeats": 20}
    # Eight samples decide nothing, and what the attack finds of them is counted.
    assert (certificate["planted"], as_attack(certificate["text"]).eot) == (8, 8)
    assert certificate["found"] >= 6


def test_a_random_model_is_not_called_weaker_than_it_is():
    """By a margin that noise on the logits never turns."""

    def forward(x):
        margin = 20 * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([-margin, margin], 1) + 0.1 * torch.randn(len(x), 2)

    # At a distance of .3 from the boundary in the mean, no point of the ball is on its other side.
    x = torch.cat([torch.full((4, 1, 4, 4), 0.2), torch.full((4, 1, 4, 4), 0.8)])
    given = Apply(forward).eval(), x, torch.tensor([0] * 4 + [1] * 4), ThreatModel(norm="linf", epsilon=0.2)
    result = robust_ext.evaluate(*given, budget="quick", planted=0)
    assert (result.robust_accuracy, result.content["found_by"]) == (1, [None] * 8)


@pytest.mark.parametrize(("deviation", "draws"), [(0.02, 15), pytest.param(0.5, 60, marks=pytest.mark.exhaustive)])
def test_a_random_model_is_planted_in_over_as_many_draws_as_it_takes(deviation, draws):
    settings = EvaluateSettings(seed=0, judge_seed=1, planted=3)
    given = RunKeywords().prepare(NETWORK, INPUTS, LABELS, WIDE, batch_size=8)
    assert draws_to_plant(Noisy(deviation), given, settings) == draws


def test_attacks_that_must_not_pass_on_a_random_model_pass_as_seldom_as_on_others():
    """Nine of ten solved problems, drawn again for each of many certificates, whose judge draws afresh each time."""
    given = {"draws": 15, "inner_points": 99, "error_rate": ERROR_RATE}
    inputs = torch.rand(64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    planted = robust_ext.plant(Noisy(0.05, small.NETWORK), inputs, LINF, **given)
    solved, trials, passed, share = planted.planted[:, 0], 120, 0, 0.0
    rng, rules = torch.Generator().manual_seed(0), Rules(planted.settings)
    for _ in range(trials):
        kept = torch.rand(len(solved), 1, 1, 1, generator=rng) < 0.9
        found = planted.verify(torch.where(kept, solved, planted.inputs)).outcomes.count("found")
        share += found / len(solved) / trials
        passed += rules.decide([Solved(found=found, random_found=0, samples=len(solved))])[0] == "passed"
    assert 0.85 < share < 0.91
    assert passed <= trials * ERROR_RATE


def rounded(x):
    return (x * 8).round() / 8


def test_a_purifier_that_rounds_is_broken():
    content, certificate = digits(defense=rounded, planted=64)
    assert content["worst_case"]["robust_accuracy"] == 0
    # By the attacks in whose place the identity stands, or those on the static model; none by plain gradients.
    broke = {one["name"]: one["broken"] for one in content["steps"] if one["broken"]}
    assert sum(broke.values()) == content["worst_case"]["broken"]
    assert not any("plain" in name or name == "PGD-20 on the defense" for name in broke)
    assert certificate["found"] == certificate["planted"] == 8
    assert "gradient_mode='identity'" in certificate["text"]
    made, _ = digits(as_defense(rounded, NETWORK, INPUTS[:2]))
    assert [made[key] for key in ("worst_case", "found_by")] == [content[key] for key in ("worst_case", "found_by")]


class Border(Detector):
    """How bright the left and right columns are, which are dark in every digit."""

    def score_of(self, seen):
        return seen.inputs[..., [0, 7]].flatten(1).mean(1)


@pytest.mark.parametrize("defense", [None, pytest.param(rounded, marks=pytest.mark.exhaustive)])
def test_a_detector_that_flags_every_blind_candidate_is_got_past_by_those_that_know_it(defense):
    keywords = {} if defense is None else {"defense": defense}
    clean = load_dataset("digits").take(range(100, 200))[0]
    content, certificate = digits(detector=Border, detector_data=clean, planted=8, **keywords)
    broke = {one["name"] for one in content["steps"] if one["broken"]}
    assert content["worst_case"]["broken"] >= 5
    assert all(one.startswith(("OrthogonalPGD", "SelectivePGD", "JointLoss", "FeatureMatching")) for one in broke)
    assert defense is not None or certificate["attack"] in broke
    # The sum over both tests.
    assert 8 <= certificate["planted"] <= 16
    if defense is not None:
        assert "gradient_mode='identity'" in certificate["text"]
        assert certificate["found"] == certificate["planted"]


# The cascade of the standard suite, against recounts and closed forms.
DUAL = {"linf": lambda w: w.abs().sum(-1), "l2": lambda w: w.norm(dim=-1), "l1": lambda w: w.abs().amax(-1)}
ALONE = {"budget": "quick", "planted": 0, "search": False}


def candidates_of(saved):
    """The candidate of each sample that was attacked."""
    found, indices = {}, [record["index"] for record in saved.records()]
    for start in indices:
        arrays = saved.load(candidates_name(start))
        if arrays is not None:
            later = [index for index in indices if index >= start][: len(arrays["candidates"])]
            found |= dict(zip(later, arrays["candidates"], strict=True))
    assert list(found) == indices
    return found


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.12), ("l2", 0.9)])
def test_each_attack_gets_the_samples_that_stand_and_no_others(norm, epsilon, tmp_path):
    """Everything is counted again from the candidates in the run folder, by numpy and a forward pass."""
    network, (x, y) = digits_network(), load_dataset("digits").take(range(24))
    y[5] = (y[5] + 1) % 10
    result = robust_ext.evaluate(
        network, x, y, ThreatModel(norm=norm, epsilon=epsilon), out=tmp_path, batch_size=7, **ALONE
    )
    runs, rows = runs_of(tmp_path / "attacks"), result.content["steps"]
    stands = {index for index in range(24) if network(x[index : index + 1]).argmax() == y[index]}
    assert 5 not in stands
    finders, left = {}, []
    for row in rows:
        (saved,) = (one for place, one in runs.items() if place.startswith(f"{row['name']}-{norm}"))
        found = candidates_of(saved)
        assert found.keys() == stands, row["name"]
        order = sorted(found)
        points = np.stack([found[index] for index in order])
        assert points.min() >= 0
        assert points.max() <= 1
        moved = (points - x[order].numpy()).reshape(len(order), -1).astype(float)
        inside = np.linalg.norm(moved, ord={"linf": np.inf, "l2": 2}[norm], axis=1) <= epsilon + 1e-6
        wrong = (network(torch.from_numpy(points)).argmax(1) != y[order]).numpy()
        broken = {index for index, one in zip(order, inside & wrong, strict=True) if one}
        assert row["broken"] == len(broken)
        finders |= dict.fromkeys(broken, row["name"])
        stands = stands - broken
        left.append(len(stands) / 24)
    assert [row["robust_accuracy"] for row in rows] == left
    assert len(rows) >= 3
    worst = result.content["worst_case"]
    assert {index for index, one in enumerate(worst["robust"]) if one == "1"} == stands
    assert result.robust_accuracy == len(stands) / 24
    assert result.content["found_by"] == [finders.get(index) for index in range(24)]
    assert sum(row["broken"] for row in rows) == worst["broken"] == len(finders) > 0


def linear(classes, shape, samples, norm):
    """A linear classifier, inputs, labels, and their distances: margins over dual norms of differences of weights."""
    draw = torch.Generator().manual_seed(classes)
    network = nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), classes)).eval().requires_grad_(False)
    nn.utils.vector_to_parameters(torch.randn((shape.numel() + 1) * classes, generator=draw), network.parameters())
    x = 0.4 + 0.2 * torch.rand(samples, *shape, generator=draw)
    network[1].bias -= network(x).mean(0)
    logits, weights = network(x), network[1].weight
    y = logits.argmax(1)
    gaps = logits.gather(1, y[:, None]) - logits
    distances = gaps / DUAL[norm](weights[y][:, None] - weights).clamp_min(1e-30)
    return network, x, y, distances.masked_fill(gaps == 0, np.inf).amin(1)


@pytest.mark.parametrize(
    ("norm", "classes", "shape"),
    [
        *((norm, classes, torch.Size([1, 6, 6])) for norm in ("linf", "l2") for classes in (2, 6)),
        *((norm, 2, torch.Size([6])) for norm in DUAL),
    ],
)
def test_a_linear_network_is_as_robust_as_the_closed_form_says(norm, classes, shape):
    network, x, y, distances = linear(classes, shape, 120, norm)
    epsilon = distances.median().item()
    kept = (distances / epsilon - 1).abs() > 0.02  # Nearer to the sphere rounding decides.
    model = ThreatModel(norm=norm, epsilon=epsilon, bounds=(-20.0, 20.0))  # No bound is in the way.
    result = robust_ext.evaluate(network, x[kept], y[kept], model, **ALONE)
    assert [one == "1" for one in result.content["worst_case"]["robust"]] == (distances[kept] > epsilon).tolist()
    assert 0.4 < result.robust_accuracy < 0.6
    if len(shape) == 1:
        names = ["APGD-CE", "BoundarySearch", "APGD-T-warm", "APGD-T", "Square"]
        assert [one["name"] for one in result.content["steps"]] == names
    curve = {row["epsilon"]: row["robust_accuracy"] for row in result.content["curve"]}
    assert list(curve) == sorted(curve)
    assert (curve[0.0], curve[epsilon]) == (1, result.robust_accuracy)
    below = [(size, value) for size, value in curve.items() if size < epsilon]
    assert all(value >= (distances[kept] > size * 1.03).double().mean() for size, value in below)
    for budget in distances[kept & (distances > epsilon)].quantile(torch.tensor([0.25, 0.5, 0.75])).tolist():
        reached = min(value for size, value in curve.items() if size <= budget * 1.02)
        assert (distances[kept] > budget * 1.03).double().mean().item() <= reached
        assert reached <= (distances[kept] > budget * 0.98).double().mean().item()


class Recorder(Attack):
    name, traits, begun = "Recorder", AttackTraits(), []

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.begun.append((inputs, target.starting_points))
        return inputs


def test_warm_members_begin_at_the_nearest_adversarial_points(monkeypatch):
    network, x, y, distances = linear(2, torch.Size([6]), 24, "linf")
    search = Member(attack=BoundarySearch(budget=200), white_box=True)
    members = [search, Member(attack=Recorder(), white_box=False, warm=True)]
    monkeypatch.setattr(api, "standard_suite", lambda *_, **__: members)
    threat_model = ThreatModel(norm="linf", epsilon=float(distances.sort().values[11:13].mean()))
    robust_ext.evaluate(network, x, y, threat_model, **ALONE)
    rows = distances > threat_model.epsilon
    ((begun, points),) = Recorder.begun
    assert torch.equal(begun, x[rows])
    # All of them lie outside the ball, where the classifier's boundary is.
    torch.testing.assert_close((points[:, 0] - begun).abs().amax(1), distances[rows], rtol=5e-3, atol=0)
    assert bool((network(points[:, 0]).argmax(1) != y[rows]).all())


# Claims, and texts to paste.
@given(st.data())
def test_a_claim_is_judged_by_how_rarely_so_few_or_so_many_would_stand_by_chance(data):
    """At a claimed robust accuracy, either happens in at most 2.5% of draws: Clopper and Pearson's rule."""
    samples = data.draw(st.integers(1, 300))
    stand, claimed = data.draw(st.integers(0, samples)), data.draw(st.floats(0, 100) | st.sampled_from([0.0, 100.0]))
    few, many = binom.cdf(stand, samples, claimed / 100), binom.sf(stand - 1, samples, claimed / 100)
    assume(min(abs(few - 0.025), abs(many - 0.025)) >= 1e-6)
    worst = {"interval": list(proportion_interval(stand, samples))}
    outcome = "refuted" if few < 0.025 else "exceeded" if many < 0.025 else "consistent"
    assert publish.judge_claim(claimed, worst, certified=True) == outcome
    # Without a certificate only a low number says something.
    without = "refuted" if outcome == "refuted" else "not supported"
    assert publish.judge_claim(claimed, worst, certified=False) == without


def test_without_a_certificate_no_text_says_that_one_passed():
    content = make_evaluation("APGD-CE")
    assert "passes" in publish.claim_sentence(content)
    words = {"attack": "APGD-CE", "certified": False, "words": "not certified: it finds 1 of 64"}
    content |= {"certificate": {**content["certificate"], **words}}
    for outcome in ("refuted", "not supported"):
        sentence = publish.claim_sentence({**content, "claim": {"claimed": 60.0, "outcome": outcome}})
        assert outcome in sentence
        assert "passes" not in sentence + publish.publishable(content)


def test_rows_are_escaped():
    content = make_evaluation("APGD-CE") | {"settings": {"budget": "quick", "model_origin": "a|b_c & 50% {x}"}}
    assert publish.markdown_row(content).splitlines()[2].startswith(r"| a\|b_c & 50% {x} | ")
    comment, row = publish.latex_row(content).splitlines()
    assert comment.startswith("% model & threat model")
    assert row.startswith(r"a\textbar{}b\_c \& 50\% \{x\} & $\ell_\infty$, $\epsilon = 8/255$")


ATTACKS = {
    "linf": "robust_ext:APGD(steps=9, loss='margin', stop_early=True)",
    "l2": "robust_ext:APGD(steps=9, loss='targeted-margin', target_classes=2)",
    "l1": "robust_ext:APGD(steps=9)",
    "square": "robust_ext:Square(queries=40)",
    "boundary": "robust_ext:BoundarySearch(budget=60)",
    "objective": "robust_ext:ObjectivePGD(steps=9, start='input')",
}
BALLS = {"linf": (0.15, torch.inf), "l2": (0.6, 2), "l1": (3.0, 1)}


@pytest.mark.parametrize("view", [{}, {"bpda": "0"}, {"bpda": "0", "gradient_mode": "straight_through"}])
@pytest.mark.parametrize("name", ATTACKS)
def test_foolbox_and_art_run_the_code(name, view):
    """Each piece runs as it is printed, on a network of the user's, and leaves adversarial examples in the ball."""
    pytest.importorskip("foolbox")
    pytest.importorskip("art")
    norm = name if name in BALLS else "linf"
    epsilon, order = BALLS[norm]
    model = nn.Sequential(Rounding() if view else nn.Identity(), *small.NETWORK).eval()
    labels = model(small.INPUTS).argmax(1)
    attack = robust_ext.as_attack(ATTACKS[name])
    attack = robust_ext.AdaptedAttack(attack=attack, **view) if view else attack
    code = publish.host_code(attack, ThreatModel(norm=norm, epsilon=epsilon))
    assert code.keys() == {"foolbox", "art"}
    for library, lines in code.items():
        given = {"model": model, "inputs": small.INPUTS, "labels": labels}
        exec(compile(lines, library, "exec"), given)  # noqa: S102
        found = torch.as_tensor(given["candidates"])
        inside = (found - small.INPUTS).flatten(1).norm(dim=1, p=order) <= epsilon * 1.001
        broken = int(((model(found).argmax(1) != labels) & inside).sum())
        assert broken >= (1 if name == "square" and view else 4), (broken, lines)


def test_the_attack_on_a_batch_level_defense_is_certified_in_its_groups():
    """Its rows meet those of their group in the certificate too."""

    def apart(x):
        return rounded(x + 0.05 * (x - x.mean(0)))

    apart.group_size = 4
    content, certificate = digits(defense=apart, planted=64)
    assert content["worst_case"]["robust_accuracy"] == 0
    assert certificate["found"] == certificate["planted"] >= 7
