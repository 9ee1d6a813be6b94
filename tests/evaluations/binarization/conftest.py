import pytest

from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import binarization_test
from tests.evaluations.subjects import climb


@pytest.fixture(scope="session")
def network():
    return digits_network()


@pytest.fixture(scope="session")
def digits():
    dataset = load_dataset("digits")
    return dataset.take(dataset.choose(64, seed=0))[0]


@pytest.fixture
def linf():
    return ThreatModel(norm="linf", epsilon=0.1)


@pytest.fixture
def judged(network, linf):
    """The numbers of one attack in the test alone, on the digits network and in the linf ball if not on others."""

    def run(attack, inputs, model=network, threat_model=linf, **settings):
        settings = {"depths": (1,), **settings}
        (found,) = binarization_test(model, attack, inputs, threat_model, **settings).content["attacks"]
        return found

    return run


@pytest.fixture
def pgd():
    """Sign-gradient PGD from the clean input, on the given labels or on predicted ones."""

    def make(steps=20, relative_step=0.125, predicted_labels=False):
        def attack(model, x, y, threat_model):
            y = model(x).argmax(1) if predicted_labels else y
            return climb(model, x, y, epsilon=threat_model.epsilon, steps=steps, step=relative_step)

        return attack

    return make
