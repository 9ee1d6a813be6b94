"""Arguments that make no sense are refused by all four evaluations, at the door and by name."""

import pytest
import torch
from torch import nn

from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError, RobustExtError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.context import RunContext
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.registry.defense import as_defense
from tests.evaluations import small

ATTACK = "robust_ext:APGD(steps=2)"
X = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


KINDS = small.KINDS[:-1]


def evaluate(kind, *, epsilon=0.1, norm="linf", **given):
    """One evaluation of a small network on four samples."""
    model = network()
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    return small.call(kind, model, ATTACK, X, model(X).argmax(1), threat_model, **given)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 1e-30), ("linf", 1e-8), ("l2", 1e-6), ("l1", 5e-6)])
def test_epsilons_that_float32_does_not_resolve(name, norm, epsilon):
    with pytest.raises(RobustExtError, match=rf"epsilon: got {epsilon:g}, expected at least .* in {norm}: float32"):
        evaluate(name, norm=norm, epsilon=epsilon)


REFUSED = {
    "no samples": ({"x": X[:0], "y": torch.zeros(0, dtype=torch.int64)}, "inputs: got no samples"),
    "values": ({"x": X * 2}, "inputs: got values in"),
    "labels": ({"y": torch.zeros(3, dtype=torch.int64)}, "labels: got"),
    "threat model": ({"threat_model": 0.1}, "threat_model: got float"),
    "batch size": ({"batch_size": 0}, "batch_size: got 0"),
    "seed": ({"seed": -1}, "seed: got -1"),
    "unknown": ({"batchsize": 5}, "did you mean batch_size"),
    "settings": ({"settings": {}}, r"settings: got \w+, expected \w+Settings"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("case", REFUSED)
def test_arguments_of_every_evaluation(name, case):
    change, words = REFUSED[case]
    model = network()
    own = {"labels": change["y"]} if name == "binarization" and "y" in change else {}
    given = {"x": X, "y": model(X).argmax(1), "threat_model": ThreatModel(norm="linf", epsilon=0.1), **own, **change}
    with pytest.raises(InvalidArgumentError, match=words):
        small.call(name, model, ATTACK, **given)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ids", [5, "abcd", [0, 1, 2], [0, 0, 1, 2], [0, 1, 2, -1], [0, 1, 2, 2.5], [0, 1, 2, None], X])
def test_sample_ids(name, ids):
    with pytest.raises(RobustExtError, match=r"^sample_ids: got"):
        evaluate(name, sample_ids=ids)


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


@pytest.mark.parametrize("error", [KeyError("score"), SystemExit(0), RuntimeError("not fitted")], ids=repr)
def test_a_detector_that_raises_is_named(error):
    def score(x):
        raise error

    for call in (
        lambda: evaluate("mead", detectors=score),
        lambda: evaluate("binarization", detector=score, detector_data=X.repeat(8, 1, 1, 1)),
    ):
        with pytest.raises(ModelError, match=rf"detector: ScoreDetector, on \d+ inputs, raised {type(error).__name__}"):
            call()


def test_a_worst_case_over_no_attack_is_none():
    """A failed attack on a defense is for the report, beside the others; where there are none, there is no report."""

    def fails(model, x, y):
        raise KeyError("attack")

    model, linf = network(), ThreatModel(norm="linf", epsilon=0.1)
    given = (X, model(X).argmax(1), linf)
    with pytest.raises(AttackError, match=r"no attack was run.*raised KeyError"):
        small.call("test_time", model, fails, *given, draws=1, repeats=1)
    result = small.call("test_time", model, [fails, ATTACK], *given, draws=1, repeats=1)
    assert [entry["name"] for entry in result.content["refused"]] == ["fails"]
    with pytest.raises(AttackError, match=r"no attack was run.*has no threshold"):
        small.call("mead", model, "robust_ext:OrthogonalPGD()", *given)
