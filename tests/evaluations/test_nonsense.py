"""Arguments that make no sense are refused by all four evaluations, at the door and by name."""

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError, RobustExtError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import RunContext
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.registry.defense import as_defense

ATTACK = "robust_ext:APGD(steps=2)"
X = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def evaluate(name, *, epsilon=0.1, norm="linf", bounds=(0.0, 1.0), **keywords):
    """One evaluation of a small network on four samples."""
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    model = network()
    y = model(X).argmax(1)
    if name == "binarization_test":
        keywords = {"inner_points": 20, "canaries": 0, **keywords}
        return robust_ext.binarization_test(model, ATTACK, X, threat_model, **keywords)
    if name == "mead":
        detector = keywords.pop("detectors", lambda x: x.flatten(1).std(1))
        return robust_ext.mead(model, ATTACK, X, y, threat_model, detectors=detector, resamples=0, **keywords)
    if name == "robust_accuracy":
        return robust_ext.robust_accuracy(model, ATTACK, X, y, threat_model, **keywords)
    return robust_ext.evaluate_defense(lambda x: x.round(), ATTACK, X, y, threat_model, classifier=model, **keywords)


EVALUATIONS = ("binarization_test", "mead", "robust_accuracy", "evaluate_defense")


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 1e-30), ("linf", 1e-8), ("l2", 1e-6), ("l1", 5e-6)])
def test_epsilons_that_float32_does_not_resolve(name, norm, epsilon):
    with pytest.raises(RobustExtError, match=rf"epsilon: got {epsilon:g}, expected at least .* in {norm}: float32"):
        evaluate(name, norm=norm, epsilon=epsilon)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_same_calls_with_an_epsilon_that_makes_sense(name):
    assert evaluate(name).content["kind"]


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("ids", [5, "abcd", [0, 1, 2], [0, 0, 1, 2], [0, 1, 2, -1], [0, 1, 2, 2.5], [0, 1, 2, None], X])
def test_sample_ids(name, ids):
    with pytest.raises(RobustExtError, match=r"^sample_ids: got"):
        evaluate(name, sample_ids=ids)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_a_run_folder_without_a_name(name, tmp_path, monkeypatch):
    """It used to be the current folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"^out: got '', expected the name of a folder; '.' is the current"):
        evaluate(name, out="")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given",
    [
        {"origin": "net.py"},
        {"origin": {"model": 3}},
        {"command": "demo"},
        {"repair": "yes"},
    ],
    ids=str,
)
def test_surroundings_of_a_run(given):
    with pytest.raises(InvalidArgumentError, match=rf"^{next(iter(given))}: got"):
        RunContext(**given)


@pytest.mark.parametrize(
    "bounds", [None, 1, (0,), (1, 0), (0, "1"), (0, 1e300), torch.zeros(2), nn.Identity()], ids=str
)
def test_bounds(bounds):
    for call in (
        lambda: ThreatModel(norm="linf", epsilon=0.1, bounds=bounds),
        lambda: load_suite("quick", bounds=bounds),
        lambda: as_defense("bit-depth", network(), X, bounds=bounds),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^bounds: got"):
            call()


@pytest.mark.parametrize("name", EVALUATIONS)
@pytest.mark.parametrize("settings", [3, {}, "fast", object()], ids=lambda value: type(value).__name__)
def test_settings_of_another_kind(name, settings):
    with pytest.raises(InvalidArgumentError, match=r"^settings: got \w+, expected \w+Settings"):
        evaluate(name, settings=settings)


@pytest.mark.parametrize("error", [KeyError("score"), SystemExit(0), RuntimeError("not fitted")], ids=repr)
def test_a_detector_that_raises_is_named(error):
    def score(x):
        raise error

    for call in (
        lambda: evaluate("mead", detectors=score),
        lambda: evaluate("binarization_test", detector=score, detector_data=X.repeat(8, 1, 1, 1)),
    ):
        with pytest.raises(ModelError, match=rf"detector: ScoreDetector, on \d+ inputs, raised {type(error).__name__}"):
            call()


def test_a_worst_case_over_no_attack_is_none():
    """A failed attack on a defense is for the report, beside the others; where there are none, there is no report."""

    def fails(model, x, y):
        raise KeyError("attack")

    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    model = network()
    y = model(X).argmax(1)
    given = {"classifier": model, "draws": 1, "repeats": 1}
    with pytest.raises(AttackError, match=r"no attack was run.*raised KeyError"):
        robust_ext.evaluate_defense(lambda x: x + 0, fails, X, y, threat_model, **given)
    result = robust_ext.evaluate_defense(lambda x: x + 0, [fails, ATTACK], X, y, threat_model, **given)
    assert [entry["name"] for entry in result.content["refused"]] == ["fails"]
    with pytest.raises(AttackError, match=r"no attack was run.*has no threshold"):
        robust_ext.mead(
            model,
            "robust_ext:OrthogonalPGD()",
            X,
            y,
            threat_model,
            detectors=lambda x: x.flatten(1).std(1),
            resamples=0,
        )
