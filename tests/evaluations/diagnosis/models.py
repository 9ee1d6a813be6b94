"""Networks for digits with a fault at a known place, and healthy ones."""

import io

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

X, Y = load_dataset("digits").take(range(32))


class Apply(nn.Module):
    """A function as a module, so that it has a name."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def inserted(place, layer):
    """The demo's network with a layer before its ``place``-th."""
    layers = list(digits_network())
    layers.insert(place, layer)
    return nn.Sequential(*layers).eval()


class Own(nn.Module):
    """The demo's network, with functions in the forward of the model itself."""

    def __init__(self, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.net, self.before, self.after = digits_network(), before, after
        self.eval()

    def forward(self, x):
        return self.after(self.net(self.before(x)))


class Zero(torch.autograd.Function):
    """The identity with no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


class Opposite(torch.autograd.Function):
    """The identity with a gradient of the wrong sign."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def winners(x, share=0.2):
    flat = x.flatten(1)
    least = flat.topk(max(1, int(share * flat.shape[1])), 1).values[:, -1:]
    return (flat * (flat >= least)).view_as(x)


def jpeg(x):
    image = __import__("PIL.Image", fromlist=["Image"])
    made = []
    for row in (x.detach().clamp(0, 1) * 255).byte().numpy():
        held = io.BytesIO()
        image.fromarray(row[0]).save(held, "JPEG", quality=50)
        made.append(np.asarray(image.open(held), dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(made)).unsqueeze(1)


def rounded(x):
    return (x * 8).round() / 8


def normed(x):
    apart = (x - x.detach()).flatten(1).pow(2).sum(1).sqrt()
    return x / (1 + apart.view(-1, 1, 1, 1))


def partly(x):
    return 0.999 * x.detach() + 0.001 * x


def noisy(x):
    return x + 0.1 * torch.randn_like(x)


# Beside the zoo, by name: what makes the model, the code of the first finding, its layer.
FAULTS = {
    "rounding in the model's forward": (lambda: Own(rounded), "zero_gradient", ""),
    "a threshold": (lambda: inserted(0, Apply(lambda x: (x > 0.5).float())), "cut_gradient", "0"),
    "detach": (lambda: inserted(2, Apply(torch.detach)), "cut_gradient", "2"),
    "data": (lambda: Own(lambda x: x.data * 1.1), "cut_gradient", ""),
    "numpy without detach": (lambda: inserted(0, Apply(lambda x: torch.from_numpy(x.numpy()))), "cut_gradient", "0"),
    "JPEG": (lambda: inserted(0, Apply(jpeg)), "cut_gradient", "0"),
    "partial detach": (lambda: inserted(0, Apply(partly)), "wrong_gradient", "0"),
    "partial detach in the model's forward": (lambda: Own(partly), "wrong_gradient", ""),
    "opposite backward": (lambda: inserted(2, Apply(Opposite.apply)), "wrong_gradient", "2"),
    "steep sigmoid": (lambda: inserted(1, Apply(lambda u: torch.sigmoid(500 * u))), "saturated_layer", "1"),
    "steep sigmoid in forward": (lambda: Own(lambda x: torch.sigmoid(500 * (x - 0.45))), "saturated_layer", ""),
    "log softmax": (lambda: Own(after=lambda z: z.log_softmax(1)), "log_probabilities", ""),
    "dropout in train mode": (lambda: inserted(7, nn.Dropout(0.3)).train(), "train_mode", "7"),
    "functional dropout": (lambda: inserted(7, Apply(F.dropout)), "random_output", "7"),
    "noise in the model's forward": (lambda: Own(noisy), "random_output", ""),
    "batch statistics": (lambda: inserted(1, nn.BatchNorm2d(16, track_running_stats=False)), "batch_dependent", "1"),
    "norm of zero": (lambda: inserted(0, Apply(normed)), "non_finite_gradient", "0"),
    "log of softmax": (lambda: inserted(8, Apply(lambda z: (1000 * z).softmax(1).log())), "non_finite_gradient", "8"),
    "NaN": (lambda: inserted(2, Apply(lambda u: (u - 1).sqrt())), "non_finite_logits", "2"),
}


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.norm(self.conv1(x)))
        out = self.conv2(out)
        out += x
        return self.relu(out)


class Attention(nn.Module):
    """Pixels as tokens, softmax attention between them."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Linear(8, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x):
        tokens = self.embed(x.flatten(1, 2))
        tokens = self.norm(tokens + self.mix(tokens, tokens, tokens, need_weights=False)[0])
        return self.head(tokens.mean(1))


def seeded(make):
    """A network of random weights, in eval mode."""

    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().eval()

    return made


def _small(*layers, last):
    return seeded(lambda: nn.Sequential(*(layer() for layer in layers), nn.Flatten(), nn.Linear(last, 10)))


def _convolution():
    return nn.Conv2d(1, 8, 3)


HEALTHY = {
    "convolutions": digits_network,
    "GELU": _small(nn.Flatten, lambda: nn.Linear(64, 128), nn.GELU, last=128),
    "tanh": _small(nn.Flatten, lambda: nn.Linear(64, 128), nn.Tanh, last=128),
    "max pooling": _small(_convolution, nn.ReLU, lambda: nn.MaxPool2d(2), last=72),
    "batch norm": _small(_convolution, lambda: nn.BatchNorm2d(8), nn.ReLU, last=288),
    "residual": _small(_convolution, *[lambda: Block(8)] * 4, last=288),
    "attention": seeded(Attention),
    "softmax inside": lambda: inserted(6, Apply(lambda u: u * u.softmax(1) * 8)),
    "clamp": lambda: inserted(0, Apply(lambda x: x.clamp(0.1, 0.9))),
    "straight-through": lambda: inserted(0, Apply(lambda x: x + (rounded(x) - x).detach())),
    "checkpoint": lambda: Own(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)),
}
