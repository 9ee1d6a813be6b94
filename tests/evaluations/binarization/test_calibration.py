"""Calibration: easier where no attack is near perfect, deeper where one is, and why, in one sentence or two."""

from robust_ext import as_attack, binarization_test
from robust_ext.core.random import derive_seed

POINTS = {"inner_points": 120, "gap": 0.05, "boundary_points": 1}
SMALL = {"calibrate_on": 12, "inner_points": 120, "random_inner": 40, "random_corners": 40, "canaries": 0}


def test_it_eases_until_the_attack_succeeds(network, digits, linf, pgd):
    """A middling attack fails the hardest tests and passes an easier one, which is then used."""
    middling = pgd(steps=5, relative_step=0.07)
    result = binarization_test(network, middling, digits[:12], linf, depths=(1,), **SMALL)
    calibration = result.content["calibration"]
    rows, chosen = calibration["rows"], calibration["chosen"]
    steps = [(count, kappa) for count in (120, 40, 12) for kappa in (0.9999, 0.999, 0.99, 0.9, 0.5, 0.0)]
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
    attacks = {"strong": pgd(), "nothing": lambda model, x, y: x}
    result = binarization_test(network, attacks, digits[:12], linf, **SMALL)
    calibration = result.content["calibration"]
    settings = {**SMALL, "kappa": 0.9999, "calibrate_on": 0, "judge_seed": derive_seed(0, "calibration")}
    again = binarization_test(network, attacks, digits[:12], linf, **settings)
    expected, deepest = {}, 1
    for name, attack in again.attacks.items():
        for row in attack["depths"][1:]:
            solved = row["found_by_others"], row["random_found_by_others"], row["problems_by_others"]
            expected[name, row["depth"]] = solved
            if row["depth"] == 2 * deepest and solved[2] >= 6 and solved[0] >= 0.95 * solved[2]:
                deepest = row["depth"]
    deeper = [row for row in calibration["rows"] if row["depth"] > 1]
    found = {}
    for row in deeper:
        solved = [round((row[key] or 0) * row["samples"]) for key in ("score", "random_score")]
        found[row["attack"], row["depth"]] = (*solved, row["samples"])
    # An attack that fails the test itself is not posed deeper problems in it.
    assert {key: solved for key, solved in found.items() if key[0] == "strong"} == expected
    assert {solved[0] for key, solved in found.items() if key[0] == "nothing"} == {0}
    assert {row["kappa"] for row in deeper} == {0.9999}
    assert calibration["chosen"] == {"kappa": 0.9999, **POINTS, "depth": deepest}
    assert deepest > 1
    assert result.content["settings"]["least_depth"] == deepest
    verdict = result.attacks["strong"]
    assert verdict["verdict_depth"] <= deepest
    assert verdict["verdict"] == "inconclusive"


def test_nothing_is_chosen_for_a_hopeless_attack(network, digits, linf):
    result = binarization_test(network, lambda model, x, y: x, digits[:12], linf, **{**SMALL, "inner_points": 30})
    calibration = result.content["calibration"]
    assert calibration["chosen"] is None
    # Every number of inner points, radius and number of planted points, each with every kappa.
    kappas, tried = (0.9999, 0.999, 0.99, 0.9, 0.5, 0.0), [(30, 0.05, 1), (10, 0.05, 1), (3, 0.05, 1)]
    tried += [(30, 0.2, 1), (30, 0.5, 1), (30, 0.05, 4), (30, 0.05, 10)]
    keys = ("inner_points", "gap", "boundary_points", "kappa")
    steps = [tuple(row[key] for key in keys) for row in calibration["rows"]]
    assert steps == [(*points, kappa) for points in tried for kappa in kappas]
    assert result.content["settings"]["kappa"] == 0.999


def test_rows_of_other_points_are_tests_with_these(network, digits, linf):
    """A smaller ball of inner points and more planted ones: what an attack and random search find of the same draws."""
    attack = as_attack("robust_ext:ObjectivePGD(algorithm='fgsm', step_size=0.02)")
    few = {**SMALL, "calibrate_on": 8, "inner_points": 60, "depths": (1,)}
    rows = binarization_test(network, attack, digits[:8], linf, **few).content["calibration"]["rows"]
    few |= {"calibrate_on": 0, "judge_seed": derive_seed(0, "calibration"), "kappa": 0.0}
    for points in ({"gap": 0.5}, {"boundary_points": 10}):
        (again,) = binarization_test(network, attack, digits[:8], linf, **few, **points).content["attacks"]
        wanted = {"inner_points": 60, "gap": 0.05, "boundary_points": 1, "kappa": 0.0, **points}
        (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
        assert (row["score"], row["random_score"]) == (again["score"], again["random_score"])
        assert 0 < row["score"] < 0.95
