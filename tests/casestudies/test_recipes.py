"""Every study on the digits: its mechanism is present, the recipe of its authors fails, and the right one passes."""

from functools import cache

import pytest

from robust_ext import binarization_test, robust_accuracy
from robust_ext.casestudies import Trained, load_case_study
from robust_ext.core.errors import InconsistentModelError
from robust_ext.datasets import load_dataset

# Samples for the mechanism, for both recipes, the highest R-ASR of the right one, and the finding on the weak one.
STUDIES = {
    "adversarial_interpolation": (200, 128, 64, 0.2, None),
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


def data(split):
    images = load_dataset("digits", split=split)
    return images.take(images.choose(len(images), seed=0))


@cache
def on_digits(name):
    """The study and the defense, trained once a session, with all test images."""
    study, (inputs, labels) = load_case_study(name), data("test")
    given = {"inputs": inputs, "labels": labels, "threat_model": study.threat_model("digits"), "seed": 0}
    return study, Trained(module=study.trained(*data("train")), **given)


def measured(name, samples):
    study, case = on_digits(name)
    return study.measure(Trained(**{**vars(case), "inputs": case.inputs[:samples], "labels": case.labels[:samples]}))


def judged(name, kind, samples, **options):
    """The binarization test of the weak or the right recipe, at depth 1, as deeper problems cost the most."""
    study, case = on_digits(name)
    attacks, given = {kind: getattr(study, kind).attack}, {**study.settings, "depths": (1.0,), **options}
    detector = study.detector(case.module, *data("train"), seed=0)
    if detector is not None:
        given |= {"detector": detector, "detector_data": case.inputs[200:]}
    inputs, parts = case.inputs[:samples], study.parts(case.module)
    content = binarization_test(parts, attacks, inputs, case.threat_model, **given).content
    return {**content["attacks"][0], "findings": content["findings"]}


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
    # At seed 0 the authors' recipe for adversarial interpolation solves 61 of 64 on some machines, at the threshold.
    seed = {"mixup_inference": 1, "adversarial_interpolation": 4}.get(name, 0)
    weak, right = judged(name, "weak", weak_samples, seed=seed), judged(name, "right", right_samples, seed=seed)
    assert weak["verdict"] == "failed"
    assert code is None or weak["findings"][0]["code"] == code
    # Odds: half of the samples can be planted in, in the inverted test. Mixup inference: a rate of .95. Both: too few.
    assert right["verdict"] == "passed" or (name in ("odds", "mixup_inference") and right["verdict"] == "inconclusive")
    tests = right.get("tests") or {"one": right}
    assert all(part["random_score"] <= limit for part in tests.values())
    if name == "ecoc":
        assert weak["score"] <= 0.2
    if name == "empir":
        assert (weak["canaries"]["repaired"] >= 2, right["canaries"]["repaired"]) == (True, 0)
    if name in ("odds", "ml_loo", "trapdoor"):
        assert right["score"] >= 0.95
    if name == "adversarial_interpolation":
        # The single step that it is trained against misses what is there.
        _, case = on_digits(name)
        fgsm, inputs = "robust_ext:ObjectivePGD(algorithm='fgsm')", case.inputs[:64]
        assert binarization_test(case.module, fgsm, inputs, case.threat_model, depths=(1,)).verdict == "failed"


@pytest.mark.exhaustive
def test_curriculum_training_is_refused_in_train_mode_and_attacks_pass_in_eval_mode():
    found = measured("curriculum", 32)
    assert found.present, found.values
    study, case = on_digits("curriculum")
    module, inputs, labels, weak, right = case.module, case.inputs[:32], case.labels[:32], study.weak, study.right
    linf = case.threat_model
    assert weak.train_mode
    with pytest.raises(InconsistentModelError, match="is in train mode") as refused:
        binarization_test(module.train(), weak.attack, inputs, linf)
    assert refused.value.kind == "train_mode"
    with pytest.raises(InconsistentModelError, match="is in train mode"):
        robust_accuracy(module, weak.attack, inputs, labels, linf)
    # In eval mode the steps of the authors find planted points, too.
    for recipe in (weak, right):
        result = binarization_test(module.eval(), recipe.attack, inputs, linf)
        assert result.verdict == "passed", str(result)
