"""Leave-one-out features against slow loops, the regression against scikit-learn, and what surrounds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegressionCV
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors._features.dispersion import MEASURES, interquartile_range, quantile, standard_deviation
from robust_ext.detectors.ml_loo import MLLOODetector
from robust_ext.models.defended import Defended

MEASURES_BY_HAND = {
    "iqr": lambda values: np.percentile(values, 75) - np.percentile(values, 25),
    "std": np.std,
    "mad": lambda values: np.median(np.abs(values - np.median(values))),
}


def network(channels: int = 2) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(
            nn.Conv2d(channels, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 3 * 2, 5), nn.Tanh(), nn.Linear(5, 4)
        ).eval()
    # So that inputs are of several predicted classes.
    with torch.no_grad():
        made[5].bias -= made(data(50, channels=channels)).mean(0)
    return made


def data(count: int, seed: int = 0, channels: int = 2) -> Tensor:
    return torch.rand(count, channels, 4, 3, generator=torch.Generator().manual_seed(seed))


def by_hand(
    classifier: nn.Sequential,
    x: Tensor,
    layers: list[int],
    *,
    dispersion: str = "iqr",
    output: str = "probability",
    fill: float = 0.0,
    patch: int = 1,
    stride: int = 1,
    pool: bool = True,
) -> np.ndarray:
    """One forward pass for each input and each blanked square."""

    def units(one: Tensor, label: int) -> tuple[list[np.ndarray], float]:
        values, found = one[None], []
        for position, part in enumerate(classifier):
            values = part(values)
            if position in layers:
                array = values[0].double().numpy()
                found.append(array.mean((1, 2)) if pool and array.ndim == 3 else array.reshape(-1))
        logits = values[0].double().numpy()
        odds = np.exp(logits - logits.max())
        return found, float((odds / odds.sum() if output == "probability" else logits)[label])

    rows = []
    with torch.no_grad():
        for one in x:
            label = int(classifier(one[None]).argmax())
            whole = np.concatenate([*units(one, label)[0], [units(one, label)[1]]])
            differences = []
            for channel in range(one.shape[0]):
                for row in range(0, one.shape[1], stride):
                    for column in range(0, one.shape[2], stride):
                        changed = one.clone()
                        changed[channel, row : row + patch, column : column + patch] = fill
                        found, last = units(changed, label)
                        differences.append(whole - np.concatenate([*found, [last]]))
            table = np.array(differences)
            rows.append([MEASURES_BY_HAND[dispersion](table[:, unit]) for unit in range(table.shape[1])])
    return np.array(rows)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["iqr", "std", "mad"]),
    st.sampled_from(["probability", "logit"]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([[0, 4], [1], [], [3, 0]]),
    st.sampled_from([1, 5, 64, 1024]),
)
def test_features_are_those_of_the_definition(
    dispersion: str, output: str, fill: float, patch: int, stride: int, pool: bool, layers: list[int], size: int
) -> None:
    classifier, x = network(), data(5)
    assert len(classifier(x).argmax(1).unique()) > 1
    given = {"dispersion": dispersion, "output": output, "fill": fill, "patch": patch, "stride": stride, "pool": pool}
    detector = MLLOODetector(classifier, layers=[str(name) for name in sorted(layers)], batch_size=size, **given)
    with torch.no_grad():
        found = detector.features(x)
    np.testing.assert_allclose(found.numpy(), by_hand(classifier, x, layers, **given), atol=2e-6)


def test_published_settings_blank_each_value_alone() -> None:
    classifier, x = network(), data(2)
    rows: list[Tensor] = []
    handle = classifier.register_forward_pre_hook(lambda _module, args: rows.append(args[0]))
    MLLOODetector(classifier, layers=["0"]).features(x)
    handle.remove()
    seen = torch.cat(rows)
    assert len(seen) == 2 + 2 * x[0].numel()
    for position, changed in enumerate(seen[2:]):
        original = x[position // x[0].numel()]
        different = (changed != original).flatten().nonzero().flatten().tolist()
        assert different == [position % x[0].numel()]
        assert changed.flatten()[different[0]] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.floats(0, 1), st.integers(0, 99), st.booleans())
def test_quantiles_and_measures_are_those_of_numpy(count: int, share: float, seed: int, ties: bool) -> None:
    values = torch.randn(2, 3, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = values.round() if ties else values
    np.testing.assert_allclose(quantile(values, share), np.quantile(values, share, axis=-1), atol=1e-12)
    for name, measure in MEASURES.items():
        expected = np.apply_along_axis(MEASURES_BY_HAND[name], -1, values.numpy())
        np.testing.assert_allclose(measure(values), expected, atol=1e-12)


def test_a_unit_that_is_always_off_has_a_gradient() -> None:
    values = torch.zeros(1, 4, requires_grad=True)
    for measure in MEASURES.values():
        (gradient,) = torch.autograd.grad(measure(values).sum(), values)
        assert bool(torch.isfinite(gradient).all())
    assert float(standard_deviation(torch.tensor([1.0, 3.0]))) == 1


def test_vectors_and_grey_planes_are_blanked_too() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        flat = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).eval()
    x = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    weight = flat[1].weight.detach()
    for shaped in (x, x.view(2, 2, 3), x.view(2, 1, 2, 3)):
        found = MLLOODetector(flat, layers=["1"]).features(shaped)[:, :3].detach()
        # For a linear unit the attribution of value i is w_i x_i.
        torch.testing.assert_close(found, interquartile_range(weight * x[:, None]))


def test_units_are_drawn_by_the_seed_and_kept(tmp_path) -> None:
    classifier, x = network(), data(4)
    whole = MLLOODetector(classifier, layers=["0", "4"], pool=False).features(x)
    detector = MLLOODetector(classifier, layers=["0", "4"], pool=False, units=4, seed=3)
    part = detector.features(x)
    assert part.shape == (4, 4 + 4 + 1)
    chosen = [*detector.chosen_0.tolist(), *(18 + detector.chosen_1).tolist(), 23]
    assert len(set(chosen)) == 9
    torch.testing.assert_close(part, whole[:, chosen])
    same = MLLOODetector(classifier, layers=["0", "4"], pool=False, units=4, seed=3)
    assert torch.equal(same.features(x), part)
    other = MLLOODetector(classifier, layers=["0", "4"], pool=False, units=4, seed=4)
    other.features(x)
    assert other.chosen_0.tolist() != detector.chosen_0.tolist()
    # A file's units count, not those that would be drawn.
    detector.chosen_0 = torch.tensor([0, 1, 2, 3])
    detector.fit(data(20), data(20, 1) ** 3)
    detector.save(tmp_path / "d.safetensors")
    again = MLLOODetector.load(tmp_path / "d.safetensors", classifier)
    assert again.chosen_0.tolist() == [0, 1, 2, 3]
    assert torch.equal(again.score(x), detector.score(x))


def test_layers_may_be_one_feature_each() -> None:
    classifier, x = network(), data(4)
    whole = MLLOODetector(classifier, layers=["0", "4"]).features(x)
    grouped = MLLOODetector(classifier, layers=["0", "4"], group=True).features(x)
    expected = torch.stack([whole[:, :3].mean(1), whole[:, 3:8].mean(1), whole[:, 8]], 1)
    torch.testing.assert_close(grouped, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("counts", [(60, 60), (60, 20)])
def test_the_score_is_the_regressions_decision(counts: tuple[int, int]) -> None:
    classifier = network()
    clean, adversarial, x = data(counts[0]), data(counts[1], 1) ** 1.2, data(9, 2)
    detector = MLLOODetector(classifier, layers=["0", "4"])
    detector.fit(clean, adversarial, folds=4)
    rows = np.concatenate([by_hand(classifier, part, [0, 4]) for part in (clean, adversarial)])
    center, scale = rows.mean(0), rows.std(0)
    targets = np.repeat([0, 1], counts)
    model = LogisticRegressionCV(cv=4, class_weight="balanced", scoring="accuracy", max_iter=5000)
    model.fit((rows - center) / scale, targets)
    expected = model.decision_function((by_hand(classifier, x, [0, 4]) - center) / scale)
    np.testing.assert_allclose(detector.score(x).detach(), expected, rtol=1e-2, atol=1e-2)
    chance = model.predict_proba((by_hand(classifier, x, [0, 4]) - center) / scale)[:, 1]
    np.testing.assert_allclose(detector.score(x).sigmoid().detach(), chance, atol=5e-3)


@pytest.mark.parametrize(("dispersion", "size"), [("iqr", 25), ("std", 50), ("mad", 5000)])
def test_gradients_are_those_of_finite_differences(dispersion: str, size: int) -> None:
    detector = MLLOODetector(network(), layers=["0", "4"], dispersion=dispersion, batch_size=size)
    detector.fit(data(12), data(12, 1) ** 3)
    detector.double()
    x = data(2, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(detector.features, x, eps=1e-7, atol=1e-4)
    assert torch.autograd.gradcheck(detector.score, x, eps=1e-7, atol=1e-3, rtol=1e-3)


def attacked(classifier: nn.Module, x: Tensor, y: Tensor, epsilon: float) -> Tensor:
    adversarial = x.clone()
    for _ in range(10):
        adversarial.requires_grad_(True)
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(classifier(adversarial), y), adversarial)
        moved = adversarial.detach() + epsilon / 4 * gradient.sign()
        adversarial = (x + (moved - x).clamp(-epsilon, epsilon)).clamp(0, 1)
    return adversarial


def test_adversarial_examples_of_digits_are_detected() -> None:
    classifier = digits_network()
    train, test = load_dataset("digits", split="train"), load_dataset("digits")
    fit_x, fit_y = train.take(range(150))
    held, _ = train.take(range(200, 400))
    x, y = test.take(range(100))
    detector = MLLOODetector(classifier, layers=["1", "3", "6"])
    detector.fit(fit_x, attacked(classifier, fit_x, fit_y, 0.2))
    detector.calibrate(held, false_positive_rate=0.05)
    adversarial = attacked(classifier, x, y, 0.2)
    adversarial = adversarial[classifier(adversarial).argmax(1) != y]
    scores = torch.cat([detector.score(x), detector.score(adversarial)]).detach()
    assert len(adversarial) > 50
    assert roc_auc_score([0] * len(x) + [1] * len(adversarial), scores) > 0.9
    assert float(detector.decide(x).float().mean()) <= 0.15
    # Labels that say nothing about the input cannot be told apart.
    detector.fit(fit_x[:75], fit_x[75:])
    blind = torch.cat([detector.score(x), detector.score(test.take(range(100, 200))[0])]).detach()
    assert 0.35 < roc_auc_score([0] * 100 + [1] * 100, blind) < 0.65


def test_batches_do_not_matter_and_none_is_fine() -> None:
    detector = MLLOODetector(network(), layers=["0"])
    detector.fit(data(12), data(12, 1) ** 3)
    x = data(7, 3)
    whole = detector.score(x)
    torch.testing.assert_close(torch.cat([detector.score(one) for one in x.split(1)]), whole)
    torch.testing.assert_close(torch.cat([detector.score(part) for part in x.split(3)]), whole)
    assert detector.score(x[:0]).shape == (0,)
    assert detector.features(x[:0]).shape == (0, 4)


def test_it_works_beside_the_classifier_as_one_module() -> None:
    classifier = network()
    detector = MLLOODetector(classifier, layers=["0", "4"], batch_size=7)
    detector.fit(data(12), data(12, 1) ** 3)
    detector.calibrate(data(40, 2), false_positive_rate=0.1)
    x = data(3, 5).requires_grad_()
    logits, excess = Defended(classifier, detector).both(x)
    torch.testing.assert_close(logits, classifier(x))
    torch.testing.assert_close(excess, detector.score_margin(x))
    (gradient,) = torch.autograd.grad(excess.sum(), x)
    assert float(gradient.abs().max()) > 0
    assert not any(part._forward_hooks for part in classifier.modules())


def test_files_hold_all_of_it(tmp_path) -> None:
    classifier, x = network(), data(5, 4)
    given = {
        "dispersion": "mad",
        "output": "logit",
        "fill": 0.25,
        "patch": 2,
        "stride": 1,
        "units": 2,
        "pool": False,
        "group": True,
        "seed": 5,
        "batch_size": 33,
    }
    detector = MLLOODetector(classifier, layers=["0", "4"], **given)
    detector.fit(data(12), data(12, 1) ** 3)
    detector.calibrate(data(40, 2), false_positive_rate=0.1)
    detector.save(tmp_path / "d.safetensors")
    again = MLLOODetector.load(tmp_path / "d.safetensors", classifier)
    assert again.settings == {"layers": ["0", "4"], **given}
    assert torch.equal(again.score(x), detector.score(x))
    assert torch.equal(again.decide(x), detector.decide(x))


def test_wrong_settings_and_inputs_are_named() -> None:
    classifier = network()
    for wrong, message in [
        ({"layers": "0"}, "layers: got 0, expected a list"),
        ({"dispersion": "var"}, "dispersion: got 'var', expected one of 'iqr'"),
        ({"output": "odds"}, "output: got 'odds'"),
        ({"fill": float("nan")}, "fill: got nan"),
        ({"patch": 0}, "patch: got 0"),
        ({"stride": 0}, "stride: got 0"),
        ({"units": 0}, "units: got 0"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"seed": -1}, "seed: got -1"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            MLLOODetector(classifier, **{"layers": ["0"], **wrong})
    detector = MLLOODetector(classifier, layers=["0"])
    with pytest.raises(ModelError, match=r"is not fitted; call fit\(clean_inputs, adversarial_inputs\) first"):
        detector.score(data(2))
    with pytest.raises(InvalidArgumentError, match="adversarial: got 3 inputs, expected at least folds = 5"):
        detector.fit(data(9), data(3))
    with pytest.raises(InvalidArgumentError, match="clean: got ndarray"):
        detector.fit(data(9).numpy(), data(9))
    with pytest.raises(InvalidArgumentError, match="layers: got nowhere, expected names of layers"):
        MLLOODetector(classifier, layers=["nowhere"]).features(data(2))
    detector.fit(data(9), data(9, 1))
    detector.layers = ()
    with pytest.raises(ModelError, match="was fitted to 4 features and meets 1"):
        detector.score(data(2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_scores_are_the_same_on_a_gpu() -> None:
    detector = MLLOODetector(network(), layers=["0", "4"], units=2)
    detector.fit(data(12), data(12, 1) ** 3)
    x = data(5, 4)
    expected = detector.score(x)
    torch.testing.assert_close(detector.cuda().score(x.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
    detector.fit(data(12).cuda(), data(12, 1).cuda() ** 3)
    torch.testing.assert_close(detector.score(x.cuda()).cpu(), expected, rtol=1e-2, atol=1e-2)
