"""Setups: what is wrong with labels, inputs, outputs or threat model is named first, and sound ones are silent."""

import warnings

import pytest
import torch

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.core.finding_texts import SETUP
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes.setup import judge_setup
from tests.evaluations.diagnosis.setups import (
    ATTACK,
    MISTAKES,
    SOUND,
    Apply,
    Setup,
    diagnosed,
    digits,
    first,
    haze,
    linf,
    noise,
    samples,
    setup,
)
from tests.evaluations.diagnosis.zoo import published

QUICK = {"planted": 0, "references": False}
LIBRARIES = {"Foolbox model with preprocessing": "foolbox", "ART classifier with preprocessing": "art"}


@pytest.mark.parametrize("words", SOUND)
def test_a_sound_setup_has_no_finding_of_weight(words):
    if words in LIBRARIES:
        pytest.importorskip(LIBRARIES[words])
    result = diagnosed(SOUND[words](), **QUICK)
    assert [one.code for one in result.findings if one.weight != "low"] == []


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named_first_and_the_attack_is_not_blamed(words):
    one = MISTAKES[words]()
    result = diagnosed(one, **QUICK)
    assert one.named in (first(result) or "")
    if not isinstance(result, Exception):
        assert not any(finding.attack for finding in result.findings)


PASTED = [
    words
    for words in MISTAKES
    if MISTAKES[words]().named in {*SETUP} - {"batch_statistics", "constant_output", "chance_accuracy", "threat_scale"}
]


@pytest.mark.parametrize("words", PASTED)
def test_the_remedy_as_printed_gives_the_accuracy_that_is_stated(words):
    one = MISTAKES[words]()
    result = diagnosed(one, **QUICK)
    names = {"model": one.model, "inputs": one.inputs, "labels": one.labels}
    exec(result.likely.remedies[0].paste, names)  # noqa: S102 - our own lines
    fixed = diagnosed(Setup(**{**vars(one), **{key: names[key] for key in ("model", "inputs", "labels")}}), **QUICK)
    assert [finding.code for finding in fixed.findings if finding.code in SETUP] == []
    stated = result.likely.evidence[0]
    # Of channels that are last, none is known: the model raised.
    assert words == "channels last" or f"({100 * fixed.content['clean_accuracy']:.1f}%)" in stated


def _gaussian(x, strength):
    return strength * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda x: (x + _gaussian(x, 0.5)).clamp(0, 1), None),
        (lambda x: (x + noise(x, 0.5)).clamp(0, 1), None),
        (lambda x: (x + 0.5).clamp(0, 1), None),
        (lambda x: haze(x, 1.0), None),
        (lambda x: 0.2 * x + 0.8 * x.mean((1, 2, 3), keepdim=True), None),
        (lambda x: x / 255, "input_scale"),
        (lambda x: x * 255, "input_scale"),
        (lambda x: (_gaussian(x, 0.2) + x).clamp(0, 1) / 255, "input_scale"),
    ],
)
def test_a_network_of_clean_mnist_is_not_given_another_scale_for_corrupted_images(change, code, flat):
    network, x, y = published.mnist()
    inputs, model = change(x), network
    if flat:
        inputs, model = inputs.flatten(1), Apply(lambda x: network(x.view(-1, 1, 28, 28)))
    assert _doubted(model, inputs, y) == ([] if code is None else [code])


def _doubted(model, inputs, labels):
    """Codes of a setup's findings about accuracy that have to do with inputs."""
    with torch.no_grad():
        logits = model(inputs)
    bounds = (min(0.0, float(inputs.min())), max(1.0, float(inputs.max())))
    found = judge_setup(model, inputs, labels, logits, bounds=bounds, budgets=[], seed=0)
    return [one.code for one in found if one.code.startswith("input")]


def test_a_shuffle_is_told_from_a_weak_model_by_more_than_accuracy():
    x, y = digits()
    network = digits_network()

    def codes(x, y):
        result = diagnosed(setup(network, x=x, y=y), **QUICK)
        return [finding.code for finding in result.findings if finding.code in SETUP]

    weak, shuffled = 0, 0
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(y), generator=draw)[:32]
        noisy = (x[rows] + 0.9 * torch.randn(x[rows].shape, generator=draw)).clamp(0, 1)
        weak += bool(codes(noisy, y[rows]))
        shuffled += codes(x[rows], y[rows][torch.randperm(32, generator=draw)]) == ["chance_accuracy"]
    assert weak <= 1
    assert shuffled >= 8


@pytest.mark.parametrize(
    ("norm", "epsilon", "bounds", "shape"),
    [
        ("linf", 0.3, (0, 1), (1, 28, 28)), ("linf", 8 / 255, (0, 1), (3, 32, 32)),
        ("linf", 16 / 255, (-1, 1), (3, 32, 32)), ("linf", 8 / 255, (-1, 1), (3, 32, 32)),
        ("linf", 0.25 / 255, (0, 1), (3, 64, 64)), ("linf", 0.25, (0, 255), (3, 64, 64)),
        ("linf", 4 / 255 / 0.225, (-2.118, 2.64), (3, 64, 64)), ("linf", 0.1, (-3, 3), (20,)),
        ("l2", 36 / 255, (0, 1), (3, 32, 32)), ("l2", 3.0, (0, 1), (1, 28, 28)), ("l2", 128.0, (0, 255), (3, 32, 32)),
        ("l2", 0.01, (0, 1), (20,)), ("l1", 12.0, (0, 1), (3, 32, 32)), ("l1", 1.0, (0, 1), (1, 28, 28)),
    ],
)  # fmt: skip
def test_usual_budgets_are_no_finding(norm, epsilon, bounds, shape):
    assert _scale(norm, epsilon, bounds, shape) == []


@pytest.mark.parametrize(
    ("norm", "epsilon", "bounds", "shape"),
    [
        ("linf", 8, (0, 1), (3, 32, 32)), ("linf", 2.0, (-1, 1), (3, 32, 32)),
        ("linf", 8 / 255, (0, 255), (3, 64, 64)), ("linf", 0.3, (0, 255), (1, 28, 28)),
        ("linf", 8 / 255 / 255, (0, 1), (3, 32, 32)), ("linf", 8 / 255, (-2.118, 2.64), (3, 64, 64)),
        ("linf", 0.3, (-0.4242, 2.8215), (1, 28, 28)), ("l2", 8 / 255, (0, 1), (3, 32, 32)),
        ("l2", 30.0, (0, 1), (3, 32, 32)), ("l2", 0.5, (0, 255), (3, 32, 32)), ("l1", 8 / 255, (0, 1), (3, 32, 32)),
        ("l1", 2000.0, (0, 1), (3, 32, 32)),
    ],
)  # fmt: skip
def test_budgets_of_another_scale_are_a_finding(norm, epsilon, bounds, shape):
    assert _scale(norm, epsilon, bounds, shape) == ["threat_scale"]


def _scale(norm, epsilon, bounds, shape):
    """What is found in samples that go over all of the bounds, of two classes."""
    from robust_ext.evaluations.causes.scale import find_scale

    x = torch.rand(16, *shape, generator=torch.Generator().manual_seed(0))
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    inputs = bounds[0] + x * threat_model.width
    return [one.code for one in find_scale(inputs, torch.arange(16) % 2, bounds=bounds, budgets=[threat_model])]


@pytest.mark.parametrize(
    ("words", "code"), [("labels of the next sample", "label_order"), ("epsilon 8 in [0, 1]", "threat_scale")]
)
def test_other_evaluations_warn_of_it_once(words, code):
    one = MISTAKES[words]()
    mead = {"detectors": {"contrast": lambda x: x.flatten(1).std(1)}}
    given = one.inputs, one.labels, one.threat_model
    evaluations = (
        lambda: robust_ext.robust_accuracy(one.model, ATTACK, *given),
        lambda: robust_ext.evaluate_defense(lambda x: x, ATTACK, *given, classifier=one.model),
        lambda: robust_ext.mead(one.model, [ATTACK], *given, **mead),
    )
    for evaluate in evaluations:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = evaluate()
        assert [finding.code for finding in result.findings][:1] == [code]
        cause = result.findings[0].cause
        assert sum(cause in str(entry.message) for entry in caught if entry.category is RobustExtWarning) == 1


@pytest.mark.parametrize(
    ("model", "threat_model", "code"),
    [
        ("always class 3", linf(), None),
        ("outputs that ignore the input", linf(), "constant_output"),
        (None, linf(8), "threat_scale"),
        (None, linf(), None),
    ],
)
def test_a_binarization_test_doubts_scale_and_constant_outputs_without_labels(model, threat_model, code):
    network = digits_network() if model is None else MISTAKES[model]().model
    result = robust_ext.binarization_test(network, ATTACK, samples(8)[0], threat_model, inner_points=50, depths=(1,))
    assert [finding.code for finding in result.findings if finding.code in SETUP] == ([] if code is None else [code])
