import pytest
import torch

from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import binarization_test


@pytest.fixture(scope="session")
def network():
    return digits_network()


@pytest.fixture(scope="session")
def digits():
    dataset = load_dataset("digits")
    inputs, _ = dataset.take(dataset.choose(64, seed=0))
    return inputs


@pytest.fixture
def linf():
    return ThreatModel(norm="linf", epsilon=0.1)


@pytest.fixture
def judged(network, linf):
    """The numbers of the one attack that is tested, on the digits network and in the infinity ball if not on others.

    The test alone, without deeper problems.
    """

    def run(attack, inputs, model=network, threat_model=linf, **settings):
        settings = {"depths": (1,), **settings}
        (found,) = binarization_test(model, attack, inputs, threat_model, **settings).content["attacks"]
        return found

    return run


def hand_made_pgd(steps=20, relative_step=0.125, predicted_labels=False):
    """Sign-gradient PGD from the clean input, written out."""

    def attack(model, x, y, threat_model):
        if predicted_labels:
            y = model(x).argmax(1)
        epsilon, adversarial = threat_model.epsilon, x.clone()
        for _ in range(steps):
            adversarial.requires_grad_(True)
            loss = torch.nn.functional.cross_entropy(model(adversarial), y, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, adversarial)
            moved = adversarial.detach() + relative_step * epsilon * gradient.sign()
            adversarial = torch.clamp(x + (moved - x).clamp(-epsilon, epsilon), *threat_model.bounds)
        return adversarial

    return attack


@pytest.fixture
def pgd():
    return hand_made_pgd
