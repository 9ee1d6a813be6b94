import pytest
import torch

from robust_ext import ThreatModel
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.target import Target
from robust_ext.datasets import load_dataset
from robust_ext.defenses import IMF, AIDPurifier, DiscriminatorTraining
from robust_ext.demo.network import digits_network

LAYERS = ("1", "3", "6")


@pytest.fixture(scope="module")
def net():
    return digits_network()


@pytest.fixture(scope="module")
def training():
    return load_dataset("digits", split="train").take(range(300))


@pytest.fixture(scope="module")
def attacked(net):
    x, labels = load_dataset("digits").take(range(60))
    target = Target(module=net, bounds=(0.0, 1.0), classes=10, input_shape=(1, 8, 8), device=torch.device("cpu"))
    points = run_attack(
        ObjectivePGD(objective="ace", steps=10, step_size=0.03),
        target,
        x,
        labels,
        threat_model=ThreatModel(norm="linf", epsilon=0.1),
        generator=torch.Generator().manual_seed(5),
    )
    return x, labels, points


def fit(net, training, layers):
    small = {"epochs": 12, "batch_size": 30, "learning_rate": 0.02}
    small |= {"width": 32, "before": 0, "after": 1}
    settings = DiscriminatorTraining(layers=layers, epsilon=0.1, attack_step_size=0.04, attack_steps=5, **small)
    return settings.fit(net, *training)


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_it_finds_adversarial_inputs_and_the_defense_keeps_clean_ones(net, training, attacked, layers):
    metrics = pytest.importorskip("sklearn.metrics")
    judge = fit(net, training, layers)
    x, labels, points = attacked
    defense = AIDPurifier(net, judge) if layers else IMF(net, judge, radius=8 / 255)

    def cleanness(x):
        return defense.loss(x) if isinstance(defense, AIDPurifier) else judge(net(x))

    with torch.no_grad():
        truth = torch.cat([torch.ones(len(x)), torch.zeros(len(x))])
        assert metrics.roc_auc_score(truth, torch.cat([cleanness(x), cleanness(points)])) > 0.7
        static = (net(x).argmax(1) == labels).double().mean()
        assert (defense(x).argmax(1) == labels).double().mean() >= static - 0.05
        moved = defense.trace(points).final
        assert cleanness(moved).mean() > cleanness(points).mean()
