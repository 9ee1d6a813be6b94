"""The test as a whole: what strong and weak attacks score, verdicts, canaries, counts, other hosts."""

import json
from functools import partial

import pytest
import torch
from scipy.stats import beta
from torch import nn

from robust_ext import ThreatModel, binarization_test
from robust_ext.demo.network import digits_network
from robust_ext.demo.run import Rounded, Saturated
from robust_ext.evaluations.binarization import BinarizationSettings
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.binarization.summary import until_decided


def test_strong_passes_and_weak_fail(network, digits, linf, pgd):
    attacks = {"strong": pgd(), "tiny steps": pgd(relative_step=0.005), "nothing": lambda model, x, y: x}
    result = binarization_test(network, attacks, digits, linf)
    assert result.attacks["strong"]["score"] >= 0.95
    assert result.attacks["strong"]["verdict"] == result.verdict == "passed"
    assert result.attacks["tiny steps"]["score"] <= 0.1
    assert result.attacks["nothing"]["score"] == 0
    assert {result.attacks[name]["verdict"] for name in ("tiny steps", "nothing")} == {"failed"}
    for attack in result.attacks.values():
        assert attack["random_score"] < 0.15
        assert (attack["samples"], attack["not_separable"], attack["not_planted"]) == (64, 0, 0)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [(lambda x: x * torch.nan, "not_finite"), (lambda x: x + 2, "out_of_bounds"), (lambda x: 1 - x, "beyond_epsilon")],
)
def test_useless_candidates_are_outcomes(change, outcome, digits, judged):
    attack = judged(lambda model, x, y: change(x), digits[:12], inner_points=40, canaries=0)
    assert (attack["outcomes"][outcome], attack["score"], attack["verdict"]) == (12, 0.0, "failed")


def test_nothing_separable_is_inconclusive(judged):
    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones(len(x), 3)

    attack = judged(lambda model, x, y: x, torch.rand(4, 1, 4, 4), model=(Constant().eval(), nn.Linear(3, 2).eval()))
    assert (attack["not_separable"], attack["samples"], attack["score"]) == (4, 0, None)
    assert attack["verdict"] == "inconclusive"


def test_gradients_that_vanish_fail(network, digits, judged, pgd):
    for model in (Saturated(network), Rounded(network)):
        attack = judged(pgd(), digits[:16], model=model)
        assert attack["score"] <= 0.1
        assert attack["verdict"] == "failed"


def test_canaries_name_the_integration_bug(digits, judged, pgd):
    """An attack on predicted labels solves every planted problem, and is failed for what it does to canaries."""
    attack = judged(pgd(predicted_labels=True), digits[:24], canaries=10)
    assert attack["score"] >= 0.95
    assert (attack["canaries"]["planted"], attack["verdict"]) == (10, "failed")
    assert attack["canaries"]["repaired"] >= 9
    honest = judged(pgd(), digits[:24], canaries=10)
    assert honest["canaries"] == {"planted": 10, "repaired": 0}


def test_an_easy_test_is_inconclusive(digits, judged, pgd):
    """At kappa 0 and with few inner points random search does as well as the attack."""
    attack = judged(pgd(), digits[:32], kappa=0.0, inner_points=5)
    assert attack["score"] == 1.0
    assert attack["random_score"] > 0.9
    assert attack["verdict"] == "inconclusive"


def test_passes_are_counted_by_hand(network, digits, linf, pgd):
    """Every row through the network: points, random draws, planted and clean re-checks, attack, verification."""
    samples, inner, candidates, steps, canaries = 6, 30, 5, 7, 2
    settings = {"inner_points": inner, "planted_candidates": candidates, "canaries": canaries, "depths": (1,)}
    result = binarization_test(network, pgd(steps=steps), digits[:samples], linf, **settings)
    draws = sum(record["random_draws"] for record in result.records)
    points, checks = samples * (1 + inner + candidates), samples * 2
    attacked = (samples + canaries) * (steps + 1)
    passes = {"forward": points + draws + checks + attacked, "backward": (samples + canaries) * steps}
    assert result.attacks["attack"]["passes"] == passes


def test_sequential_stops_when_decided(network, digits, linf, pgd):
    inputs = torch.cat([digits, digits.flip(3), digits.flip(2)])
    attacks = {"strong": pgd(), "nothing": lambda model, x, y: x}
    settings = {"inner_points": 300, "maximum_random_score": 0.9, "depths": (1,)}
    result = binarization_test(network, attacks, inputs, linf, sequential=True, **settings)
    strong, nothing = result.attacks["strong"], result.attacks["nothing"]
    # Of two attacks, a perfect one needs 38 samples, in groups of eight.
    assert (nothing["samples"], strong["samples"], strong["verdict"]) == (8, 40, "passed")
    full = binarization_test(
        network, attacks["nothing"], inputs[:40], linf, batch_size=8, inner_points=300, depths=(1,)
    )
    # R-ASR is settled by the first group, and the search needed for no other.
    assert [r["random_reach"] for r in result.records] == [r["random_reach"] for r in full.records[:8]] + [None] * 32
    assert all(bool(r["random_draws"]) == (r["index"] < 8) for r in result.records)
    assert (strong["random_samples"], strong["random_score"]) == (8, nothing["random_score"])
    # What processes that run ahead of each other do beyond what is needed is left out.
    both = binarization_test(network, attacks, inputs[:40], linf, batch_size=8, **settings)
    groups = [both.records[start : start + 8] for start in range(0, 40, 8)]
    rules = Rules(BinarizationSettings(threat_model=linf, sequential=True, **settings), 2)
    kept = until_decided(list(attacks), groups, rules)
    assert [record for group in kept for record in group] == result.records


def test_random_search_ends_at_a_look(network, digits, linf, pgd):
    """With a fixed number of samples it ends after 8 or 16 planted problems, in batches of any size."""
    settings = {"inner_points": 99, "planted_candidates": 32, "depths": (1,), "canaries": 0}
    run = partial(binarization_test, network, {"strong": pgd(), "nothing": lambda model, x, y: x}, digits[:40], linf)
    full = run(random_stops=False, **settings)
    reaches = [record["random_reach"] for record in full.records]
    hits = [sum(reach > 0.999 for reach in reaches[:look]) for look in (8, 16)]
    # The whole of what depth 1 may be wrong by is .05; each look has a sixth.
    bounds = [beta.ppf(1 - 0.05 / 6, hit + 1, look - hit) for hit, look in zip(hits, (8, 16), strict=True)]
    ends, found, _ = next(row for row in zip((8, 16), hits, bounds, strict=True) if row[-1] <= 0.5)
    for size in (32, 12, 7):
        result = run(batch_size=size, **settings)
        searched = [record["random_reach"] for record in result.records]
        assert searched == pytest.approx(reaches[:ends] + [None] * (40 - ends))
        strong = result.attacks["strong"]
        assert (strong["random_samples"], strong["verdict"]) == (ends, full.attacks["strong"]["verdict"])
        assert strong["random_score"] == found / ends


def test_what_is_settled_is_not_searched_for_again(network, digits, linf, pgd, tmp_path):
    """Deeper problems grade attacks on sixteen samples; canaries end it at once; a resumed run comes to the same."""
    attacks = {"strong": pgd(), "predicted": pgd(predicted_labels=True)}
    settings = {"inner_points": 99, "sequential": True, "batch_size": 8, "out": tmp_path}
    result = binarization_test(network, attacks, digits[:40], linf, **settings)
    strong, wrong = result.attacks["strong"], result.attacks["predicted"]
    assert (wrong["verdict"], wrong["samples"], wrong["canaries"]["repaired"]) == ("failed", 8, 8)
    assert (strong["verdict"], strong["samples"]) == ("passed", 40)
    searched = [record["random_reach"] is not None for record in result.records]
    graded = ["witnesses" in record and "depths" in record["attacks"]["strong"] for record in result.records]
    assert searched == sorted(searched, reverse=True)
    assert 8 <= sum(searched) == strong["random_samples"] < 40
    assert graded == [row < max(16, sum(searched)) for row in range(40)]
    assert [row["samples"] for row in strong["depths"]] == [40] + [sum(graded)] * (len(strong["depths"]) - 1)
    assert {row["samples"] for row in result.content["witnesses"]} == {sum(graded)}
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:25]))
    again = binarization_test(network, attacks, digits[:40], linf, **settings)
    assert again.records == result.records


def test_hardness_curve_is_that_of_other_kappas(digits, judged):
    """The R-ASR that one run reports for easier kappas is what runs at those kappas find."""
    nothing = lambda model, x, y: x  # noqa: E731
    settings = {"inner_points": 100, "random_stops": False}
    curve = judged(nothing, digits[:12], **settings)["hardness"]
    assert [row["kappa"] for row in curve] == [0.0, 0.5, 0.9, 0.99, 0.999]
    for row in curve:
        rerun = judged(nothing, digits[:12], **settings, kappa=row["kappa"])
        assert rerun["random_score"] == row["random_score"]


@pytest.mark.parametrize(
    ("norm", "epsilon", "attack"),
    [("l2", 0.8, "L2DeepFoolAttack()"), ("l1", 4.0, "EADAttack(steps=100, binary_search_steps=4)")],
)
def test_other_norms(norm, epsilon, attack, digits, judged):
    settings = {"inner_points": 200, "readout": "max-margin", "canaries": 0}
    ball = ThreatModel(norm=norm, epsilon=epsilon)
    found = judged(f"foolbox:{attack}", digits[:16], threat_model=ball, **settings)
    assert found["score"] >= 0.95
    assert found["score"] > found["random_score"] + 0.2
    assert found["planted_points"] == {"drawn": 16, "adversarial": 16}


def test_result_holds_what_is_documented(tmp_path, network, digits, linf, pgd):
    result = binarization_test(network, pgd(), digits[:8], linf, inner_points=60, out=tmp_path, seed=3)
    content = json.loads((tmp_path / "result.json").read_text())
    assert (content["kind"], content["seed"], content["verdict"]) == ("binarization", 3, result.verdict)
    (attack,) = content["attacks"]
    for key in ("score", "random_score"):
        assert attack[f"{key}_interval"][0] <= attack[key] <= attack[f"{key}_interval"][1]
    total = attack["seconds"].pop("total")
    assert set(attack["seconds"]) == {"accepted", "features", "readout", "attack", "random", "verify", "witnesses"}
    assert total == pytest.approx(sum(attack["seconds"].values()))
    page = (tmp_path / "report.html").read_text()
    assert page.count('alt="Planted, sample ') == page.count('alt="Candidate - input, sample ') == len(result.examples)
    for example in result.examples:
        # What was to be found lies in the ball, away from the input and from what a failing attack returns.
        assert 0 < abs(example.planted - example.clean).max() <= 0.1 + 1e-6
        assert example.planted.shape == example.clean.shape == digits[0].shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_on_a_gpu(digits, judged, pgd):
    cpu = judged(pgd(), digits[:16], inner_points=100)
    gpu = judged(pgd(), digits[:16], model=digits_network().cuda(), inner_points=100)
    assert (cpu["score"], cpu["random_score"]) == (gpu["score"], gpu["random_score"])
