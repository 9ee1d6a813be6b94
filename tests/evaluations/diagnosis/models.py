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


def without_gradient(x):
    with torch.no_grad():
        return F.avg_pool2d(x, 3, 1, 1) * 0.2 + x * 0.8


def jpeg(x):
    image = __import__("PIL.Image", fromlist=["Image"])
    made = []
    for row in (x.detach().clamp(0, 1) * 255).byte().numpy():
        held = io.BytesIO()
        image.fromarray(row[0]).save(held, "JPEG", quality=50)
        made.append(np.asarray(image.open(held), dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(made)).unsqueeze(1)


def resized(x):
    size = int(torch.randint(5, 9, ()))
    small = F.interpolate(x, size=(size, size), mode="bilinear")
    left = int(torch.randint(0, 9 - size, ()))
    return F.pad(small, (left, 8 - size - left, left, 8 - size - left))


def clamped(x):
    x.data.clamp_(0.1, 0.9)
    return x


def rounded(x):
    return (x * 8).round() / 8


def companded(x):
    return torch.where(x > 0.5, 0.5 + (x - 0.5).sqrt(), x)


def normed(x):
    apart = (x - x.detach()).flatten(1).pow(2).sum(1).sqrt()
    return x / (1 + apart.view(-1, 1, 1, 1))


def dropout_on():
    model = inserted(7, nn.Dropout(0.3))
    model[7].train()
    return model


def batch_norm_on():
    model = inserted(1, nn.BatchNorm2d(16))
    with torch.no_grad():
        for _ in range(50):
            model.train()(X)
    return model


def large(factor, layers=digits_network):
    model = layers()
    with torch.no_grad():
        model[-1].weight.mul_(factor)
        model[-1].bias.mul_(factor)
    return model


# Name: what makes the model, the code of the first finding, its layer.
FAULTS = {
    "rounding": (lambda: inserted(0, Apply(rounded)), "zero_gradient", "0"),
    "rounding in the model's forward": (lambda: Own(rounded), "zero_gradient", ""),
    "a threshold": (lambda: inserted(0, Apply(lambda x: (x > 0.5).float())), "cut_gradient", "0"),
    "k winners": (lambda: inserted(2, Apply(winners)), "wrong_gradient", "2"),
    "detach": (lambda: inserted(2, Apply(torch.detach)), "cut_gradient", "2"),
    "data": (lambda: Own(lambda x: x.data * 1.1), "cut_gradient", ""),
    "no_grad": (lambda: inserted(0, Apply(without_gradient)), "cut_gradient", "0"),
    "numpy": (lambda: inserted(0, Apply(lambda x: torch.from_numpy(x.detach().numpy() ** 2))), "cut_gradient", "0"),
    "numpy without detach": (
        lambda: inserted(0, Apply(lambda x: torch.from_numpy(x.numpy() ** 2))),
        "cut_gradient",
        "0",
    ),
    "argmax": (lambda: inserted(8, Apply(lambda z: F.one_hot(z.argmax(1), 10).float() * 8)), "cut_gradient", "8"),
    "JPEG": (lambda: inserted(0, Apply(jpeg)), "cut_gradient", "0"),
    "partial detach": (lambda: inserted(0, Apply(lambda x: 0.999 * x.detach() + 0.001 * x)), "wrong_gradient", "0"),
    "partial detach in the model's forward": (
        lambda: Own(lambda x: 0.999 * x.detach() + 0.001 * x),
        "wrong_gradient",
        "",
    ),
    "zero backward": (lambda: inserted(0, Apply(Zero.apply)), "zero_gradient", "0"),
    "zero backward in the model's forward": (lambda: Own(Zero.apply), "zero_gradient", ""),
    "opposite backward": (lambda: inserted(2, Apply(Opposite.apply)), "wrong_gradient", "2"),
    "steep sigmoid": (lambda: inserted(1, Apply(lambda u: torch.sigmoid(500 * u))), "saturated_layer", "1"),
    "steep sigmoid in the model's forward": (
        lambda: Own(lambda x: torch.sigmoid(500 * (x - 0.45))),
        "saturated_layer",
        "",
    ),
    "k winners in the model's forward": (lambda: Own(winners), "wrong_gradient", ""),
    "logits x 1000": (lambda: large(1000), "saturated_loss", None),
    "softmax": (lambda: inserted(8, nn.Softmax(1)), "probabilities", "8"),
    "log softmax": (lambda: Own(after=lambda z: z.log_softmax(1)), "log_probabilities", ""),
    "dropout on": (dropout_on, "train_mode", "7"),
    "dropout in train mode": (lambda: inserted(7, nn.Dropout(0.3)).train(), "train_mode", "7"),
    "batch norm in train mode": (batch_norm_on, "train_mode", "1"),
    "functional dropout": (lambda: inserted(7, Apply(F.dropout)), "random_output", "7"),
    "noise": (lambda: inserted(0, Apply(lambda x: x + 0.1 * torch.randn_like(x))), "random_output", "0"),
    "noise in the model's forward": (lambda: Own(lambda x: x + 0.1 * torch.randn_like(x)), "random_output", ""),
    "random resize": (lambda: inserted(0, Apply(resized)), "random_output", "0"),
    "batch statistics": (lambda: inserted(1, nn.BatchNorm2d(16, track_running_stats=False)), "batch_dependent", "1"),
    "clamp in place": (lambda: inserted(0, Apply(clamped)), "changes_input", "0"),
    "square root at 0": (lambda: inserted(0, Apply(companded)), "non_finite_gradient", "0"),
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


def _dense(activation):
    first, second, last = (lambda: nn.Linear(64, 128)), (lambda: nn.Linear(128, 64)), (lambda: nn.Linear(64, 10))
    return seeded(lambda: nn.Sequential(nn.Flatten(), first(), activation, second(), activation, last()))


HEALTHY = {
    "convolutions": digits_network,
    "ReLU": _dense(nn.ReLU()),
    "GELU": _dense(nn.GELU()),
    "tanh": _dense(nn.Tanh()),
    "max pooling": seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    ),
    "batch norm": seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    ),
    "residual": seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), *[Block(8) for _ in range(4)], nn.Flatten(), nn.Linear(288, 10))
    ),
    "attention": seeded(Attention),
    "large margins": lambda: large(3),
    "softmax inside": lambda: inserted(6, Apply(lambda u: u * u.softmax(1) * 8)),
    "clamp": lambda: inserted(0, Apply(lambda x: x.clamp(0.1, 0.9))),
    "normalisation": lambda: inserted(0, Apply(lambda x: (x * 255 / 255 - 0.0) / 1.0)),
    "straight-through": lambda: inserted(0, Apply(lambda x: x + (rounded(x) - x).detach())),
    "checkpoint": lambda: Own(lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)),
}
