"""Results beside each other: against scipy, and by hand."""

import json

import pytest
from scipy.stats import binomtest, multinomial
from typer.testing import CliRunner

import robust_ext
from robust_ext.cli.app import app
from robust_ext.core.statistics import difference_interval, paired_difference
from tests.evaluations import small

SETTINGS = {"inner_points": 30, "random_inner": 10, "random_corners": 10, "witness_steps": 2, "witness_queries": 4}
STRONG = "robust_ext:APGD(steps=20, loss='ce')"


def still(model, x, y):
    return x


@pytest.mark.parametrize(("gained", "lost", "trials"), [(0, 0, 5), (7, 0, 7), (3, 9, 40), (600, 500, 2000), (5, 5, 10)])
def test_paired_difference_is_mcnemars_test(gained, lost, trials):
    difference, (low, high), p_value = paired_difference(gained, lost, trials)
    assert difference == pytest.approx((gained - lost) / trials)
    assert low <= difference <= high
    assert p_value == pytest.approx(binomtest(gained, gained + lost).pvalue if gained + lost else 1)


def test_the_interval_of_a_paired_difference_covers_what_it_states():
    trials = 8
    found = {(up, down): paired_difference(up, down, trials)[1] for up in range(9) for down in range(9 - up)}
    for rates in ((0.0, 0.0), (0.2, 0.1), (0.5, 0.4), (0.9, 0.05)):
        covered = 0.0
        for (up, down), (low, high) in found.items():
            chance = multinomial.pmf([up, down, trials - up - down], trials, [*rates, 1 - sum(rates)])
            covered += chance * (low <= rates[0] - rates[1] <= high)
        assert covered >= 0.95


def test_the_interval_of_a_difference_is_newcombes():
    """His example (f): 9 of 10 and 3 of 10, with Wilson's intervals, by method 10."""
    few, many = (binomtest(hits, 10).proportion_ci(method="wilson") for hits in (3, 9))
    low, high = difference_interval(0.3, (few.low, few.high), 0.9, (many.low, many.high))
    assert (round(low, 4), round(high, 4)) == (0.1705, 0.8090)


def test_two_tests_of_the_same_samples_and_the_command_that_compares_them(tmp_path):
    for name, attack, more in (("weak", still, {}), ("strong", STRONG, {"batch_size": 5})):
        test = (small.NETWORK, {name: robust_ext.as_attack(attack, name=name)}, small.INPUTS, small.LINF)
        robust_ext.binarization_test(*test, out=tmp_path / name, **SETTINGS, **more)
    first, second = (robust_ext.load_result(tmp_path / name) for name in ("weak", "strong"))
    found = robust_ext.compare(tmp_path / "weak", str(tmp_path / "strong"))
    (change,) = found.content["changes"]
    assert change["verdict"] == [first.verdict, second.verdict]
    assert change["same"] == {"network": True, "code of the network": True, "samples": True}
    assert change["settings"].keys() >= {"batch_size", "attack weak"}
    assert change["settings"]["batch_size"][1] == 5
    (row,) = change["scores"]
    one, other = (
        {record["sample"] for record in result.records if record["attacks"][name]["outcome"] == "found"}
        for name, result in (("weak", first), ("strong", second))
    )
    assert (row["gained"], row["lost"]) == (len(other - one), len(one - other))
    assert row["p_value"] == pytest.approx(binomtest(row["gained"], row["gained"] + row["lost"]).pvalue)
    assert (row["before"], row["after"], row["score"]) == (first.score, second.score, "weak -> strong")
    file = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "weak"), str(tmp_path / "strong"), "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert done.output.rstrip() == str(found).rstrip()
    assert json.loads(file.read_text("utf-8")) == json.loads(json.dumps(found.to_dict(), allow_nan=False))


def test_robust_accuracy_is_compared_sample_by_sample():
    def accuracy(attacks, samples=10):
        return robust_ext.robust_accuracy(
            small.NETWORK, attacks, small.INPUTS[:samples], small.LABELS[:samples], small.LINF
        )

    one, other = accuracy({"attack": still}), accuracy({"attack": small.sign_step})
    rows = {row["score"]: row for row in robust_ext.compare(one, other).rows()}
    lost = round(10 * (1 - other.robust_accuracy(0.1)))
    for name in ("attack, epsilon 0.1", "worst case, epsilon 0.1"):
        assert (rows[name]["gained"], rows[name]["lost"], rows[name]["paired"]) == (0, lost, 10)
    (change,) = robust_ext.compare(one, accuracy({"still": still, "step": small.sign_step}, 8)).content["changes"]
    assert change["same"]["samples"] is False
    assert change["settings"]["samples"] == [10, 8]
    (row,) = [row for row in change["scores"] if row["score"] == "worst case, epsilon 0.1"]
    assert row["p_value"] is None
    assert row["difference_low"] < row["difference"] < row["difference_high"]
    assert change["only"] == [["attack"], ["still", "step"]]
