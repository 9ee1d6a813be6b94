"""Setups to diagnose: sound ones, and ones with a mistake in model, labels, scale, outputs or threat model.

Classifiers of digits are fitted in closed form: a ridge regression on what a random body returns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.models import Normalized

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


SOUND: dict[str, Callable[[], Setup]] = {}
MISTAKES: dict[str, Callable[[], Setup]] = {}


def sound(words):
    """Add a setup without a mistake."""
    return lambda make: SOUND.setdefault(words, make)


def mistake(words, named):
    """Add a setup with a mistake: the code that names it, or a part of the error that refuses it."""

    def add(make):
        MISTAKES[words] = lambda: Setup(**{**vars(make()), "named": named})
        return make

    return add


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


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


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


# Sound ones


@sound("CNN, linf .1 in [0, 1]")
def _():
    return setup()


@sound("normalisation inside the model")
def _():
    x, _ = digits("train")
    inside = fitted(mlp(), (x - 0.3) / 0.38, digits("train")[1])
    return setup(Normalized(inside, mean=0.3, std=0.38))


@sound("inputs in [0, 255], divided inside the model")
def _():
    model = nn.Sequential(Apply(lambda x: x / 255), digits_network()).eval()
    return setup(model, linf(25.5, (0, 255)), x=255 * samples()[0])


@sound("inputs in [-1, 1], epsilon twice as large")
def _():
    model = nn.Sequential(Apply(lambda x: (x + 1) / 2), digits_network()).eval()
    return setup(model, linf(16 / 255, (-1, 1)), x=2 * samples()[0] - 1)


@sound("standardised inputs, epsilon in their units")
def _():
    x, y = digits("train")
    model = fitted(mlp(), (x - 0.3) / 0.38, y)
    some = (samples()[0] - 0.3) / 0.38
    return setup(model, linf(0.1 / 0.38, (-0.3 / 0.38, 0.7 / 0.38)), x=some)


@sound("MLP, l2 .5")
def _():
    return setup(fitted(mlp()), ThreatModel(norm="l2", epsilon=0.5))


@sound("transformer, linf .05")
def _():
    return setup(fitted(seeded(Attention)), linf(0.05))


@sound("RNN over rows (N, 8, 8)")
def _():
    x, y = digits("train")
    some, labels = samples()
    return setup(fitted(seeded(Recurrent), x[:, 0], y), linf(0.05), x=some[:, 0], y=labels)


@sound("one-dimensional data (N, 64)")
def _():
    x, y = digits("train")
    return setup(fitted(mlp(), x.flatten(1), y), x=samples()[0].flatten(1))


@sound("two features in two moons, l2 .2")
def _():
    from sklearn.datasets import make_moons

    x, y = (torch.tensor(one) for one in make_moons(600, noise=0.1, random_state=0))
    x = x.float()
    model = fitted(mlp(2), x[:500], y[:500], classes=2, ridge=1e-4)
    return setup(model, ThreatModel(norm="l2", epsilon=0.2, bounds=(-3, 3)), x=x[500:532], y=y[500:532])


@sound("binary problem, 3 against 8")
def _():
    x, y = digits("train")
    kept = (y == 3) | (y == 8)
    model = fitted(mlp(), x[kept], (y[kept] == 8).long(), classes=2)
    some, labels = samples(of=(3, 8))
    return setup(model, x=some, y=(labels == 8).long())


@sound("imbalanced classes, 28 of 32 of one class")
def _():
    zeros, ones = samples(28, of=[0])[0], samples(4, of=[1])[0]
    x = torch.cat([zeros, ones])
    return setup(x=x, y=torch.tensor([0] * len(zeros) + [1] * len(ones)))


@sound("imbalanced binary problem, a model that says the common class")
def _():
    x, y = digits("train")
    rows = torch.cat([(y == 0).nonzero()[:100, 0], (y == 1).nonzero()[:3, 0]])
    model = fitted(mlp(), x[rows], y[rows], classes=2, ridge=1.0)
    zeros, ones = samples(28, of=[0])[0], samples(4, of=[1])[0]
    return setup(model, x=torch.cat([zeros, ones]), y=torch.tensor([0] * 28 + [1] * 4))


@sound("one sample")
def _():
    x, y = samples(1)
    return setup(x=x, y=y)


@sound("one class only")
def _():
    x, y = samples(24, of=[7])
    return setup(x=x, y=y)


@sound("four misclassified samples")
def _():
    x, y = digits()
    wrong = digits_network()(x).argmax(1) != y
    return setup(x=x[wrong][:4], y=y[wrong][:4])


@sound("weak and honest: 40% on hard data")
def _():
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


@sound("a network of clean digits on noise")
def _():
    return corrupted(lambda x: x + noise(x, 0.5), fitted(seeded(convolutions), ridge=1e-3))


@sound("a network of clean digits on glare")
def _():
    return corrupted(lambda x: x + noise(x[:, :1, :1, :1], 0.1) + 0.4)


@sound("a network of clean digits on haze")
def _():
    return corrupted(lambda x: haze(x, 1.0))


@sound("a network of clean digits on little contrast")
def _():
    return corrupted(lambda x: 0.2 * x + 0.8 * x.mean((1, 2, 3), keepdim=True))


@sound("a network of clean digits on dark images")
def _():
    return corrupted(lambda x: x - noise(x[:, :1, :1, :1], 0.1) - 0.4, digits_network())


@sound("robust to all that is tried: linf .01")
def _():
    return setup(fitted(nn.Flatten()), linf(0.01))


@sound("tiny epsilon, .5/255")
def _():
    return setup(threat_model=linf(0.5 / 255))


@sound("large epsilon, linf .3")
def _():
    return setup(threat_model=linf(0.3))


@sound("float64 model")
def _():
    return setup(digits_network().double())


@sound("bfloat16 model")
def _():
    return setup(digits_network().bfloat16())


@sound("Foolbox model with preprocessing")
def _():
    import foolbox

    x, y = digits("train")
    network = fitted(mlp(), (x - 0.3) / 0.38, y)
    return setup(foolbox.PyTorchModel(network, bounds=(0, 1), preprocessing={"mean": 0.3, "std": 0.38}, device="cpu"))


@sound("ART classifier with preprocessing")
def _():
    from art.estimators.classification import PyTorchClassifier

    x, y = digits("train")
    network = fitted(mlp(), (x - 0.3) / 0.38, y)
    return setup(
        PyTorchClassifier(
            network,
            loss=nn.CrossEntropyLoss(),
            input_shape=(1, 8, 8),
            nb_classes=10,
            clip_values=(0.0, 1.0),
            preprocessing=(0.3, 0.38),
            device_type="cpu",
        )
    )


@sound("one output, the logit of the second of two classes")
def _():
    return _one_output()


@sound("one output, a sigmoid")
def _():
    return _one_output(nn.Sigmoid())


@sound("a tuple of features and logits")
def _():
    network = digits_network()
    return setup(Apply(lambda x: (network[:7](x), network(x))).eval())


def _one_output(*after):
    """3 against 8 by the difference of two logits."""
    x, y = digits("train")
    kept = (y == 3) | (y == 8)
    two = fitted(mlp(), x[kept], (y[kept] == 8).long(), classes=2)
    some, labels = samples(of=(3, 8))
    model = nn.Sequential(two, Apply(lambda z: z[:, 1:] - z[:, :1]), *after).eval()
    return setup(model, x=some, y=(labels == 8).long())


# Labels


@mistake("labels counted from 1", "label_offset")
def _():
    x, y = samples(of=range(9))
    return setup(x=x, y=y + 1)


@mistake("labels 1 to 10 of ten classes", "labels - 1")
def _():
    return setup(y=samples()[1] + 1)


@mistake("a model with a background class before the others", "label_offset")
def _():
    x, y = digits("train")
    return setup(fitted(mlp(), x, y + 1, classes=11))


@mistake("shuffled labels", "chance_accuracy")
def _():
    y = samples()[1]
    return setup(y=y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))])


@mistake("classes in alphabetical order", "label_order")
def _():
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    place = torch.tensor([sorted(names).index(name) for name in names])
    x, y = samples(64)
    return setup(x=x, y=place[y])


@mistake("labels of the next sample", "label_order")
def _():
    x, y = samples(33)
    return setup(x=x[:-1], y=y[1:])


@mistake("the two classes swapped", "label_offset")
def _():
    x, y = digits("train")
    kept = (y == 3) | (y == 8)
    model = fitted(mlp(), x[kept], (y[kept] == 8).long(), classes=2)
    some, labels = samples(of=(3, 8))
    return setup(model, x=some, y=(labels == 3).long())


# Inputs


@mistake("inputs divided by 255 twice", "input_scale")
def _():
    return setup(x=samples()[0] / 255)


@mistake("inputs in [0, 255] for a model of [0, 1]", "input_scale")
def _():
    return setup(fitted(seeded(Attention)), linf(8, (0, 255)), x=255 * samples()[0])


@mistake("inputs in [0, 1] for a model of [0, 255]", "input_scale")
def _():
    return setup(nn.Sequential(Apply(lambda x: x / 255), digits_network()).eval())


@mistake("inputs in [0, 1] for a model of [-1, 1]", "input_scale")
def _():
    x, y = digits("train")
    return setup(fitted(seeded(Attention), 2 * x - 1, y))


@mistake("normalisation missing", "input_scale")
def _():
    x, y = digits("train")
    return setup(fitted(seeded(Attention), (x - 0.3) / 0.38, y), linf(0.05), *samples(64))


@mistake("normalisation missing before a network to which scale hardly matters", "input_scale")
def _():
    model = nn.Sequential(Apply(lambda x: 0.3081 * x + 0.1307), fitted(seeded(convolutions))).eval()
    return setup(model, linf(0.05), *samples(64))


@mistake("normalisation applied twice", "input_scale")
def _():
    x, y = digits("train")
    inside = Normalized(fitted(seeded(Attention), (x - 0.45) / 0.225, y), mean=0.45, std=0.225)
    some, labels = samples(64)
    return setup(inside, linf(0.13, (-2.0, 2.5)), x=(some - 0.45) / 0.225, y=labels)


@mistake("images turned by their diagonal", "input_layout")
def _():
    return setup(x=samples()[0].mT)


@mistake("channels last", "input_layout")
def _():
    return setup(x=samples()[0].permute(0, 2, 3, 1))


@mistake("dark on light where the model knows light on dark", "input_layout")
def _():
    return setup(x=1 - samples()[0])


# Model


@mistake("always class 3", "constant_output")
def _():
    model = digits_network()
    with torch.no_grad():
        model[-1].bias[3] += 1000
    return setup(model)


@mistake("outputs that ignore the input", "constant_output")
def _():
    return setup(nn.Sequential(digits_network(), Apply(lambda z: 0 * z + torch.arange(10.0))).eval())


@mistake("an untrained model", "chance_accuracy")
def _():
    return setup(seeded(lambda: digits_network(trained=False)))


@mistake("distances to class centres as logits", "reversed_logits")
def _():
    x, y = digits("train")
    centres = torch.stack([x[y == one].flatten(1).mean(0) for one in range(10)])
    return setup(Apply(lambda x: torch.cdist(x.flatten(1), centres)).eval())


@mistake("BatchNorm without its running statistics", "batch_statistics")
def _():
    x, _ = digits("train")
    body = nn.Sequential(mlp(), nn.BatchNorm1d(300), nn.Tanh(), Apply(lambda z: z * z))
    with torch.no_grad():
        hidden = body[0](x)
        body[1].running_mean.copy_(hidden.mean(0))
        body[1].running_var.copy_(hidden.var(0))
    model = fitted(body)
    model[0][1].reset_running_stats()
    return setup(model)


@mistake("train mode", "train_mode")
def _():
    return setup(nn.Sequential(*digits_network()[:-1], nn.Dropout(0.5), digits_network()[-1]).train())


# Outputs


@mistake("probabilities", "probabilities")
def _():
    return setup(nn.Sequential(digits_network(), nn.Softmax(1)).eval())


@mistake("a regression of the digit", "Regression is not supported")
def _():
    value = Apply(lambda z: (z.softmax(1) * torch.arange(10.0)).sum(1, keepdim=True))
    return setup(nn.Sequential(digits_network(), value).eval())


@mistake("scores of each pixel", "Segmentation is not supported")
def _():
    return setup(nn.Conv2d(1, 10, 3, padding=1).eval())


@mistake("several labels a sample", "Multi-label models are not supported")
def _():
    y = samples()[1]
    return setup(y=nn.functional.one_hot(y, 10) + nn.functional.one_hot((y + 1) % 10, 10))


@mistake("token ids", "token ids")
def _():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Flatten(), nn.Linear(160, 10)).eval()
    return setup(model, x=torch.arange(640).remainder(100).view(32, 20))


@mistake("predicted classes", "predicted classes have no gradients")
def _():
    return setup(nn.Sequential(digits_network(), Apply(lambda z: z.argmax(1))).eval())


# Threat model


@mistake("epsilon 8 in [0, 1]", "threat_scale")
def _():
    return setup(threat_model=linf(8))


@mistake("epsilon 8/255 in [0, 255]", "threat_scale")
def _():
    model = nn.Sequential(Apply(lambda x: x / 255), digits_network()).eval()
    return setup(model, linf(8 / 255, (0, 255)), x=255 * samples()[0])


@mistake("standardised inputs, epsilon 8/255", "threat_scale")
def _():
    x, y = digits("train")
    some = ((samples()[0] - 0.485) / 0.225).clamp(-2.118, 2.2)
    return setup(fitted(mlp(), (x - 0.485) / 0.225, y), linf(8 / 255, (-2.118, 2.64)), x=some)


@mistake("l2 as large as linf would be in [0, 255]", "threat_scale")
def _():
    return setup(threat_model=ThreatModel(norm="l2", epsilon=8))


@mistake("epsilon divided by 255 twice", "threat_scale")
def _():
    return setup(threat_model=linf(8 / 255 / 255))


@mistake("inputs in [0, 1], bounds of [0, 255]", "wrong_bounds")
def _():
    return setup(threat_model=linf(8, (0, 255)))


@mistake("inputs in [0, 1], bounds of [-1, 1]", "wrong_bounds")
def _():
    return setup(threat_model=linf(16 / 255, (-1, 1)))


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
