"""Every published detector with settings, a fit and what it refuses; a small network and its inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from robust_ext import detectors
from robust_ext.core.random import seeded_globals
from tests.evaluations.steps import climb


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

    class Shifted(nn.Module):
        def forward(self, x):
            return (x - low) / width

    return weighted(
        lambda: nn.Sequential(
            Shifted(), nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(),
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


@dataclass(frozen=True)
class Case:
    """A detector, settings other than its defaults, how it is fitted, and settings that are refused.

    Those of ``refused`` are refused by an error that names the setting; for the others the message is given.
    """

    kind: type[detectors.Detector]
    settings: dict[str, Any] = field(default_factory=dict)
    fit: Callable[..., Any] = on_both
    seeded: bool = False
    refused: str = ""
    messages: tuple[tuple[str, Any, str], ...] = ()


NOISES = [["normal", 0.2], ["sign", 0.1], ["uniform", 0.3]]
CASES = {
    "nss": Case(
        detectors.NSSDetector,
        {"output": "probability", "penalty": 5, "gamma": 0.02},
        refused="output='logit' penalty=0 gamma=-1",
        messages=(("bounds", 1, "expected a pair"), ("bounds", (1, 0), "first number is below")),
    ),
    "kd-bu": Case(
        detectors.KDBUDetector,
        {"layer": "5", "bandwidth": 0.4, "passes": 7, "chunk": 11},
        with_references,
        seeded=True,
        refused="bandwidth=0 passes=1 layer=3 chunk=0",
    ),
    "lid": Case(
        detectors.LIDDetector,
        {"layers": ["2", "5"], "neighbours": 5, "size": 20},
        with_references,
        seeded=True,
        refused="layers='1' layers=[1] neighbours=1",
        messages=(("neighbours", 20, "size: got 20, expected an integer of at least 21"),),
    ),
    "fs": Case(
        detectors.FeatureSqueezingDetector,
        {
            "squeezers": [["bit_depth", {"bits": 3}], ["median", {"size": 3}], ["non_local_means", {"search": 3}]],
            "straight_through": False,
            "batch_size": 7,
        },
        lambda *_: None,
        refused="bounds=(1,1) batch_size=0 squeezers=[]",
        messages=(
            ("squeezers", "svhn", "squeezers: got 'svhn', expected one of 'mnist', 'cifar10'"),
            ("squeezers", [("blur", {})], "squeezers: got 'blur', expected one of 'bit_depth'"),
            ("squeezers", [("bit_depth", {"depth": 1})], "squeezers: got .* settings of bit_depth"),
            ("squeezers", [("bit_depth", {"bits": 0})], "bits: got 0"),
            ("squeezers", [("median", {"size": 1})], "size: got 1"),
            ("squeezers", [("non_local_means", {"search": 4})], "search: got 4, expected an odd integer"),
            ("squeezers", [("non_local_means", {"patch": 2})], "patch: got 2"),
            ("squeezers", [("opencv_non_local_means", {"strength": 0})], "strength: got 0"),
            ("squeezers", ["median"], "squeezers: got median, expected a pair"),
            ("squeezers", [detectors.Median], "squeezers: got .* expected a pair"),
        ),
    ),
    "magnet": Case(
        detectors.MagNetDetector,
        {"structures": [[3, "average", 2], [4]], "powers": [1, 2], "temperatures": [10, 2], "reformer": 1},
        lambda detector, clean, _, seed, **own: detector.fit(
            clean, **{"epochs": 2, "batch_size": 16, **own}, seed=seed
        ),
        seeded=True,
        refused="structures=[] structures=[[]] structures=[[3,'max'],[3]] structures=[[0],[3]] structures=[3,3] "
        "powers=[1] powers=[1,0] temperatures=[0] reformer=2 noise=-0.1 epochs=0 bounds=[1,0] channels=0",
    ),
    "odds": Case(
        detectors.OddsDetector,
        {"noises": NOISES, "draws": 5, "bounds": [-1.0, 2.0], "batch_size": 7},
        on_clean,
        seeded=True,
        refused="noises=[] noises=[('sign',0)] draws=0 batch_size=0 bounds=(1,0) bounds=1",
        messages=(
            ("noises", "normal", "got normal, expected pairs"),
            ("noises", [("normal", 0.1, 2)], "expected pairs"),
            ("noises", [("pink", 0.1)], "got 'pink', expected one of 'normal', 'sign', 'uniform'"),
        ),
    ),
    "dla": Case(
        detectors.DLADetector,
        {"layers": ["5"], "widths": [7, 3]},
        lambda detector, clean, bad, seed, **own: detector.fit(clean, bad, **{"epochs": 5, "seed": seed, **own}),
        seeded=True,
        refused="layers=[4] widths=[0] features=0",
        messages=(("layers", "4", "layers: got 4, expected a list of names"),),
    ),
    "ml-loo": Case(
        detectors.MLLOODetector,
        {
            **{"layers": ["2", "5"], "dispersion": "mad", "output": "logit", "fill": 0.25, "patch": 2, "stride": 1},
            **{"units": 5, "pool": False, "group": True, "seed": 5, "batch_size": 33},
        },
        refused="layers='0' dispersion='var' output='odds' fill=float('nan') patch=0 stride=0 units=0 batch_size=0 "
        "seed=-1 pool=3",
    ),
    "trapdoor": Case(
        detectors.TrapdoorDetector,
        {"layer": "2", "pool": True, "neurons": 0.5},
        with_triggers,
        seeded=True,
        refused="layer=4 neurons=0 neurons=1.5",
    ),
}
RANDOM = {"kd-bu", "odds", "trapdoor"}
NAMES = pytest.mark.parametrize("name", CASES)
REFUSED = [(name, *each) for name, case in CASES.items() for each in case.messages]
REFUSED += [
    (name, setting, eval(value), f"^{setting}: got ")  # noqa: S307
    for name, case in CASES.items()
    for setting, _, value in (text.partition("=") for text in case.refused.split())
]


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
