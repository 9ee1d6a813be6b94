"""Layers that stop, blur, randomise or saturate the gradient, each with a setting that makes it healthy."""

import math

import torch
from torch import nn


class Layer(nn.Module):
    """A layer with a fault, or without it."""

    def __init__(self, *, faulty=True):
        super().__init__()
        self.faulty = faulty


class Rounding(Layer):
    """Few grey levels, or as many as there were."""

    levels = 16

    def forward(self, x):
        return (x * (self.levels - 1)).round() / (self.levels - 1) if self.faulty else x


class Codebook(Layer):
    """Each value becomes the code word next to it, through a one-hot vector; or stays."""

    def forward(self, x):
        if not self.faulty:
            return x
        words = torch.linspace(0, 1, 24)
        nearest = (x.unsqueeze(-1) - words).abs().neg().argmax(-1)
        return nn.functional.one_hot(nearest, len(words)).float() @ words


class Detached(Layer):
    """More contrast, outside the graph."""

    def forward(self, x):
        stretched = (x - 0.5) * 1.2 + 0.5
        return stretched.detach() if self.faulty else stretched


class Denoised(Layer):
    """A mild blur, under no_grad."""

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.faulty):
            return 0.9 * x + 0.1 * nn.functional.avg_pool2d(x, 3, 1, 1)


class Gamma(Layer):
    """A gamma correction in NumPy, or in torch."""

    def forward(self, x):
        if not self.faulty:
            return (x + 0.05) ** 0.8
        return torch.from_numpy((x.detach().numpy() + 0.05) ** 0.8)


class Silent(torch.autograd.Function):
    """The identity, whose gradient is zero."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


class Guard(Layer):
    """A backward pass of its own that returns zeros."""

    def forward(self, x):
        return Silent.apply(x) if self.faulty else x


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

    def forward(self, x):
        if not self.faulty:
            return x.relu()
        return x * (x >= x.topk(int(self.share * x.shape[1]), 1).values[:, -1:])


class Fewer(Winners):
    """A few more of them, of magnitudes that saturate."""

    share = 0.1

    def forward(self, x):
        return super().forward(x).clamp(max=20)


def silence(module, down, up):
    """A backward hook that lets nothing through."""
    return tuple(None if one is None else torch.zeros_like(one) for one in down)


class Staircase(Layer):
    """Sixteen grey levels, by sigmoids so steep that they are flat nearly everywhere; or all of them."""

    steepness = 200

    def forward(self, x):
        if not self.faulty:
            return x
        level = (x.detach() * 15).floor()
        return (level + torch.sigmoid(self.steepness * (x * 15 - level - 0.5))) / 15


class Waves(nn.Module):
    """Waves as long as two sixteenths: what a step of a sixteenth leaps over."""

    def forward(self, x):
        return x + 0.15 * torch.sin(16 * math.pi * x)


class Noise(Layer):
    """Noise larger than what it is added to, in eval mode too."""

    def forward(self, x):
        return x + 16 * torch.randn_like(x) if self.faulty else x


class Resized(Layer):
    """The image smaller, somewhere on a black canvas; or as it is."""

    def forward(self, x):
        if not self.faulty:
            return x
        size = int(torch.randint(5, 9, ()))
        top, left = (int(torch.randint(0, 9 - size, ())) for _ in range(2))
        small = nn.functional.interpolate(x, size=(size, size), mode="bilinear")
        return nn.functional.pad(small, (left, 8 - size - left, top, 8 - size - top))


class Shifted(Layer):
    """Values less their mean, written into the input or into a new tensor."""

    def forward(self, x):
        if self.faulty:
            x.data.sub_(0.13)
            return x
        return x - 0.13


class Softmax(nn.Softmax):
    """Probabilities."""

    def __init__(self):
        super().__init__(1)


class LogSoftmax(nn.Module):
    """Logarithms of probabilities, none of which is zero."""

    def forward(self, x):
        return (x.softmax(1) + 1e-12).log()
