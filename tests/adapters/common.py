"""What the tests of wrapped attacks share: small networks, images, runs, a recorder, and which libraries there are."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.target import Target
from robust_ext.registry.base import adapters

LIBRARIES = ("adv_lib", "art", "foolbox", "torchattacks")
UNIT = (0.0, 1.0)


def require(library):
    """The library, as the adapter imports it; the test or module that calls this is skipped where it is missing."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)
    return getattr(import_module(f"robust_ext.adapters.{library}.attack"), library)


def catalogue(library):
    """What the adapter knows of the library's attacks; the test that calls this is skipped where it is missing."""
    require(library)
    return import_module(f"robust_ext.adapters.{library}.attack").CATALOGUE


def usable(library):
    """The attacks of a library that can be used; none where it is not installed."""
    if find_spec(library) is None:
        return []
    return [listing for listing in adapters()[library].list_attacks() if not listing.reason]


def cases(listings, library):
    """Parameters of a test of every attack, skipped where its packages are missing or cannot be imported."""
    params = []
    for listing in listings:
        missing = [package for package in listing.traits.packages if not _imports(package)]
        marks = [pytest.mark.skip(reason=f"{listing.name} needs {' and '.join(missing)}")] if missing else []
        params.append(pytest.param(library, listing, id=f"{library}:{listing.name}", marks=marks))
    return params


def _imports(package):
    """Whether a package is there, and torchvision, where torch is built for the CPU, is so too."""
    if find_spec(package) is None:
        return False
    return package != "torchvision" or not torch.__version__.endswith("+cpu") or version(package).endswith("+cpu")


def conv_network(shape, classes=5, filters=4):
    """A small convolutional network, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values = filters * (shape[1] - 2) * (shape[2] - 2)
        layers = nn.Conv2d(shape[0], filters, 3), nn.ReLU(), nn.Flatten(), nn.Linear(values, classes)
        return nn.Sequential(*layers).eval()


def network_in(bounds, shape, classes=5, filters=4):
    """The same network for images in other bounds."""
    width, network = bounds[1] - bounds[0], conv_network(shape, classes, filters)
    return network if bounds == UNIT else Stretched(network, (-bounds[0] / width, (1 - bounds[0]) / width))


def art_classifier(module, shape, classes=5, **settings):
    """An ART classifier of a network, on the CPU, of inputs in [0, 1] unless ``clip_values`` states otherwise."""
    fixed = {"loss": nn.CrossEntropyLoss(), "input_shape": shape, "nb_classes": classes, "device_type": "cpu"}
    make = import_module("art.estimators.classification").PyTorchClassifier
    return make(module, **{"clip_values": UNIT, **fixed, **settings})


def uniform(count, shape, bounds=UNIT):
    """Inputs drawn from all of the bounds."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1)) * (bounds[1] - bounds[0]) + bounds[0]


def predicted(module, x):
    with torch.no_grad():
        return module(x).argmax(1)


def drawn_seed(seed=3):
    """The seed that an attack of global randomness draws first."""
    return draw_seed(torch.Generator().manual_seed(seed))


def target_of(module, shape, *, bounds=UNIT, classes=5):
    return Target(module=module, bounds=bounds, classes=classes, input_shape=shape, device=torch.device("cpu"))


def run(attack, module, x, y, threat_model, *, classes=5, seed=3, direct=True):
    """Candidates of an attack, by its ``search`` or by :func:`run_attack`."""
    target = target_of(module, tuple(x.shape[1:]), bounds=threat_model.bounds, classes=classes)
    generator = torch.Generator().manual_seed(seed)
    if direct:
        return attack.search(target, x, y, threat_model=threat_model, generator=generator)
    return run_attack(attack, target, x, y, threat_model=threat_model, generator=generator)


class Recorder(nn.Module):
    """A module that records its queries."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.queries = []
        self.training = module.training

    @property
    def sizes(self):
        return [len(x) for x in self.queries]

    def forward(self, x):
        self.queries.append(x.detach().clone())
        return self.module(x)


class Stretched(nn.Module):
    """A network of inputs in other bounds, as one of inputs in [0, 1]."""

    def __init__(self, module, bounds):
        super().__init__()
        self.module, self.low, self.width = module, bounds[0], bounds[1] - bounds[0]
        self.eval()

    def forward(self, x):
        return self.module(x.float() * self.width + self.low)


class Brightness(nn.Module):
    """Class 0 where the mean, in units of the bounds, is below a threshold of the row's own."""

    def __init__(self, thresholds, bounds=UNIT, slope=10.0):
        super().__init__()
        self.thresholds, self.bounds, self.slope = torch.as_tensor(thresholds), bounds, slope
        self.eval()

    def forward(self, x):
        mean = (x.flatten(1).mean(1) - self.bounds[0]) / (self.bounds[1] - self.bounds[0])
        along = self.slope * (mean - self.thresholds)
        return torch.stack([-along, along], 1)
