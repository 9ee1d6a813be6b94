"""The test as a whole: scores, verdicts, canaries, counts, sequential stops, calibration, and runs that go on."""

from functools import partial

import pytest
import torch
from scipy.stats import beta
from torch import nn

from robust_ext import ThreatModel, binarization_test
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.random import derive_seed
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import BinarizationSettings
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.binarization.summary import until_decided


def nothing(model, x, y):
    return x


def test_strong_passes_and_weak_fail(network, digits, linf, pgd):
    attacks = {"strong": pgd(), "tiny steps": pgd(relative_step=0.005), "nothing": nothing}
    result = binarization_test(network, attacks, digits, linf)
    assert result.attacks["strong"]["score"] >= 0.95
    assert result.attacks["strong"]["verdict"] == result.verdict == "passed"
    assert result.attacks["tiny steps"]["score"] <= 0.1
    assert result.attacks["nothing"]["score"] == 0
    assert {result.attacks[name]["verdict"] for name in ("tiny steps", "nothing")} == {"failed"}
    for attack in result.attacks.values():
        assert attack["random_score"] < 0.15
        assert (attack["samples"], attack["not_separable"], attack["not_planted"]) == (64, 0, 0)


def test_nothing_separable_and_an_easy_test_are_inconclusive(digits, judged, pgd):
    constant = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    nn.init.zeros_(constant[1].weight)
    attack = judged(nothing, torch.rand(4, 1, 4, 4), model=(constant, nn.Linear(3, 2).eval()))
    assert (attack["not_separable"], attack["samples"], attack["score"]) == (4, 0, None)
    assert attack["verdict"] == "inconclusive"
    # At kappa 0 and with few inner points random search does as well as the attack.
    attack = judged(pgd(), digits[:32], kappa=0.0, inner_points=5)
    assert (attack["score"], attack["random_score"] > 0.9, attack["verdict"]) == (1, True, "inconclusive")


def test_canaries_name_the_integration_bug(digits, judged, pgd):
    """An attack on predicted labels solves every planted problem, and is failed for what it does to canaries."""
    attack, honest = (judged(pgd(predicted_labels=wrong), digits[:24], canaries=10) for wrong in (True, False))
    assert attack["score"] >= 0.95
    assert (attack["canaries"]["planted"], attack["verdict"]) == (10, "failed")
    assert attack["canaries"]["repaired"] >= 9
    assert honest["canaries"] == {"planted": 10, "repaired": 0}


def test_passes_are_counted_by_hand(network, digits, linf, pgd):
    """Every row through the network: points, random draws, planted and clean re-checks, attack, verification."""
    samples, inner, candidates, steps, canaries = 6, 30, 5, 7, 2
    settings = {"inner_points": inner, "planted_candidates": candidates, "canaries": canaries, "depths": (1,)}
    result = binarization_test(network, pgd(steps=steps), digits[:samples], linf, **settings)
    draws = sum(record["random_draws"] for record in result.records)
    points, attacked = samples * (1 + inner + candidates), (samples + canaries) * (steps + 1)
    passes = {"forward": points + draws + samples * 2 + attacked, "backward": (samples + canaries) * steps}
    assert result.attacks["attack"]["passes"] == passes


def test_sequential_stops_when_decided(network, digits, linf, pgd):
    inputs, attacks = torch.cat([digits, digits.flip(3), digits.flip(2)]), {"strong": pgd(), "nothing": nothing}
    settings = {"inner_points": 100, "maximum_random_score": 0.9, "depths": (1,)}
    result = binarization_test(network, attacks, inputs, linf, sequential=True, **settings)
    strong, still = result.attacks["strong"], result.attacks["nothing"]
    # Of two attacks, a perfect one needs 38 samples, in groups of eight.
    assert (still["samples"], strong["samples"], strong["verdict"]) == (8, 40, "passed")
    full = binarization_test(network, nothing, inputs[:40], linf, batch_size=8, inner_points=100, depths=(1,))
    # R-ASR is settled by the first group, and the search needed for no other.
    assert [r["random_reach"] for r in result.records] == [r["random_reach"] for r in full.records[:8]] + [None] * 32
    assert all(bool(r["random_draws"]) == (r["index"] < 8) for r in result.records)
    assert (strong["random_samples"], strong["random_score"]) == (8, still["random_score"])
    # What processes that run ahead of each other do beyond what is needed is left out.
    both = binarization_test(network, attacks, inputs[:40], linf, batch_size=8, **settings)
    groups = [both.records[start : start + 8] for start in range(0, 40, 8)]
    rules = Rules(BinarizationSettings(threat_model=linf, sequential=True, **settings), 2)
    assert [record for group in until_decided(list(attacks), groups, rules) for record in group] == result.records


def test_random_search_ends_at_a_look(network, digits, linf, pgd):
    """With a fixed number of samples it ends after 8 or 16 planted problems, in batches of any size."""
    settings = {"inner_points": 99, "planted_candidates": 32, "depths": (1,), "canaries": 0}
    run = partial(binarization_test, network, {"strong": pgd(), "nothing": nothing}, digits[:40], linf, **settings)
    full = run(random_stops=False)
    reaches = [record["random_reach"] for record in full.records]
    hits = [sum(reach > 0.999 for reach in reaches[:look]) for look in (8, 16)]
    # The whole of what depth 1 may be wrong by is .05; each look has a sixth.
    bounds = [beta.ppf(1 - 0.05 / 6, hit + 1, look - hit) for hit, look in zip(hits, (8, 16), strict=True)]
    ends, found, _ = next(row for row in zip((8, 16), hits, bounds, strict=True) if row[-1] <= 0.5)
    for size in (32, 7):
        result = run(batch_size=size)
        assert [one["random_reach"] for one in result.records] == pytest.approx(reaches[:ends] + [None] * (40 - ends))
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
    assert binarization_test(network, attacks, digits[:40], linf, **settings).records == result.records


def test_hardness_curve_is_that_of_other_kappas(digits, judged):
    """The R-ASR that one run reports for easier kappas is what runs at those kappas find."""
    run = partial(judged, nothing, digits[:12], inner_points=100, random_stops=False)
    curve = run()["hardness"]
    assert [row["kappa"] for row in curve] == [0.0, 0.5, 0.9, 0.99, 0.999]
    assert [row["random_score"] for row in curve] == [run(kappa=row["kappa"])["random_score"] for row in curve]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_on_a_gpu(digits, judged, pgd):
    cpu, gpu = (judged(pgd(), digits[:16], model=digits_network().to(on), inner_points=100) for on in ("cpu", "cuda"))
    assert (cpu["score"], cpu["random_score"]) == (gpu["score"], gpu["random_score"])


# Rows and batches: functions that depend on their number, and rows in any order.

FEW = {"inner_points": 100, "canaries": 0, "depths": (1,)}


def descent(scaled, *, length=0.003):
    """Steps along what a function makes of gradients of single rows ``(N, ...)``."""

    def attack(model, x, y, epsilon):
        x_adv = x
        for _ in range(30):
            x_adv = x_adv.detach().requires_grad_()
            logits = model(x_adv)
            lead = logits.gather(1, 1 - y[:, None]) - logits.gather(1, y[:, None])
            (gradient,) = torch.autograd.grad(lead.sum(), x_adv)
            moved = x_adv + length * scaled(gradient) - x
            away = moved.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
            x_adv = (x + moved * (epsilon / away).clamp(max=1)).clamp(0, 1)
        return x_adv.detach()

    return attack


def by_row(g):
    return 50 * g / g.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)


def by_number(g):
    return g / len(g)


def by_norm(g):
    return g / g.norm()


class Own(Attack):
    """A class of a user's."""

    name, traits = "Own", AttackTraits(batching="full")

    def __init__(self, scaled, length=0.003):
        self.steps = descent(scaled, length=length)

    def search(self, target, inputs, labels, *, threat_model, generator):
        return self.steps(target.module, inputs, labels, threat_model.epsilon)


def seldom(model, x, y, epsilon, generator):
    """Rows that are solved nine times of ten, whatever their number."""
    tried = torch.rand(len(x), generator=generator) < 0.97
    return torch.where(tried.view(-1, 1, 1, 1), descent(by_row)(model, x, y, epsilon), x)


CASES = {
    "the number": (lambda: descent(by_number), True),
    "a shared length": (lambda: descent(by_norm, length=0.1), True),
    "no scale": (lambda: descent(lambda g: g), False),
    "a length a row": (lambda: descent(by_row), False),
    "a shared length that is enough for all sizes": (lambda: descent(lambda g: 400 * by_norm(g)), False),
    "by chance": (lambda: seldom, False),
    "a class": (lambda: Own(by_norm, length=0.1), True),
    "an adapted class": (lambda: AdaptedAttack(attack=Own(by_number), keep_best=True), True),
    "Foolbox": (lambda: "foolbox:LinfPGD(steps=30)", False),
}


@pytest.mark.parametrize("name", CASES)
def test_who_depends_on_the_batch(name, network, digits, linf):
    make, found = CASES[name]
    if name == "Foolbox":
        pytest.importorskip("foolbox")
    made = make()
    ball = linf if isinstance(made, str) else ThreatModel(norm="l2", epsilon=0.6)
    result = binarization_test(network, made, digits[:16], ball, batch_size=8, **FEW)
    assert result.content["attacks"][0]["score"] >= 0.8
    assert [one["code"] for one in result.content["findings"]] == ["batch_size_matters"] * found


def test_candidates_that_rounding_moves_are_not_looked_into(network, digits):
    """The last step turns with the number of rows, and as much with the last digits of the row."""
    sizes = []

    def chaotic(model, x, y, epsilon):
        sizes.append(len(x))
        turn = torch.sin(1e9 * x.double().sum((1, 2, 3)) + len(x)).float().view(-1, 1, 1, 1)
        return (descent(by_row)(model, x, y, 0.95 * epsilon) + 0.005 * epsilon * turn).clamp(0, 1)

    result = binarization_test(network, chaotic, digits[:16], ThreatModel(norm="l2", epsilon=0.6), batch_size=8, **FEW)
    assert (result.content["attacks"][0]["score"], result.content["findings"]) == (1, [])
    assert {1, 4} <= {*sizes}
    assert max(sizes) == 8


@pytest.mark.parametrize("shape", ["subset", "permuted", "repeated"])
def test_attacks_that_reshuffle_rows_meet_the_right_readouts(shape, network, digits, linf, pgd):
    """Whatever rows an attack asks about together, its result is that of asking in order."""

    def shuffling(model, x, y, threat_model):
        if shape == "subset":
            parts = zip(x.split(3), y.split(3), strict=True)
            return torch.cat([pgd()(model, part, label, threat_model) for part, label in parts])
        times = 3 if shape == "repeated" else 1
        order = torch.arange(len(x)).flip(0).repeat_interleave(times)
        return pgd()(model, x[order], y[order], threat_model)[::times].flip(0)

    result = binarization_test(network, {"in order": pgd(), "shuffled": shuffling}, digits[:16], linf, **FEW)
    assert result.attacks["in order"]["score"] == 1.0
    for entries in (record["attacks"] for record in result.records):
        assert entries["shuffled"]["outcome"] == entries["in order"]["outcome"]
        assert entries["shuffled"]["reach"] == pytest.approx(entries["in order"]["reach"], rel=1e-3, abs=1e-3)


def test_twins_are_attacked_one_at_a_time(network, digits, linf, pgd):
    """Two samples with the same pixels cannot be told apart in a batch; each still meets its own readout."""
    sizes = []

    def attack(model, x, y, threat_model):
        sizes.append(len(x))
        return pgd()(model, x, y, threat_model)

    result = binarization_test(network, attack, torch.cat([digits[:4], digits[:4]]), linf, **FEW)
    assert sizes == [1] * 8
    assert result.score == 1.0


def test_same_problems_for_every_attack_batch_size_and_order(network, digits, linf, pgd):
    """What is planted, and what random search makes of it, is decided by seed and sample alone."""
    small = {"inner_points": 100, "random_inner": 20, "random_corners": 20, "depths": (1,), "random_stops": False}

    def of(attack, batch_size, ids):
        given = {"sample_ids": ids, "batch_size": batch_size, **small}
        result = binarization_test(network, attack, digits[ids], linf, **given)
        return {r["sample"]: (r["separable"], r["random_reach"] > 0.999, r["random_draws"]) for r in result.records}

    ids = list(range(12))
    assert of(pgd(), 4, ids) == of(pgd(steps=1), 12, ids) == of(nothing, 5, ids[::-1])


# Calibration: easier where no attack is near perfect, deeper where one is.

POINTS = {"inner_points": 120, "gap": 0.05, "boundary_points": 1}
SMALL = {"calibrate_on": 12, "inner_points": 120, "random_inner": 40, "random_corners": 40, "canaries": 0}
KAPPAS = (0.9999, 0.999, 0.99, 0.9, 0.5, 0.0)


def test_it_eases_until_the_attack_succeeds(network, digits, linf, pgd):
    """A middling attack fails the hardest tests and passes an easier one, which is then used."""
    middling = pgd(steps=5, relative_step=0.07)
    result = binarization_test(network, middling, digits[:12], linf, depths=(1,), **SMALL)
    rows, chosen = (result.content["calibration"][key] for key in ("rows", "chosen"))
    steps = [(count, kappa) for count in (120, 40, 12) for kappa in KAPPAS]
    tried = steps[: steps.index((chosen["inner_points"], chosen["kappa"])) + 1]
    assert len(tried) > 1
    assert [(row["inner_points"], row["kappa"]) for row in rows[: len(tried)]] == tried
    scores, randoms = ([row[key] for row in rows[: len(tried)]] for key in ("score", "random_score"))
    assert scores[-1] >= 0.95 > max(scores[:-1])
    assert randoms[:6] == sorted(randoms[:6])
    assert (chosen["gap"], chosen["boundary_points"]) == (0.05, 1)
    settings = result.content["settings"]
    assert [settings[key] for key in ("kappa", "inner_points", "least_depth")] == [*tried[-1][::-1], 1]


def test_it_goes_deeper_where_the_attack_succeeds(network, digits, linf, pgd):
    """What it found at each depth is what a test of the same draws finds there."""
    attacks = {"strong": pgd(), "nothing": nothing}
    result = binarization_test(network, attacks, digits[:12], linf, **SMALL)
    settings = {**SMALL, "kappa": 0.9999, "calibrate_on": 0, "judge_seed": derive_seed(0, "calibration")}
    again = binarization_test(network, attacks, digits[:12], linf, **settings)
    expected, deepest = {}, 1
    for row in again.attacks["strong"]["depths"][1:]:
        solved = row["found_by_others"], row["random_found_by_others"], row["problems_by_others"]
        expected[row["depth"]] = solved
        if row["depth"] == 2 * deepest and solved[2] >= 6 and solved[0] >= 0.95 * solved[2]:
            deepest = row["depth"]
    calibration, found = result.content["calibration"], {"strong": {}, "nothing": {}}
    for row in (row for row in calibration["rows"] if row["depth"] > 1):
        solved = [round((row[key] or 0) * row["samples"]) for key in ("score", "random_score")]
        found[row["attack"]][row["depth"]] = (*solved, row["samples"])
        assert row["kappa"] == 0.9999
    # An attack that fails the test itself is not posed deeper problems in it.
    assert found["strong"] == expected
    assert {solved[0] for solved in found["nothing"].values()} == {0}
    assert calibration["chosen"] == {"kappa": 0.9999, **POINTS, "depth": deepest}
    assert result.content["settings"]["least_depth"] == deepest > 1
    verdict = result.attacks["strong"]
    assert verdict["verdict_depth"] <= deepest
    assert verdict["verdict"] == "inconclusive"
