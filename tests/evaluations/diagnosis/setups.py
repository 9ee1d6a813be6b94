"""Setups to diagnose: sound ones, and ones with a mistake in model, labels, scale, outputs or threat model.

Classifiers of digits are fitted in closed form: a ridge regression on what a random body returns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.models import Normalized
from tests.evaluations.diagnosis.models import Apply as Apply

ATTACK = "robust_ext:APGD(steps=20)"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What :func:`robust_ext.diagnose` is given, and what it has to name first.

    ``named`` is the code of a finding, or what the text of a refusal holds; None where the setup is sound.
    """

    model: Any
    inputs: torch.Tensor
    labels: torch.Tensor
    threat_model: ThreatModel
    named: str | None = None
    attack: Any = ATTACK


def linf(epsilon=0.1, bounds=(0.0, 1.0)):
    """The threat model of most setups."""
    return ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds)


@lru_cache
def digits(split="test"):
    """All digits of a split, mixed."""
    x, y = load_dataset("digits", split=split).take(range(360))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return x[order], y[order]


def samples(count=32, of=None):
    """Some digits of the test split, of some classes."""
    x, y = digits()
    kept = torch.isin(y, torch.tensor(of if of is not None else range(10)))
    return x[kept][:count].clone(), y[kept][:count].clone()


def setup(model=None, threat_model=None, x=None, y=None, **more):
    """A setup on digits; the demo's network and 32 samples where nothing else is given."""
    some, labels = samples()
    return Setup(
        model=digits_network() if model is None else model,
        inputs=some if x is None else x,
        labels=labels if y is None else y,
        threat_model=threat_model or linf(),
        **more,
    )


def fitted(body, x=None, y=None, classes=10, ridge=1e-2):
    """A body and the linear readout that fits training digits best, as logits of some size."""
    more, labels = digits("train")
    x, y = (more, labels) if x is None else (x, y)
    body.eval()
    with torch.no_grad():
        features = body(x).flatten(1).double()
        features = torch.cat([features, torch.ones(len(features), 1)], 1)
        target = nn.functional.one_hot(y, classes).double()
        gram = features.T @ features + ridge * len(x) * torch.eye(features.shape[1])
        weights = torch.linalg.solve(gram, features.T @ target)
        head = nn.Linear(features.shape[1] - 1, classes)
        head.weight.copy_(10 * weights[:-1].T)
        head.bias.copy_(10 * weights[-1])
    return nn.Sequential(body, nn.Flatten(), head).eval()


def seeded(make):
    """What a function makes with random numbers of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def mlp(values=64):
    """A hidden layer of random weights."""
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(values, 300), nn.ReLU()))


def convolutions():
    """Two convolutions of random weights."""
    layers = (nn.Conv2d(1, 40, 3, padding=1), nn.ReLU(), nn.Conv2d(40, 40, 3, stride=2, padding=1), nn.ReLU())
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """Rows as tokens, with places, through one layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.places = nn.Parameter(torch.randn(8, 64))
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.embed(x.flatten(1).view(-1, 8, 8)) + self.places)


class Recurrent(nn.Module):
    """Rows as a sequence."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 128, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


def standard(body, mean=0.3, std=0.38):
    """A network of standardised digits."""
    x, y = digits("train")
    return fitted(body, (x - mean) / std, y)


def scaled(slope, shift=0.0, model=None):
    """The demo's network, or another, behind a change of scale."""
    return nn.Sequential(Apply(lambda x: slope * x + shift), model or digits_network()).eval()


def binary(*after, labels=8):
    """3 against 8, and what comes after the two logits."""
    x, y = digits("train")
    kept = (y == 3) | (y == 8)
    two = fitted(mlp(), x[kept], (y[kept] == 8).long(), classes=2)
    some, found = samples(of=(3, 8))
    return setup(nn.Sequential(two, *after).eval(), x=some, y=(found == labels).long())


def common(count, model=None):
    """Zeros, and few ones."""
    zeros, ones = samples(count, of=[0])[0], samples(4, of=[1])[0]
    return setup(model, x=torch.cat([zeros, ones]), y=torch.tensor([0] * len(zeros) + [1] * len(ones)))


def one_sided():
    """A model that says the common class."""
    x, y = digits("train")
    rows = torch.cat([(y == 0).nonzero()[:100, 0], (y == 1).nonzero()[:3, 0]])
    return fitted(mlp(), x[rows], y[rows], classes=2, ridge=1.0)


def rows_as_sequence():
    x, y = digits("train")
    some, labels = samples()
    return setup(fitted(seeded(Recurrent), x[:, 0], y), linf(0.05), x=some[:, 0], y=labels)


def moons():
    from sklearn.datasets import make_moons

    x, y = (torch.tensor(one) for one in make_moons(600, noise=0.1, random_state=0))
    x = x.float()
    model = fitted(mlp(2), x[:500], y[:500], classes=2, ridge=1e-4)
    return setup(model, ThreatModel(norm="l2", epsilon=0.2, bounds=(-3, 3)), x=x[500:532], y=y[500:532])


def misclassified():
    x, y = digits()
    wrong = digits_network()(x).argmax(1) != y
    return setup(x=x[wrong][:4], y=y[wrong][:4])


def weak():
    x, y = digits("train")

    def hard(x):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)))
        return (x + 0.55 * noise).clamp(0, 1)

    return setup(fitted(mlp(), hard(x), y), x=hard(samples(64)[0]), y=samples(64)[1])


def corrupted(change, model=None):
    """A network of clean digits, given 64 changed ones that it gets right more often with more contrast."""
    x, y = samples(64)
    return setup(fitted(mlp()) if model is None else model, linf(0.05), change(x).clamp(0, 1), y)


def haze(x, strength):
    """Images behind haze that is thicker in some places than in others."""
    coarse = torch.rand(len(x), 1, 2, 2, generator=torch.Generator().manual_seed(0))
    smooth = nn.functional.interpolate(coarse, size=x.shape[2:], mode="bilinear", align_corners=True)
    return (x + strength * smooth) / (1 + strength)


def noise(x, strength):
    """Uniform numbers up to a strength above and below 0."""
    return strength * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1)


def foolbox_model():
    import foolbox

    return foolbox.PyTorchModel(standard(mlp()), bounds=(0, 1), preprocessing={"mean": 0.3, "std": 0.38}, device="cpu")


def art_classifier():
    from art.estimators.classification import PyTorchClassifier

    shape = {"input_shape": (1, 8, 8), "nb_classes": 10, "clip_values": (0.0, 1.0), "device_type": "cpu"}
    return PyTorchClassifier(standard(mlp()), loss=nn.CrossEntropyLoss(), preprocessing=(0.3, 0.38), **shape)


def with_features():
    network = digits_network()
    return Apply(lambda x: (network[:7](x), network(x))).eval()


SOUND: dict[str, Callable[[], Setup]] = {
    "CNN, linf .1 in [0, 1]": setup,
    "normalisation inside the model": lambda: setup(Normalized(standard(mlp()), mean=0.3, std=0.38)),
    "inputs in [0, 255], divided inside the model": lambda: setup(
        scaled(1 / 255), linf(25.5, (0, 255)), x=255 * samples()[0]
    ),
    "inputs in [-1, 1], epsilon twice as large": lambda: setup(
        scaled(0.5, 0.5), linf(16 / 255, (-1, 1)), x=2 * samples()[0] - 1
    ),
    "standardised inputs, epsilon in their units": lambda: setup(
        standard(mlp()), linf(0.1 / 0.38, (-0.3 / 0.38, 0.7 / 0.38)), x=(samples()[0] - 0.3) / 0.38
    ),
    "MLP, l2 .5": lambda: setup(fitted(mlp()), ThreatModel(norm="l2", epsilon=0.5)),
    "transformer, linf .05": lambda: setup(fitted(seeded(Attention)), linf(0.05)),
    "RNN over rows (N, 8, 8)": rows_as_sequence,
    "one-dimensional data (N, 64)": lambda: setup(
        fitted(mlp(), digits("train")[0].flatten(1), digits("train")[1]), x=samples()[0].flatten(1)
    ),
    "two features in two moons, l2 .2": moons,
    "binary problem, 3 against 8": binary,
    "imbalanced classes, 28 of 32 of one class": lambda: common(28),
    "imbalanced binary problem, a model that says the common class": lambda: common(28, one_sided()),
    "one sample": lambda: setup(None, None, *samples(1)),
    "one class only": lambda: setup(None, None, *samples(24, of=[7])),
    "four misclassified samples": misclassified,
    "weak and honest: 40% on hard data": weak,
    "a network of clean digits on noise": lambda: corrupted(
        lambda x: x + noise(x, 0.5), fitted(seeded(convolutions), ridge=1e-3)
    ),
    "a network of clean digits on glare": lambda: corrupted(lambda x: x + noise(x[:, :1, :1, :1], 0.1) + 0.4),
    "a network of clean digits on haze": lambda: corrupted(lambda x: haze(x, 1.0)),
    "a network of clean digits on little contrast": lambda: corrupted(
        lambda x: 0.2 * x + 0.8 * x.mean((1, 2, 3), keepdim=True)
    ),
    "a network of clean digits on dark images": lambda: corrupted(
        lambda x: x - noise(x[:, :1, :1, :1], 0.1) - 0.4, digits_network()
    ),
    "robust to all that is tried: linf .01": lambda: setup(fitted(nn.Flatten()), linf(0.01)),
    "tiny epsilon, .5/255": lambda: setup(threat_model=linf(0.5 / 255)),
    "large epsilon, linf .3": lambda: setup(threat_model=linf(0.3)),
    "float64 model": lambda: setup(digits_network().double()),
    "bfloat16 model": lambda: setup(digits_network().bfloat16()),
    "Foolbox model with preprocessing": lambda: setup(foolbox_model()),
    "ART classifier with preprocessing": lambda: setup(art_classifier()),
    "one output, the logit of the second of two classes": lambda: binary(Apply(lambda z: z[:, 1:] - z[:, :1])),
    "one output, a sigmoid": lambda: binary(Apply(lambda z: z[:, 1:] - z[:, :1]), nn.Sigmoid()),
    "a tuple of features and logits": lambda: setup(with_features()),
}


def background():
    x, y = digits("train")
    return setup(fitted(mlp(), x, y + 1, classes=11))


def shuffled():
    y = samples()[1]
    return setup(y=y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))])


def alphabetical():
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    place = torch.tensor([sorted(names).index(name) for name in names])
    x, y = samples(64)
    return setup(x=x, y=place[y])


def normalised_twice():
    inside = Normalized(standard(seeded(Attention), 0.45, 0.225), mean=0.45, std=0.225)
    some, labels = samples(64)
    return setup(inside, linf(0.13, (-2.0, 2.5)), x=(some - 0.45) / 0.225, y=labels)


def always_three():
    model = digits_network()
    with torch.no_grad():
        model[-1].bias[3] += 1000
    return setup(model)


def distances():
    x, y = digits("train")
    centres = torch.stack([x[y == one].flatten(1).mean(0) for one in range(10)])
    return setup(Apply(lambda x: torch.cdist(x.flatten(1), centres)).eval())


def without_statistics():
    x, _ = digits("train")
    body = nn.Sequential(mlp(), nn.BatchNorm1d(300), nn.Tanh(), Apply(lambda z: z * z))
    with torch.no_grad():
        hidden = body[0](x)
        body[1].running_mean.copy_(hidden.mean(0))
        body[1].running_var.copy_(hidden.var(0))
    model = fitted(body)
    model[0][1].reset_running_stats()
    return setup(model)


def token_ids():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Flatten(), nn.Linear(160, 10)).eval()
    return setup(model, x=torch.arange(640).remainder(100).view(32, 20))


def several_labels():
    y = samples()[1]
    return setup(y=nn.functional.one_hot(y, 10) + nn.functional.one_hot((y + 1) % 10, 10))


def after(function):
    """The demo's network, and what is made of its logits."""
    module = function if isinstance(function, nn.Module) else Apply(function)
    return setup(nn.Sequential(digits_network(), module).eval())


def standard_bounds():
    some = ((samples()[0] - 0.485) / 0.225).clamp(-2.118, 2.2)
    return setup(standard(mlp(), 0.485, 0.225), linf(8 / 255, (-2.118, 2.64)), x=some)


# What makes each, and the code that names it, or a part of the error that refuses it.
_MISTAKES: dict[str, tuple[str, Callable[[], Setup]]] = {
    # Labels
    "labels counted from 1": (
        "label_offset", lambda: setup(x=samples(of=range(9))[0], y=samples(of=range(9))[1] + 1)
    ),
    "labels 1 to 10 of ten classes": ("labels - 1", lambda: setup(y=samples()[1] + 1)),
    "a model with a background class before the others": ("label_offset", background),
    "shuffled labels": ("chance_accuracy", shuffled),
    "classes in alphabetical order": ("label_order", alphabetical),
    "labels of the next sample": ("label_order", lambda: setup(x=samples(33)[0][:-1], y=samples(33)[1][1:])),
    "the two classes swapped": ("label_offset", lambda: binary(labels=3)),
    # Inputs
    "inputs divided by 255 twice": ("input_scale", lambda: setup(x=samples()[0] / 255)),
    "inputs in [0, 255] for a model of [0, 1]": (
        "input_scale", lambda: setup(fitted(seeded(Attention)), linf(8, (0, 255)), x=255 * samples()[0])
    ),
    "inputs in [0, 1] for a model of [0, 255]": ("input_scale", lambda: setup(scaled(1 / 255))),
    "inputs in [0, 1] for a model of [-1, 1]": (
        "input_scale", lambda: setup(standard(seeded(Attention), 0.5, 0.5))
    ),
    "normalisation missing": (
        "input_scale", lambda: setup(standard(seeded(Attention)), linf(0.05), *samples(64))
    ),
    "normalisation missing before a network to which scale hardly matters": (
        "input_scale",
        lambda: setup(scaled(0.3081, 0.1307, fitted(seeded(convolutions))), linf(0.05), *samples(64)),
    ),
    "normalisation applied twice": ("input_scale", normalised_twice),
    "images turned by their diagonal": ("input_layout", lambda: setup(x=samples()[0].mT)),
    "channels last": ("input_layout", lambda: setup(x=samples()[0].permute(0, 2, 3, 1))),
    "dark on light where the model knows light on dark": ("input_layout", lambda: setup(x=1 - samples()[0])),
    # Model
    "always class 3": ("constant_output", always_three),
    "outputs that ignore the input": ("constant_output", lambda: after(lambda z: 0 * z + torch.arange(10.0))),
    "an untrained model": ("chance_accuracy", lambda: setup(seeded(lambda: digits_network(trained=False)))),
    "distances to class centres as logits": ("reversed_logits", distances),
    "BatchNorm without its running statistics": ("batch_statistics", without_statistics),
    "train mode": (
        "train_mode",
        lambda: setup(nn.Sequential(*digits_network()[:-1], nn.Dropout(0.5), digits_network()[-1]).train()),
    ),
    # Outputs
    "probabilities": ("probabilities", lambda: after(nn.Softmax(1))),
    "a regression of the digit": (
        "Regression is not supported",
        lambda: after(lambda z: (z.softmax(1) * torch.arange(10.0)).sum(1, keepdim=True)),
    ),
    "scores of each pixel": (
        "Segmentation is not supported", lambda: setup(nn.Conv2d(1, 10, 3, padding=1).eval())
    ),
    "several labels a sample": ("multi-label targets", several_labels),
    "token ids": ("token ids", token_ids),
    "predicted classes": ("predicted classes have no gradients", lambda: after(lambda z: z.argmax(1))),
    # Threat model
    "epsilon 8 in [0, 1]": ("threat_scale", lambda: setup(threat_model=linf(8))),
    "epsilon 8/255 in [0, 255]": (
        "threat_scale", lambda: setup(scaled(1 / 255), linf(8 / 255, (0, 255)), x=255 * samples()[0])
    ),
    "standardised inputs, epsilon 8/255": ("threat_scale", standard_bounds),
    "l2 as large as linf would be in [0, 255]": (
        "threat_scale", lambda: setup(threat_model=ThreatModel(norm="l2", epsilon=8))
    ),
    "epsilon divided by 255 twice": ("threat_scale", lambda: setup(threat_model=linf(8 / 255 / 255))),
    "inputs in [0, 1], bounds of [0, 255]": ("wrong_bounds", lambda: setup(threat_model=linf(8, (0, 255)))),
    "inputs in [0, 1], bounds of [-1, 1]": ("wrong_bounds", lambda: setup(threat_model=linf(16 / 255, (-1, 1)))),
}  # fmt: skip
MISTAKES = {words: partial(lambda named, make: replace(make(), named=named), *one) for words, one in _MISTAKES.items()}


def diagnosed(one, **settings):
    """The diagnosis of a setup, or the error that refused it."""
    try:
        return robust_ext.diagnose(one.model, one.attack, one.inputs, one.labels, one.threat_model, **settings)
    except robust_ext.RobustExtError as error:
        return error


def first(result):
    """What is named first: a code, the text of an error, or None."""
    if isinstance(result, Exception):
        return str(result)
    return None if result.likely is None else result.likely.code
