"""Dense-layer analysis: what the network sees, what it computes, how it is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors.dla import DLADetector

# Of the scaled exponential linear unit (Klambauer et al. 2017).
ALPHA, SCALE = 1.6732632423543772, 1.0507009873554805


def network(classes: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, classes)
        ).eval()


def data(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 2, 3, generator=torch.Generator().manual_seed(seed))


def fitted(classifier: nn.Module, **given) -> DLADetector:
    detector = DLADetector(classifier, **{"layers": ["4"], "widths": [7, 3], **given})
    detector.fit(data(50), 1 - data(30, 1) ** 4, epochs=5)
    return detector


def selu(value: float) -> float:
    return SCALE * value if value > 0 else SCALE * ALPHA * (np.exp(value) - 1)


@pytest.mark.parametrize("layers", [["4"], ["2", "4"], []])
def test_scores_are_those_of_the_formula(layers: list[str]) -> None:
    classifier, x = network(), data(6, seed=4)
    detector = fitted(classifier, layers=layers)
    parameters = [p.numpy().astype(np.float64) for p in detector.alarm.parameters()]
    hidden = classifier[:3](x).detach().numpy(), classifier[:5](x).detach().numpy()
    for row, score in enumerate(detector.score(x).tolist()):
        seen = {"2": hidden[0][row], "4": hidden[1][row]}
        values = np.concatenate([*(seen[name] for name in layers), classifier(x)[row].detach().numpy()])
        for position in range(0, len(parameters), 2):
            weight, bias = parameters[position], parameters[position + 1]
            values = np.array([weight[unit] @ values + bias[unit] for unit in range(len(bias))])
            if position + 2 < len(parameters):
                values = np.array([selu(value) for value in values])
        assert values.shape == (1,)
        assert score == pytest.approx(float(values[0]), abs=1e-5)


def test_sizes_are_those_of_the_reference() -> None:
    with torch.random.fork_rng(devices=[]):
        classifier = nn.Sequential(nn.Flatten(), nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 10)).eval()
    detector = DLADetector(classifier, layers=["2"])
    detector.fit(data(8), data(8, 1), epochs=1)
    shapes = [tuple(p.shape) for p in detector.alarm.parameters() if p.dim() == 2]
    assert shapes == [(100, 522), (50, 100), (10, 50), (1, 10)]
    assert [type(part) for part in detector.alarm[1::2]] == [nn.SELU] * 3


def test_feature_maps_are_flattened() -> None:
    detector = DLADetector(digits_network(), layers=["3", "6"], widths=[4])
    detector.fit(torch.rand(6, 1, 8, 8), torch.rand(6, 1, 8, 8), epochs=1)
    assert detector.features == 32 * 4 * 4 + 128 + 10


def test_gradients_are_those_of_finite_differences() -> None:
    detector = fitted(network()).double()
    x = data(3).double().requires_grad_()
    assert torch.autograd.gradcheck(detector.score, (x,))
    assert detector.differentiable
    assert not detector.random


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9))
def test_scores_do_not_depend_on_batches(cut: int, count: int) -> None:
    detector, x = fitted(network()), data(count, 2)
    pieces = [detector.score(part) for part in torch.split(x, cut)]
    torch.testing.assert_close(torch.cat(pieces), detector.score(x), rtol=1e-5, atol=1e-6)


def test_training_follows_its_seed_and_leaves_no_trace() -> None:
    classifier = network()
    before = [p.clone() for p in classifier.parameters()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    clean, adversarial = data(40), data(20, 1).square()
    weights = []
    for seed in (0, 0, 1):
        detector = DLADetector(classifier, layers=["4"])
        losses = detector.fit(clean, adversarial, epochs=30, seed=seed)
        weights.append(detector.alarm[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, classifier.parameters(), strict=True))
    assert all(p.grad is None for p in classifier.parameters())
    assert not any(p.requires_grad for p in detector.alarm.parameters())
    assert len(losses) == 30
    assert losses[-1] < losses[0]


def test_both_kinds_weigh_the_same() -> None:
    # Without anything to tell them apart the best output is the log-odds of the two kinds' weights, which is 0.
    detector = DLADetector(network(), layers=[], widths=[4])
    same = data(1)
    detector.fit(same.expand(90, 2, 3), same.expand(10, 2, 3), epochs=300, batch_size=100, learning_rate=0.01)
    assert abs(detector.score(same).item()) < 0.05


def test_it_tells_adversarial_digits_apart() -> None:
    classifier = digits_network()

    def attacked(x: Tensor, labels: Tensor) -> Tensor:
        moved = x.clone()
        for _ in range(10):
            moved.requires_grad_()
            loss = nn.functional.cross_entropy(classifier(moved), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, moved)
            moved = moved.detach() + 0.04 * gradient.sign()
            moved = (x + (moved - x).clamp(-0.15, 0.15)).clamp(0, 1)
        return moved

    train, train_labels = load_dataset("digits", split="train").take(range(800))
    x, labels = load_dataset("digits").take(range(400))
    detector = DLADetector(classifier, layers=["6"])
    detector.fit(train, attacked(train, train_labels), epochs=40)
    found = detector.calibrate(x[:200], false_positive_rate=0.1)
    assert found.achieved == pytest.approx(0.1)
    assert float(detector.decide(x[200:]).float().mean()) < 0.2
    adversarial = attacked(x, labels)
    adversarial = adversarial[classifier(adversarial).argmax(1) != labels]
    assert len(adversarial) > 200
    with torch.no_grad():
        clean, bad = detector.score(x), detector.score(adversarial)
    assert roc_auc_score([0] * len(clean) + [1] * len(bad), torch.cat([clean, bad])) > 0.8


def test_saving_and_loading(tmp_path) -> None:
    classifier, x = network(), data(40)
    detector = fitted(classifier)
    detector.calibrate(x)
    detector.save(tmp_path / "dla.safetensors")
    again = DLADetector.load(tmp_path / "dla.safetensors", classifier)
    assert again.settings == {"layers": ["4"], "widths": [7, 3], "features": 7}
    assert torch.equal(again.score(x), detector.score(x))
    assert torch.equal(again.threshold, detector.threshold)


def test_what_cannot_be_fitted_is_said() -> None:
    detector = DLADetector(network(), layers=["4"])
    with pytest.raises(ModelError, match="is not fitted; call fit"):
        detector.score(data(2))
    with pytest.raises(InvalidArgumentError, match="clean: got 0 inputs, expected at least 1 clean inputs"):
        detector.fit(data(0), data(2))
    with pytest.raises(InvalidArgumentError, match="adversarial: got 0 inputs"):
        detector.fit(data(2), data(0))
    with pytest.raises(InvalidArgumentError, match="adversarial: got ndarray"):
        detector.fit(data(2), data(2).numpy())
    with pytest.raises(InvalidArgumentError, match="adversarial: got NaN"):
        detector.fit(data(2), data(2) / 0)
    for setting in ({"epochs": 0}, {"learning_rate": 0}, {"batch_size": 0}, {"seed": -1}):
        with pytest.raises(InvalidArgumentError, match=next(iter(setting))):
            detector.fit(data(2), data(2), **setting)
    broken = network()
    broken[3].weight.data.fill_(torch.inf)
    with pytest.raises(ModelError, match="activations of the training inputs are not finite"):
        DLADetector(broken, layers=["4"]).fit(data(2), data(2))
    with pytest.raises(InvalidArgumentError, match="layers: got nothing"):
        DLADetector(network(), layers=["nothing"]).fit(data(2), data(2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": "4"}, "layers: got 4, expected a list of names"),
        ({"layers": [4]}, "layers: got"),
        ({"widths": [0]}, "widths: got 0"),
        ({"features": 0}, "features: got 0"),
    ],
)
def test_settings_are_checked(given, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        DLADetector(network(), **{"layers": ["4"], **given})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_it_runs_where_the_classifier_is() -> None:
    detector = fitted(network().cuda())
    assert detector.score(data(3).cuda()).device.type == "cuda"
