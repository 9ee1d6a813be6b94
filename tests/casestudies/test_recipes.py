"""Every study on the digits: its mechanism is present, the recipe of its authors fails, and the right one passes."""

import pytest

from tests.casestudies.on_digits import judged, measured

# Samples for the mechanism, for both recipes, the highest R-ASR of the right one, and the finding on the weak one.
STUDIES = {
    "adversarial_interpolation": (200, 64, 64, 0.2, None),
    "feature_scattering": (200, 64, 64, 0.5, None),  # Uniform inner points leave it above .75 in the paper.
    "k_winners": (200, 32, 32, 1.0, "wrong_gradient"),
    "mmc": (32, 32, 32, 1.0, None),
    "pcl": (200, 32, 64, 1.0, "saturated_loss"),
    "thermometer": (200, 32, 32, 1.0, None),
    "ecoc": (200, 8, 32, 0.2, None),
    "empir": (200, 32, 64, 0.2, None),
    # It misses a few of 64 problems at some seeds, too many for a verdict on fewer; a failure shows on fewer samples.
    "mixup_inference": (64, 16, 64, 1.0, None),
    "odds": (200, 8, 12, 1.0, None),
    "ml_loo": (200, 12, 48, 0.2, None),
    "trapdoor": (200, 48, 64, 0.2, None),
}
QUICK = ("k_winners", "mmc", "pcl")


@pytest.mark.parametrize("name", QUICK)
def test_mechanism(name):
    found = measured(name, STUDIES[name][0])
    assert found.present, found.values
    assert found.values.get("errors corrected by true labels", 0) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STUDIES)
def test_the_recipe_of_the_authors_fails_and_the_right_one_passes(name):
    if name not in QUICK:
        # Here, as another process would have to train the defense again.
        test_mechanism(name)
    _, weak_samples, right_samples, limit, code = STUDIES[name]
    seed = {"seed": 1} if name == "mixup_inference" else {}
    weak, right = judged(name, "weak", weak_samples, **seed), judged(name, "right", right_samples, **seed)
    assert weak["verdict"] == "failed"
    assert code is None or weak["findings"][0]["code"] == code
    # Odds: about half of the samples can be planted in, in the inverted test; too few for a verdict, also of 32.
    assert right["verdict"] == "passed" or (name == "odds" and right["verdict"] == "inconclusive")
    tests = right.get("tests") or {"one": right}
    assert all(part["random_score"] <= limit for part in tests.values())
    if name == "ecoc":
        assert weak["score"] <= 0.2
    if name == "empir":
        assert (weak["canaries"]["repaired"] >= 2, right["canaries"]["repaired"]) == (True, 0)
    if name in ("odds", "ml_loo", "trapdoor"):
        assert right["score"] >= 0.95
