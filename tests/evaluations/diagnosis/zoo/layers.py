"""Layers that stop, blur, randomise or saturate the gradient, each with a setting that makes it healthy."""

import math

import torch
from torch import nn


class Layer(nn.Module):
    """A layer with a fault, or without it; the sound one returns its inputs unless it says otherwise."""

    def __init__(self, *, faulty=True):
        super().__init__()
        self.faulty = faulty

    def forward(self, x):
        return self.broken(x) if self.faulty else self.sound(x)

    def sound(self, x):
        return x


class Rounding(Layer):
    def broken(self, x):
        return (x * 15).round() / 15


class Codebook(Layer):
    """Each value becomes the code word next to it, through a one-hot vector."""

    def broken(self, x):
        words = torch.linspace(0, 1, 24)
        nearest = (x.unsqueeze(-1) - words).abs().neg().argmax(-1)
        return nn.functional.one_hot(nearest, len(words)).float() @ words


class Detached(Layer):
    def sound(self, x):
        return (x - 0.5) * 1.2 + 0.5

    def broken(self, x):
        return self.sound(x).detach()


class Denoised(Layer):
    def sound(self, x):
        return 0.9 * x + 0.1 * nn.functional.avg_pool2d(x, 3, 1, 1)

    broken = torch.no_grad()(sound)


class Gamma(Layer):
    def sound(self, x):
        return (x + 0.05) ** 0.8

    def broken(self, x):
        return torch.from_numpy(self.sound(x.detach().numpy()))


class Silent(torch.autograd.Function):
    """The identity, whose gradient is zero."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


class Guard(Layer):
    def broken(self, x):
        return Silent.apply(x)


class Compressed(Layer):
    """JPEG of a block of 8x8: its cosine transform, rounded to multiples of a table."""

    def __init__(self, *, faulty=True):
        super().__init__(faulty=faulty)
        at = torch.arange(8.0)
        basis = torch.cos(math.pi * (2 * at + 1) * at[:, None] / 16) / 2
        basis[0] /= math.sqrt(2)
        self.register_buffer("basis", basis)
        self.register_buffer("table", 0.08 + 0.03 * (at + at[:, None]))

    def forward(self, x):
        waves = self.basis @ x @ self.basis.T
        if self.faulty:
            waves = (waves / self.table).round() * self.table
        return self.basis.T @ waves @ self.basis


class Companded(Layer):
    """A curve in two pieces, one of which has no finite gradient where the other is taken."""

    def forward(self, x):
        above = (x - 0.5) if self.faulty else (x - 0.5).clamp(min=1e-3)
        return torch.where(x > 0.5, 0.5 + above.sqrt() * 0.7, x)


class Winners(Layer):
    """The largest of the activations, the others zero; or those above zero."""

    share = 0.05

    def broken(self, x):
        return x * (x >= x.topk(int(self.share * x.shape[1]), 1).values[:, -1:])

    def sound(self, x):
        return x.relu()


class Fewer(Winners):
    share = 0.1

    def forward(self, x):
        return super().forward(x).clamp(max=20)


def silence(module, down, up):
    return tuple(None if one is None else torch.zeros_like(one) for one in down)


class Staircase(Layer):
    """Sixteen grey levels, by sigmoids so steep that they are flat nearly everywhere."""

    def broken(self, x):
        level = (x.detach() * 15).floor()
        return (level + torch.sigmoid(200 * (x * 15 - level - 0.5))) / 15


class Waves(nn.Module):
    """Waves as long as two sixteenths: what a step of a sixteenth leaps over."""

    def forward(self, x):
        return x + 0.15 * torch.sin(16 * math.pi * x)


class Noise(Layer):
    def broken(self, x):
        return x + 16 * torch.randn_like(x)


class Resized(Layer):
    """The image smaller, somewhere on a black canvas."""

    def broken(self, x):
        size = int(torch.randint(5, 9, ()))
        top, left = (int(torch.randint(0, 9 - size, ())) for _ in range(2))
        small = nn.functional.interpolate(x, size=(size, size), mode="bilinear")
        return nn.functional.pad(small, (left, 8 - size - left, top, 8 - size - top))


class Shifted(Layer):
    """Values less their mean, written into the input or into a new tensor."""

    def broken(self, x):
        x.data.sub_(0.13)
        return x

    def sound(self, x):
        return x - 0.13


class LogSoftmax(nn.Module):
    """Logarithms of probabilities, none of which is zero."""

    def forward(self, x):
        return (x.softmax(1) + 1e-12).log()
