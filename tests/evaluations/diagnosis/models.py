"""Networks for digits with a fault at a known place, and healthy ones."""

import io

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.evaluations.diagnosis.zoo.layers import Silent

X, Y = load_dataset("digits").take(range(32))


class Apply(nn.Module):
    """A function as a module, so that it has a name."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def inserted(place, layer):
    """The demo's network with a layer before its ``place``-th; a function is made one."""
    layers = list(digits_network())
    layers.insert(place, layer if isinstance(layer, nn.Module) else Apply(layer))
    return nn.Sequential(*layers).eval()


class Own(nn.Module):
    def __init__(self, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.net, self.before, self.after = digits_network(), before, after
        self.eval()

    def forward(self, x):
        return self.after(self.net(self.before(x)))


class Opposite(Silent):
    """The identity with a gradient of the wrong sign."""

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def winners(x, share=0.2):
    flat = x.flatten(1)
    least = flat.topk(max(1, int(share * flat.shape[1])), 1).values[:, -1:]
    return (flat * (flat >= least)).view_as(x)


def jpeg(x):
    made = []
    for row in (x.detach().clamp(0, 1) * 255).byte().numpy():
        held = io.BytesIO()
        Image.fromarray(row[0]).save(held, "JPEG", quality=50)
        made.append(np.asarray(Image.open(held), dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(made)).unsqueeze(1)


def rounded(x):
    return (x * 8).round() / 8


def partly(x):
    return 0.999 * x.detach() + 0.001 * x


# Beside the zoo, by name: what makes the model, the code of the first finding, its layer.
FAULTS = {
    "rounding in the model's forward": (lambda: Own(rounded), "zero_gradient", ""),
    "data": (lambda: Own(lambda x: x.data * 1.1), "cut_gradient", ""),
    "numpy without detach": (lambda: inserted(0, lambda x: torch.from_numpy(x.numpy())), "cut_gradient", "0"),
    "partial detach": (lambda: inserted(0, partly), "wrong_gradient", "0"),
    "partial detach in the model's forward": (lambda: Own(partly), "wrong_gradient", ""),
    "opposite backward": (lambda: inserted(2, Opposite.apply), "wrong_gradient", "2"),
    "steep sigmoid in forward": (lambda: Own(lambda x: torch.sigmoid(500 * (x - 0.45))), "saturated_layer", ""),
    "log softmax": (lambda: Own(after=lambda z: z.log_softmax(1)), "log_probabilities", ""),
    "functional dropout": (lambda: inserted(7, F.dropout), "random_output", "7"),
    "noise in the model's forward": (lambda: Own(lambda x: x + 0.1 * torch.randn_like(x)), "random_output", ""),
    "batch statistics": (lambda: inserted(1, nn.BatchNorm2d(16, track_running_stats=False)), "batch_dependent", "1"),
    "log of softmax": (lambda: inserted(8, lambda z: (1000 * z).softmax(1).log()), "non_finite_gradient", "8"),
    "NaN": (lambda: inserted(2, lambda u: (u - 1).sqrt()), "non_finite_logits", "2"),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Linear(8, 64), nn.Parameter(torch.randn(8, 64))
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.embed(x.flatten(1).view(-1, 8, 8)) + self.places)


def seeded(make):
    """What a function makes with random numbers of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def _small(*layers, last):
    return lambda: seeded(lambda: nn.Sequential(*(make() for make in layers), nn.Flatten(), nn.Linear(last, 10)).eval())


_DENSE, _CONVOLUTION = (nn.Flatten, lambda: nn.Linear(64, 128)), lambda: nn.Conv2d(1, 8, 3)
HEALTHY = {
    "convolutions": digits_network,
    "GELU": _small(*_DENSE, nn.GELU, last=128),
    "tanh": _small(*_DENSE, nn.Tanh, last=128),
    "max pooling": _small(_CONVOLUTION, nn.ReLU, lambda: nn.MaxPool2d(2), last=72),
    "batch norm": _small(_CONVOLUTION, lambda: nn.BatchNorm2d(8), nn.ReLU, last=288),
    "attention": _small(Attention, last=512),
    "softmax inside": lambda: inserted(6, lambda u: u * u.softmax(1) * 8),
    "clamp": lambda: inserted(0, lambda x: x.clamp(0.1, 0.9)),
    "straight-through": lambda: inserted(0, lambda x: x + (rounded(x) - x).detach()),
    "checkpoint": lambda: Own(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)),
}
