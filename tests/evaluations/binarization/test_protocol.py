"""The test as a whole: what strong and weak attacks score, verdicts, canaries, calibration, counts, other hosts."""

import json

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext.demo.network import digits_network
from robust_ext.demo.run import Rounded, Saturated


def one(result):
    (attack,) = result.attacks.values()
    return attack


def test_strong_passes_and_weak_fail(network, digits, linf, pgd):
    attacks = {"strong": pgd(), "tiny steps": pgd(relative_step=0.005), "nothing": lambda model, x, y: x}
    result = robust_ext.binarization_test(network, attacks, digits, linf)
    assert result.attacks["strong"]["score"] >= 0.95
    assert result.attacks["strong"]["verdict"] == result.verdict == "passed"
    assert result.attacks["tiny steps"]["score"] <= 0.1
    assert result.attacks["nothing"]["score"] == 0
    assert {result.attacks[name]["verdict"] for name in ("tiny steps", "nothing")} == {"failed"}
    for attack in result.attacks.values():
        assert 0.05 < attack["random_score"] < 0.5
        assert (attack["samples"], attack["not_separable"], attack["not_planted"]) == (64, 0, 0)


def test_gradients_that_vanish_fail(network, digits, linf, pgd):
    for model in (Saturated(network), Rounded(network)):
        attack = one(robust_ext.binarization_test(model, pgd(), digits[:32], linf))
        assert attack["score"] <= 0.1
        assert attack["verdict"] == "failed"


def test_canaries_name_the_integration_bug(network, digits, linf, pgd):
    """An attack on predicted labels solves every planted problem, and is failed for what it does to canaries."""
    result = robust_ext.binarization_test(network, pgd(predicted_labels=True), digits[:24], linf, canaries=10)
    attack = one(result)
    assert attack["score"] >= 0.95
    assert attack["canaries"]["planted"] == 10
    assert attack["canaries"]["repaired"] >= 9
    assert attack["verdict"] == "failed"
    assert "predicted labels" in attack["reason"]
    honest = one(robust_ext.binarization_test(network, pgd(), digits[:24], linf, canaries=10))
    assert honest["canaries"] == {"planted": 10, "repaired": 0}


def test_an_easy_test_is_inconclusive(network, digits, linf, pgd):
    """At kappa 0 and with few inner points random search does as well as the attack."""
    attack = one(robust_ext.binarization_test(network, pgd(), digits[:32], linf, kappa=0.0, inner_points=5))
    assert attack["score"] == 1.0
    assert attack["random_score"] > 0.9
    assert attack["verdict"] == "inconclusive"


def test_passes_are_counted_by_hand(network, digits, linf, pgd):
    """Every row through the network: points, random draws, planted and clean re-checks, attack, verification."""
    samples, inner, steps, canaries = 6, 30, 7, 2
    result = robust_ext.binarization_test(
        network, pgd(steps=steps), digits[:samples], linf, inner_points=inner, canaries=canaries, minimum_samples=1
    )
    draws = sum(record["random_draws"] for record in result.records)
    points = samples * (1 + inner + 1)
    checks = samples * 2
    attacked = (samples + canaries) * (steps + 1)
    assert one(result)["passes"] == {
        "forward": points + draws + checks + attacked,
        "backward": (samples + canaries) * steps,
    }


def test_sequential_stops_when_decided(network, digits, linf, pgd):
    inputs = torch.cat([digits, digits.flip(3), digits.flip(2)])
    attacks = {"strong": pgd(), "nothing": lambda model, x, y: x}
    result = robust_ext.binarization_test(network, attacks, inputs, linf, sequential=True, inner_points=300)
    assert result.attacks["nothing"]["samples"] == 8
    assert result.attacks["strong"]["samples"] == 64
    assert result.attacks["strong"]["verdict"] == "passed"
    assert "leave room" not in result.attacks["strong"]["reason"]
    full = robust_ext.binarization_test(network, attacks["nothing"], inputs[:64], linf, batch_size=8, inner_points=300)
    assert [r["random_draws"] for r in full.records] == [r["random_draws"] for r in result.records]


def test_calibration_eases_until_the_attack_succeeds(network, digits, linf, pgd):
    """A middling attack fails the hardest tests and passes an easier one, which is then used."""
    middling = pgd(steps=5, relative_step=0.07)
    result = robust_ext.binarization_test(network, middling, digits[:32], linf, calibrate_on=16, inner_points=200)
    calibration = result.content["calibration"]
    at_full = [row for row in calibration["rows"] if row["inner_points"] == 200]
    scores, kappas = [row["score"] for row in at_full], [row["kappa"] for row in at_full]
    assert kappas == sorted(kappas, reverse=True)
    assert scores[0] < 0.95
    randoms = [row["random_score"] for row in at_full]
    assert randoms == sorted(randoms)
    chosen = calibration["chosen"]
    assert chosen["kappa"] == kappas[-1]
    assert scores[-1] >= 0.95
    assert all(score < 0.95 for score in scores[:-1])
    assert {row["inner_points"] for row in calibration["rows"]} == {200, 66, 20}
    assert result.content["settings"]["kappa"] == chosen["kappa"]
    strong = robust_ext.binarization_test(network, pgd(), digits[:16], linf, calibrate_on=16, inner_points=200)
    assert strong.content["calibration"]["chosen"] == {"kappa": 0.9999, "inner_points": 200}
    hopeless = robust_ext.binarization_test(
        network, lambda model, x, y: x, digits[:16], linf, calibrate_on=16, inner_points=50
    )
    assert hopeless.content["calibration"]["chosen"] is None
    assert hopeless.content["settings"]["kappa"] == 0.999


def test_hardness_curve_is_that_of_other_kappas(network, digits, linf):
    """The R-ASR that one run reports for easier kappas is what runs at those kappas find."""
    nothing = lambda model, x, y: x  # noqa: E731
    curve = one(robust_ext.binarization_test(network, nothing, digits[:24], linf, inner_points=100))["hardness"]
    assert [row["kappa"] for row in curve] == [0.0, 0.5, 0.9, 0.99, 0.999]
    for row in curve:
        rerun = robust_ext.binarization_test(network, nothing, digits[:24], linf, inner_points=100, kappa=row["kappa"])
        assert one(rerun)["random_score"] == row["random_score"]


@pytest.mark.parametrize(
    ("norm", "epsilon", "attack"),
    [
        ("l2", 0.8, "foolbox:L2DeepFoolAttack()"),
        ("l1", 4.0, "foolbox:EADAttack(steps=100, binary_search_steps=4)"),
    ],
)
@pytest.mark.parametrize("readout", ["logistic", "max-margin"])
def test_other_norms_and_readouts(norm, epsilon, attack, readout, network, digits):
    threat_model = robust_ext.ThreatModel(norm=norm, epsilon=epsilon)
    result = robust_ext.binarization_test(
        network, attack, digits[:16], threat_model, inner_points=200, readout=readout, canaries=0
    )
    assert one(result)["score"] >= 0.95
    assert one(result)["score"] > one(result)["random_score"] + 0.2
    assert one(result)["planted_points"] == {"drawn": 16, "adversarial": 16}


def test_many_planted_points_make_it_easier(network, digits, linf, pgd):
    few, many = (
        one(robust_ext.binarization_test(network, pgd(), digits[:32], linf, boundary_points=points, inner_points=200))
        for points in (1, 10)
    )
    assert many["planted_points"]["drawn"] == 320
    assert many["planted_points"]["adversarial"] >= 0.99 * 320
    assert many["random_score"] >= few["random_score"]


class Shifted(nn.Module):
    """The digits network for inputs in [-1, 1]."""

    def __init__(self):
        super().__init__()
        self.network = digits_network()
        self.eval()

    def forward(self, x):
        return self.network((x + 1) / 2)


def test_other_bounds_give_the_same_problems(network, digits, linf, pgd):
    wide = robust_ext.ThreatModel(norm="linf", epsilon=0.2, bounds=(-1.0, 1.0))
    ours = one(robust_ext.binarization_test(network, pgd(), digits[:16], linf, inner_points=100))
    theirs = one(robust_ext.binarization_test(Shifted(), pgd(), digits[:16] * 2 - 1, wide, inner_points=100))
    assert theirs["score"] == ours["score"] == 1.0
    assert theirs["random_score"] == ours["random_score"]


def test_models_of_the_hosts_keep_their_preprocessing(digits, linf, pgd):
    pytest.importorskip("art")
    from robust_ext.adapters.art.library import art  # noqa: F401

    pytest.importorskip("foolbox")
    from art.estimators.classification import PyTorchClassifier
    from foolbox import PyTorchModel

    mean, std = 0.3, 0.35
    inner = digits_network()

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner
            self.eval()

        def forward(self, x):
            return self.inner((x - mean) / std)

    loss = nn.CrossEntropyLoss()
    estimator = PyTorchClassifier(
        inner, loss=loss, input_shape=(1, 8, 8), nb_classes=10, clip_values=(0, 1), preprocessing=(mean, std)
    )
    inner.eval()
    models = {
        "torch": Normalised(),
        "foolbox": PyTorchModel(inner, bounds=(0, 1), preprocessing={"mean": [mean], "std": [std], "axis": -3}),
        "art": estimator,
    }
    found = {}
    for name, model in models.items():
        result = robust_ext.binarization_test(model, pgd(), digits[:8], linf, inner_points=60, minimum_samples=1)
        found[name] = [(r["attacks"]["attack"]["outcome"], r["random_draws"]) for r in result.records]
    assert found["torch"] == found["foolbox"] == found["art"]
    other = robust_ext.ThreatModel(norm="linf", epsilon=0.1, bounds=(-1, 1))
    with pytest.raises(robust_ext.core.errors.InvalidArgumentError, match="bounds the model states"):
        robust_ext.binarization_test(models["foolbox"], pgd(), digits[:2], other)


def test_result_holds_what_is_documented(tmp_path, network, digits, linf, pgd):
    result = robust_ext.binarization_test(
        network, pgd(), digits[:8], linf, inner_points=60, minimum_samples=1, out=tmp_path, seed=3
    )
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["kind"] == "binarization"
    assert content["seed"] == 3
    assert content["verdict"] == result.verdict
    assert content["settings"]["epsilon"] == 0.1
    assert "torch" in content["versions"]
    (attack,) = content["attacks"]
    for key in ("score", "random_score"):
        assert isinstance(attack[key], float)
        assert attack[f"{key}_interval"][0] <= attack[key] <= attack[f"{key}_interval"][1]
    for key in ("samples", "not_separable", "not_planted"):
        assert isinstance(attack[key], int)
    assert set(attack["canaries"]) == {"planted", "repaired"}
    assert set(attack["seconds"]) == {"features", "readout", "attack", "random", "verify", "total"}
    assert attack["seconds"]["total"] == pytest.approx(sum(v for k, v in attack["seconds"].items() if k != "total"))
    assert set(attack["passes"]) == {"forward", "backward"}
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert f"Verdict: {result.verdict.upper()}." in str(result)


def test_callables_are_offered_what_they_ask_for(network, digits, linf):
    seen = {}

    def curious(model, x, y, *, epsilon, generator, threat_model):
        seen.update(epsilon=epsilon, threat_model=threat_model, drawn=torch.rand(1, generator=generator))
        x += 10
        y += 10
        return (x - 10).clamp(0, 1)

    robust_ext.binarization_test(network, curious, digits[:3], linf, inner_points=30)
    assert seen["epsilon"] == 0.1
    assert seen["threat_model"] == linf


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_on_a_gpu(digits, linf, pgd):
    network = digits_network()
    cpu = one(robust_ext.binarization_test(network, pgd(), digits[:16], linf, inner_points=100))
    gpu = one(robust_ext.binarization_test(network.cuda(), pgd(), digits[:16], linf, inner_points=100))
    assert (cpu["score"], cpu["random_score"]) == (gpu["score"], gpu["random_score"])
