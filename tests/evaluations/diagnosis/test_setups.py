"""Setups: what is wrong with labels, inputs, outputs or threat model is named first, and sound ones are silent."""

import warnings

import pytest
import torch

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.core.finding_texts import SETUP
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes.scale import find_scale
from tests.evaluations.diagnosis import setups
from tests.evaluations.diagnosis.setups import ATTACK, MISTAKES, SOUND, digits, linf, setup


def diagnosed(one):
    return setups.diagnosed(one, planted=0, references=False)


def doubts(result):
    return [finding.code for finding in result.findings if finding.code in SETUP]


@pytest.mark.parametrize("words", SOUND)
def test_a_sound_setup_has_no_finding_of_weight(words):
    if words.startswith("ART"):
        pytest.importorskip("art")
    assert [one.code for one in diagnosed(SOUND[words]()).findings if one.weight != "low"] == []


NO_PASTE = ("batch_statistics", "constant_output", "chance_accuracy", "threat_scale")


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named_first_the_attack_is_not_blamed_and_the_remedy_as_printed_helps_as_stated(words):
    one = MISTAKES[words]()
    result = diagnosed(one)
    assert one.named in (setups.first(result) or "")
    if isinstance(result, Exception):
        return
    assert not any(finding.attack for finding in result.findings)
    if one.named in SETUP and one.named not in NO_PASTE:
        names = {"model": one.model, "inputs": one.inputs, "labels": one.labels}
        exec(result.likely.remedies[0].paste, names)  # noqa: S102 - our own lines
        fixed = diagnosed(one._replace(**{key: names[key] for key in ("model", "inputs", "labels")}))
        assert doubts(fixed) == []
        stated = f"({100 * fixed.content['clean_accuracy']:.1f}%)"
        # Of channels that are last, none is known: the model raised.
        assert words == "channels last" or stated in result.likely.evidence[0]


def test_a_shuffle_is_told_from_a_weak_model_by_more_than_accuracy():
    (x, y), weak, shuffled = digits(), 0, 0
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(y), generator=draw)[:32]
        noisy = (x[rows] + 0.9 * torch.randn(x[rows].shape, generator=draw)).clamp(0, 1)
        weak += bool(doubts(diagnosed(setup(x=noisy, y=y[rows]))))
        mixed = y[rows][torch.randperm(32, generator=draw)]
        shuffled += doubts(diagnosed(setup(x=x[rows], y=mixed))) == ["chance_accuracy"]
    assert weak <= 1
    assert shuffled >= 8


MNIST, CIFAR, LARGE = (1, 28, 28), (3, 32, 32), (3, 64, 64)
USUAL = [
    ("linf", 0.3, (0, 1), MNIST), ("linf", 8 / 255, (0, 1), CIFAR), ("linf", 16 / 255, (-1, 1), CIFAR),
    ("linf", 8 / 255, (-1, 1), CIFAR), ("linf", 0.25 / 255, (0, 1), LARGE), ("linf", 0.25, (0, 255), LARGE),
    ("linf", 4 / 255 / 0.225, (-2.118, 2.64), LARGE), ("linf", 0.1, (-3, 3), (20,)), ("l2", 36 / 255, (0, 1), CIFAR),
    ("l2", 3.0, (0, 1), MNIST), ("l2", 128.0, (0, 255), CIFAR), ("l2", 0.01, (0, 1), (20,)),
    ("l1", 12.0, (0, 1), CIFAR), ("l1", 1.0, (0, 1), MNIST)
]  # fmt: skip
OF_ANOTHER_SCALE = [
    ("linf", 8, (0, 1), CIFAR), ("linf", 2.0, (-1, 1), CIFAR), ("linf", 8 / 255, (0, 255), LARGE),
    ("linf", 0.3, (0, 255), MNIST), ("linf", 8 / 255 / 255, (0, 1), CIFAR), ("linf", 8 / 255, (-2.118, 2.64), LARGE),
    ("linf", 0.3, (-0.4242, 2.8215), MNIST), ("l2", 8 / 255, (0, 1), CIFAR), ("l2", 30.0, (0, 1), CIFAR),
    ("l2", 0.5, (0, 255), CIFAR), ("l1", 8 / 255, (0, 1), CIFAR), ("l1", 2000.0, (0, 1), CIFAR)
]  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "codes"), [(one, []) for one in USUAL] + [(one, ["threat_scale"]) for one in OF_ANOTHER_SCALE]
)
def test_budgets_of_another_scale_are_a_finding_and_usual_ones_are_not(budget, codes):
    """On samples that go over all of the bounds, of two classes."""
    norm, epsilon, bounds, shape = budget
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    inputs = bounds[0] + torch.rand(16, *shape, generator=torch.Generator().manual_seed(0)) * threat_model.width
    found = find_scale(inputs, torch.arange(16) % 2, bounds=bounds, budgets=[threat_model])
    assert [one.code for one in found] == codes


@pytest.mark.parametrize("words", ["labels of the next sample", "epsilon 8 in [0, 1]"])
def test_other_evaluations_warn_of_it_once(words):
    one = MISTAKES[words]()
    given = one.inputs, one.labels, one.threat_model
    for evaluate in (
        lambda: robust_ext.robust_accuracy(one.model, ATTACK, *given),
        lambda: robust_ext.evaluate_defense(lambda x: x, ATTACK, *given, classifier=one.model),
        lambda: robust_ext.mead(one.model, [ATTACK], *given, detectors={"contrast": lambda x: x.flatten(1).std(1)}),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, *_ = evaluate().findings
        assert found.code == one.named
        assert sum(found.cause in str(entry.message) for entry in caught if entry.category is RobustExtWarning) == 1


def test_a_binarization_test_doubts_scale_and_constant_outputs_without_labels():
    for model, threat_model, codes in (
        ("always class 3", linf(), []),
        ("outputs that ignore the input", linf(), ["constant_output"]),
        (None, linf(8), ["threat_scale"]),
    ):
        network = MISTAKES[model]().model if model else digits_network()
        given = network, ATTACK, setups.IMAGES[:8], threat_model
        assert doubts(robust_ext.binarization_test(*given, inner_points=50, depths=(1,))) == codes
