"""Every published detector with settings and a fit; a small network and its inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from robust_ext import detectors
from robust_ext.core.random import seeded_globals
from tests.attacks.problems import Lambda
from tests.evaluations.subjects import climb


def weighted(make, *, seed=0, among=None):
    """A network in eval mode with the weights of a seed, that predicts several classes among given inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make().eval()
    if among is not None:
        with torch.no_grad():
            made[-1].bias -= made(among).mean(0)
    return made


def network(classes=3, low=0.0, width=1.0):
    """A classifier of inputs in bounds, that predicts several classes."""

    return weighted(
        lambda: nn.Sequential(
            Lambda(lambda x: (x - low) / width), nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(),
            nn.Linear(60, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, classes),
        ),
        among=data(50) * width + low,
    )  # fmt: skip


def data(count, seed=0, shape=(1, 6, 5)):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


CLEAN, ADVERSARIAL = data(80), 1 - data(80) ** 3


def on_both(detector, clean, adversarial, seed):
    return detector.fit(clean, adversarial, **({"folds": 3} if isinstance(detector, detectors.MLLOODetector) else {}))


def with_references(detector, clean, adversarial, seed):
    return detector.fit(clean, adversarial, folds=3, seed=seed)


def on_clean(detector, clean, adversarial, seed):
    with seeded_globals(seed):
        return detector.fit(clean)


def with_triggers(detector, clean, adversarial, seed):
    triggers = detectors.make_triggers(3, (1, 6, 5), generator=torch.Generator().manual_seed(seed), clusters=2, size=2)
    return detector.fit(clean, triggers)


class Case(NamedTuple):
    """A detector, settings other than its defaults, how it is fitted, and whether the fit draws by a seed."""

    kind: type[detectors.Detector]
    settings: dict[str, Any]
    fit: Callable[..., Any] = on_both
    seeded: bool = False


NOISES = [["normal", 0.2], ["sign", 0.1], ["uniform", 0.3]]
SQUEEZERS = [["bit_depth", {"bits": 3}], ["median", {"size": 3}], ["non_local_means", {"search": 3}]]
ML_LOO = {"layers": ["2", "5"], "dispersion": "mad", "output": "logit", "fill": 0.25, "patch": 2, "stride": 1}
ML_LOO |= {"units": 5, "pool": False, "group": True, "seed": 5, "batch_size": 33}
MAGNET = {"structures": [[3, "average", 2], [4]], "powers": [1, 2], "temperatures": [10, 2], "reformer": 1}
CASES = {
    "nss": Case(detectors.NSSDetector, {"output": "probability", "penalty": 5, "gamma": 0.02}),
    "kd-bu": Case(
        detectors.KDBUDetector, {"layer": "5", "bandwidth": 0.4, "passes": 7, "chunk": 11}, with_references, True
    ),
    "lid": Case(detectors.LIDDetector, {"layers": ["2", "5"], "neighbours": 5, "size": 20}, with_references, True),
    "fs": Case(
        detectors.FeatureSqueezingDetector,
        {"squeezers": SQUEEZERS, "straight_through": False, "batch_size": 7},
        lambda *_: None,
    ),
    "magnet": Case(
        detectors.MagNetDetector,
        MAGNET,
        lambda one, clean, _, seed, **own: one.fit(clean, **{"epochs": 2, "batch_size": 16, **own}, seed=seed),
        True,
    ),
    "odds": Case(
        detectors.OddsDetector,
        {"noises": NOISES, "draws": 5, "bounds": [-1.0, 2.0], "batch_size": 7},
        on_clean,
        True,
    ),
    "dla": Case(
        detectors.DLADetector,
        {"layers": ["5"], "widths": [7, 3]},
        lambda one, clean, bad, seed, **own: one.fit(clean, bad, **{"epochs": 5, "seed": seed, **own}),
        True,
    ),
    "ml-loo": Case(detectors.MLLOODetector, ML_LOO),
    "trapdoor": Case(detectors.TrapdoorDetector, {"layer": "2", "pool": True, "neurons": 0.5}, with_triggers, True),
}
RANDOM = {"kd-bu", "odds", "trapdoor"}
NAMES = pytest.mark.parametrize("name", CASES)


def made(name, classifier, **changed):
    return CASES[name].kind(classifier, **{**CASES[name].settings, **changed})


def fitted(name, classifier, *, seed=0, **changed):
    detector = made(name, classifier, **changed)
    CASES[name].fit(detector, CLEAN, ADVERSARIAL, seed)
    return detector


def score(detector, x, seed=2):
    with seeded_globals(seed), torch.no_grad():
        return detector.score(x)


def state(detector):
    found = {key: value for key, value in detector.state_dict().items() if not key.startswith("classifier.")}
    del found["threshold"]
    return found


def flat(*, hidden=5, inputs=6, classes=3, among=None):
    """A classifier of vectors, or of what is flattened to them."""
    layers = (partial(nn.Linear, inputs, hidden), nn.Tanh, partial(nn.Linear, hidden, classes))
    return weighted(lambda: nn.Sequential(nn.Flatten(), *(make() for make in layers)), among=among)


def attacked(classifier, x, labels, epsilon):
    return climb(classifier, x, labels, epsilon=epsilon, steps=10, step=0.25)
