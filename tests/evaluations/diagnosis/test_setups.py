"""Setups: what is wrong with labels, inputs, outputs or threat model is named first, and sound ones are silent.

Classifiers of digits are fitted in closed form: a ridge regression on what a random body returns.
"""

import warnings
from collections import namedtuple
from functools import lru_cache, partial
from operator import itemgetter

import pytest
import torch
from sklearn.datasets import make_moons
from torch import nn

import robust_ext
from robust_ext import RobustExtWarning, ThreatModel
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.core.finding_texts import SETUP
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes.scale import find_scale
from robust_ext.models import Normalized
from tests.evaluations.diagnosis.models import Apply, Attention, seeded

ATTACK = "robust_ext:APGD(steps=20)"


# What is diagnosed, and what has to be named first: the code of a finding, or what a refusal says; else None.
Setup = namedtuple("Setup", ["model", "inputs", "labels", "threat_model", "named"], defaults=[None])


def linf(epsilon=0.1, bounds=(0.0, 1.0)):
    """The threat model of most setups."""
    return ThreatModel(norm="linf", epsilon=epsilon, bounds=bounds)


@lru_cache
def digits(split="test"):
    """All digits of a split, mixed."""
    x, y = load_dataset("digits", split=split).take(range(360))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return x[order], y[order]


TRAIN, CLASSES = digits("train")


def samples(count=32, of=range(10)):
    """Some digits of the test split, of some classes."""
    x, y = digits()
    kept = torch.isin(y, torch.tensor(of))
    return x[kept][:count].clone(), y[kept][:count].clone()


def setup(model=None, threat_model=None, x=None, y=None):
    """A setup on digits; the demo's network and 32 samples where nothing else is given."""
    inputs, labels = samples()
    given = inputs if x is None else x, labels if y is None else y
    return Setup(model or digits_network(), *given, threat_model or linf())


def fitted(body, x=TRAIN, y=CLASSES, classes=10, ridge=1e-2):
    """A body and the linear readout that fits training digits best, as logits of some size."""
    with torch.no_grad():
        features = body.eval()(x).flatten(1).double()
        features = torch.cat([features, torch.ones(len(features), 1)], 1)
        gram = features.T @ features + ridge * len(x) * torch.eye(features.shape[1])
        weights = 10 * torch.linalg.solve(gram, features.T @ nn.functional.one_hot(y, classes).double())
        head = nn.Linear(features.shape[1] - 1, classes)
        head.weight.copy_(weights[:-1].T)
        head.bias.copy_(weights[-1])
    return nn.Sequential(body, nn.Flatten(), head).eval()


def mlp(values=64):
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(values, 300), nn.ReLU()))


def convolutions():
    layers = (nn.Conv2d(1, 40, 3, padding=1), nn.ReLU(), nn.Conv2d(40, 40, 3, stride=2, padding=1), nn.ReLU())
    return nn.Sequential(*layers)


def recurrent():
    return nn.Sequential(nn.GRU(8, 128, batch_first=True), Apply(itemgetter(0)))


def standard(body, mean=0.3, std=0.38):
    return fitted(body, (TRAIN - mean) / std)


def scaled(slope, shift=0.0, model=None):
    """The demo's network, or another, behind a change of scale."""
    return nn.Sequential(Apply(lambda x: slope * x + shift), model or digits_network()).eval()


def binary(*after, labels=8):
    """3 against 8, and what comes after the two logits."""
    kept = (CLASSES == 3) | (CLASSES == 8)
    two = fitted(mlp(), TRAIN[kept], (CLASSES[kept] == 8).long(), classes=2)
    some, found = samples(of=(3, 8))
    return setup(nn.Sequential(two, *after).eval(), x=some, y=(found == labels).long())


def common(model=None):
    zeros, ones = samples(28, of=[0])[0], samples(4, of=[1])[0]
    return setup(model, x=torch.cat([zeros, ones]), y=torch.tensor([0] * len(zeros) + [1] * len(ones)))


def one_sided():
    rows = torch.cat([(CLASSES == 0).nonzero()[:100, 0], (CLASSES == 1).nonzero()[:3, 0]])
    return fitted(mlp(), TRAIN[rows], CLASSES[rows], classes=2, ridge=1.0)


def moons():
    x, y = (torch.tensor(one) for one in make_moons(600, noise=0.1, random_state=0))
    x = x.float()
    model = fitted(mlp(2), x[:500], y[:500], classes=2, ridge=1e-4)
    return setup(model, ThreatModel(norm="l2", epsilon=0.2, bounds=(-3, 3)), x=x[500:532], y=y[500:532])


def misclassified():
    x, y = digits()
    wrong = digits_network()(x).argmax(1) != y
    return setup(x=x[wrong][:4], y=y[wrong][:4])


def hard(x):
    return (x + 0.55 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)))).clamp(0, 1)


def corrupted(change, model=None):
    """A network of clean digits, given 64 changed ones that it gets right more often with more contrast."""
    x, y = samples(64)
    return setup(model or fitted(mlp()), linf(0.05), change(x).clamp(0, 1), y)


def haze(x, strength):
    """Images behind haze that is thicker in some places than in others."""
    coarse = torch.rand(len(x), 1, 2, 2, generator=torch.Generator().manual_seed(0))
    smooth = nn.functional.interpolate(coarse, size=x.shape[2:], mode="bilinear", align_corners=True)
    return (x + strength * smooth) / (1 + strength)


def noise(x, strength):
    """Uniform numbers up to a strength above and below 0."""
    return strength * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1)


def grey(x):
    return 0.2 * x + 0.8 * x.mean((1, 2, 3), keepdim=True)


def foolbox_model():
    given = {"bounds": (0, 1), "preprocessing": {"mean": 0.3, "std": 0.38}, "device": "cpu"}
    return setup(foolbox.PyTorchModel(standard(mlp()), **given))


def art_classifier():
    from art.estimators.classification import PyTorchClassifier

    shape = {"input_shape": (1, 8, 8), "nb_classes": 10, "clip_values": (0.0, 1.0), "device_type": "cpu"}
    return setup(PyTorchClassifier(standard(mlp()), nn.CrossEntropyLoss(), preprocessing=(0.3, 0.38), **shape))


def dark(x):
    return x - noise(x[:, :1, :1, :1], 0.1) - 0.4


ATTENTIVE = fitted(seeded(Attention))
MORE, CONVOLUTIONS = samples(64)[0], fitted(seeded(convolutions), ridge=1e-3)
NETWORK, DIFFERENCE = digits_network(), Apply(lambda z: z[:, 1:] - z[:, :1])
IMAGES, LABELS = samples()
BYTES, SIGNED = linf(25.5, (0, 255)), linf(16 / 255, (-1, 1))
UNITS = linf(0.1 / 0.38, (-0.3 / 0.38, 0.7 / 0.38))
SOUND = {
    "CNN, linf .1 in [0, 1]": setup,
    "normalisation inside the model": lambda: setup(Normalized(standard(mlp()), mean=0.3, std=0.38)),
    "inputs in [0, 255], divided inside the model": lambda: setup(scaled(1 / 255), BYTES, 255 * IMAGES),
    "inputs in [-1, 1], epsilon twice as large": lambda: setup(scaled(0.5, 0.5), SIGNED, 2 * IMAGES - 1),
    "standardised inputs, epsilon in their units": lambda: setup(standard(mlp()), UNITS, (IMAGES - 0.3) / 0.38),
    "MLP, l2 .5": lambda: setup(fitted(mlp()), ThreatModel(norm="l2", epsilon=0.5)),
    "transformer, linf .05": lambda: setup(ATTENTIVE, linf(0.05)),
    "RNN over rows (N, 8, 8)": lambda: setup(fitted(seeded(recurrent), TRAIN[:, 0]), linf(0.05), IMAGES[:, 0]),
    "one-dimensional data (N, 64)": lambda: setup(fitted(mlp(), TRAIN.flatten(1)), x=IMAGES.flatten(1)),
    "two features in two moons, l2 .2": moons,
    "binary problem, 3 against 8": binary,
    "imbalanced classes, 28 of 32 of one class": common,
    "imbalanced binary problem, a model that says the common class": lambda: common(one_sided()),
    "one sample": lambda: setup(None, None, *samples(1)),
    "one class only": lambda: setup(None, None, *samples(24, of=[7])),
    "four misclassified samples": misclassified,
    "weak and honest: 40% on hard data": lambda: setup(fitted(mlp(), hard(TRAIN)), None, hard(MORE), samples(64)[1]),
    "a network of clean digits on noise": lambda: corrupted(lambda x: x + noise(x, 0.5), CONVOLUTIONS),
    "a network of clean digits on glare": lambda: corrupted(lambda x: x + noise(x[:, :1, :1, :1], 0.1) + 0.4),
    "a network of clean digits on haze": lambda: corrupted(lambda x: haze(x, 1.0)),
    "a network of clean digits on little contrast": lambda: corrupted(grey),
    "a network of clean digits on dark images": lambda: corrupted(dark, NETWORK),
    "robust to all that is tried: linf .01": lambda: setup(fitted(nn.Flatten()), linf(0.01)),
    "tiny epsilon, .5/255": lambda: setup(threat_model=linf(0.5 / 255)),
    "large epsilon, linf .3": lambda: setup(threat_model=linf(0.3)),
    "float64 model": lambda: setup(digits_network().double()),
    "bfloat16 model": lambda: setup(digits_network().bfloat16()),
    "Foolbox model with preprocessing": foolbox_model,
    "ART classifier with preprocessing": art_classifier,
    "one output, the logit of the second of two classes": lambda: binary(DIFFERENCE),
    "one output, a sigmoid": lambda: binary(DIFFERENCE, nn.Sigmoid()),
    "a tuple of features and logits": lambda: setup(Apply(lambda x: (NETWORK[:7](x), NETWORK(x))).eval()),
}


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
    centres = torch.stack([TRAIN[one == CLASSES].flatten(1).mean(0) for one in range(10)])
    return setup(Apply(lambda x: torch.cdist(x.flatten(1), centres)).eval())


def without_statistics():
    body = nn.Sequential(mlp(), nn.BatchNorm1d(300), nn.Tanh(), Apply(lambda z: z * z))
    with torch.no_grad():
        hidden = body[0](TRAIN)
        body[1].running_mean.copy_(hidden.mean(0))
        body[1].running_var.copy_(hidden.var(0))
    model = fitted(body)
    model[0][1].reset_running_stats()
    return setup(model)


def token_ids():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Flatten(), nn.Linear(160, 10)).eval()
    return setup(model, x=torch.arange(640).remainder(100).view(32, 20))


def after(function):
    """The demo's network, and what is made of its logits."""
    return setup(nn.Sequential(NETWORK, function if isinstance(function, nn.Module) else Apply(function)).eval())


def standard_bounds():
    some = ((IMAGES - 0.485) / 0.225).clamp(-2.118, 2.2)
    return setup(standard(mlp(), 0.485, 0.225), linf(8 / 255, (-2.118, 2.64)), x=some)


def expected(z):
    return (z.softmax(1) * torch.arange(10.0)).sum(1, keepdim=True)


SHUFFLED = LABELS[torch.randperm(32, generator=torch.Generator().manual_seed(0))]
SEVERAL = nn.functional.one_hot(LABELS, 10) + nn.functional.one_hot((LABELS + 1) % 10, 10)
BEFORE_NORMALISED = scaled(0.3081, 0.1307, fitted(seeded(convolutions)))
NINE, NEXT = samples(of=range(9)), samples(33)
# What makes each, by the code that names it, or by a part of the error that refuses it.
_MISTAKES = {
    "label_offset": {
        "labels counted from 1": lambda: setup(x=NINE[0], y=NINE[1] + 1),
        "a model with a background class before the others": lambda: setup(fitted(mlp(), y=CLASSES + 1, classes=11)),
        "the two classes swapped": lambda: binary(labels=3),
    },
    "label_order": {
        "classes in alphabetical order": alphabetical,
        "labels of the next sample": lambda: setup(x=NEXT[0][:-1], y=NEXT[1][1:]),
    },
    "labels - 1": {"labels 1 to 10 of ten classes": lambda: setup(y=LABELS + 1)},
    "input_scale": {
        "inputs divided by 255 twice": lambda: setup(x=IMAGES / 255),
        "inputs in [0, 255] for a model of [0, 1]": lambda: setup(ATTENTIVE, linf(8, (0, 255)), x=255 * IMAGES),
        "inputs in [0, 1] for a model of [0, 255]": lambda: setup(scaled(1 / 255)),
        "inputs in [0, 1] for a model of [-1, 1]": lambda: setup(standard(seeded(Attention), 0.5, 0.5)),
        "normalisation missing": lambda: setup(standard(seeded(Attention)), linf(0.05), *samples(64)),
        "normalisation missing before a network to which scale hardly matters": lambda: setup(
            BEFORE_NORMALISED, linf(0.05), *samples(64)
        ),
        "normalisation applied twice": normalised_twice,
    },
    "input_layout": {
        "images turned by their diagonal": lambda: setup(x=IMAGES.mT),
        "channels last": lambda: setup(x=IMAGES.permute(0, 2, 3, 1)),
        "dark on light where the model knows light on dark": lambda: setup(x=1 - IMAGES),
    },
    "constant_output": {
        "always class 3": always_three,
        "outputs that ignore the input": lambda: after(lambda z: 0 * z + torch.arange(10.0)),
    },
    "chance_accuracy": {
        "shuffled labels": lambda: setup(y=SHUFFLED),
        "an untrained model": lambda: setup(seeded(partial(digits_network, trained=False))),
    },
    "reversed_logits": {"distances to class centres as logits": distances},
    "batch_statistics": {"BatchNorm without its running statistics": without_statistics},
    "train_mode": {"train mode": lambda: setup(digits_network().insert(7, nn.Dropout(0.5)).train())},
    "probabilities": {"probabilities": lambda: after(nn.Softmax(1))},
    "Regression is not supported": {"a regression of the digit": lambda: after(expected)},
    "Segmentation is not supported": {"scores of each pixel": lambda: setup(nn.Conv2d(1, 10, 3, padding=1).eval())},
    "multi-label targets": {"several labels a sample": lambda: setup(y=SEVERAL)},
    "token ids": {"token ids": token_ids},
    "predicted classes have no gradients": {"predicted classes": lambda: after(lambda z: z.argmax(1))},
    "threat_scale": {
        "epsilon 8 in [0, 1]": lambda: setup(threat_model=linf(8)),
        "epsilon 8/255 in [0, 255]": lambda: setup(scaled(1 / 255), linf(8 / 255, (0, 255)), x=255 * IMAGES),
        "standardised inputs, epsilon 8/255": standard_bounds,
        "l2 as large as linf would be in [0, 255]": lambda: setup(threat_model=ThreatModel(norm="l2", epsilon=8)),
        "epsilon divided by 255 twice": lambda: setup(threat_model=linf(8 / 255 / 255)),
    },
    "wrong_bounds": {
        "inputs in [0, 1], bounds of [0, 255]": lambda: setup(threat_model=linf(8, (0, 255))),
        "inputs in [0, 1], bounds of [-1, 1]": lambda: setup(threat_model=SIGNED),
    },
}


def _named(make, named):
    return make()._replace(named=named)


MISTAKES = {words: partial(_named, make, named) for named, group in _MISTAKES.items() for words, make in group.items()}


def diagnosed(one, **settings):
    """The diagnosis of a setup, or the error that refused it."""
    try:
        return robust_ext.diagnose(one.model, ATTACK, one.inputs, one.labels, one.threat_model, **settings)
    except robust_ext.RobustExtError as error:
        return error


def first(result):
    """What is named first: a code, the text of an error, or None."""
    if isinstance(result, Exception):
        return str(result)
    return None if result.likely is None else result.likely.code


ALONE = {"planted": 0, "references": False}


def doubts(result):
    return [finding.code for finding in result.findings if finding.code in SETUP]


@pytest.mark.parametrize("words", SOUND)
def test_a_sound_setup_has_no_finding_of_weight(words):
    if words.startswith("ART"):
        pytest.importorskip("art")
    assert [one.code for one in diagnosed(SOUND[words](), **ALONE).findings if one.weight != "low"] == []


NO_PASTE = ("batch_statistics", "constant_output", "chance_accuracy", "threat_scale")


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named_first_the_attack_is_not_blamed_and_the_remedy_as_printed_helps_as_stated(words):
    one = MISTAKES[words]()
    result = diagnosed(one, **ALONE)
    assert one.named in (first(result) or "")
    if isinstance(result, Exception):
        return
    assert not any(finding.attack for finding in result.findings)
    if one.named in SETUP and one.named not in NO_PASTE:
        names = {"model": one.model, "inputs": one.inputs, "labels": one.labels}
        exec(result.likely.remedies[0].paste, names)  # noqa: S102 - our own lines
        fixed = diagnosed(one._replace(**{key: names[key] for key in ("model", "inputs", "labels")}), **ALONE)
        assert doubts(fixed) == []
        stated = f"({100 * fixed.content['clean_accuracy']:.1f}%)"
        # Of channels that are last, none is known: the model raised.
        assert words == "channels last" or stated in result.likely.evidence[0]


MNIST, CIFAR, LARGE = (1, 28, 28), (3, 32, 32), (3, 64, 64)
USUAL = [
    ("linf", 8 / 255, (-1, 1), CIFAR), ("linf", 0.25 / 255, (0, 1), LARGE), ("linf", 0.25, (0, 255), LARGE),
    ("linf", 4 / 255 / 0.225, (-2.118, 2.64), LARGE), ("linf", 0.1, (-3, 3), (20,)), ("l2", 36 / 255, (0, 1), CIFAR),
    ("l2", 3.0, (0, 1), MNIST), ("l2", 128.0, (0, 255), CIFAR), ("l2", 0.01, (0, 1), (20,)),
    ("l1", 12.0, (0, 1), CIFAR), ("l1", 1.0, (0, 1), MNIST)
]  # fmt: skip
OF_ANOTHER_SCALE = [
    ("linf", 2.0, (-1, 1), CIFAR), ("linf", 0.3, (0, 255), MNIST), ("linf", 0.3, (-0.4242, 2.8215), MNIST),
    ("l2", 8 / 255, (0, 1), CIFAR), ("l2", 30.0, (0, 1), CIFAR),
    ("l2", 0.5, (0, 255), CIFAR), ("l1", 8 / 255, (0, 1), CIFAR), ("l1", 2000.0, (0, 1), CIFAR)
]  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "codes"), [(one, []) for one in USUAL] + [(one, ["threat_scale"]) for one in OF_ANOTHER_SCALE]
)
def test_budgets_of_another_scale_are_a_finding_and_usual_ones_are_not(budget, codes):
    """On samples that go over all of the bounds, of two classes."""
    norm, epsilon, bounds, shape = budget
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    inputs = bounds[0] + torch.rand(16, *shape, generator=torch.Generator().manual_seed(0)) * threat_model.width
    found = find_scale(inputs, torch.arange(16) % 2, bounds=bounds, budgets=[threat_model])
    assert [one.code for one in found] == codes


@pytest.mark.parametrize("words", ["labels of the next sample", "epsilon 8 in [0, 1]"])
def test_other_evaluations_warn_of_it_once(words):
    one = MISTAKES[words]()
    given = one.inputs, one.labels, one.threat_model
    for evaluate in (
        lambda: robust_ext.robust_accuracy(one.model, ATTACK, *given),
        lambda: robust_ext.evaluate_defense(lambda x: x, ATTACK, *given, classifier=one.model),
        lambda: robust_ext.mead(one.model, [ATTACK], *given, detectors={"contrast": lambda x: x.flatten(1).std(1)}),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, *_ = evaluate().findings
        assert found.code == one.named
        assert sum(found.cause in str(entry.message) for entry in caught if entry.category is RobustExtWarning) == 1


def test_a_binarization_test_doubts_scale_and_constant_outputs_without_labels():
    for model, threat_model, codes in (
        ("always class 3", linf(), []),
        ("outputs that ignore the input", linf(), ["constant_output"]),
        (None, linf(8), ["threat_scale"]),
    ):
        network = MISTAKES[model]().model if model else digits_network()
        given = network, ATTACK, IMAGES[:8], threat_model
        assert doubts(robust_ext.binarization_test(*given, inner_points=50, depths=(1,))) == codes
