"""Published architectures, for use with ``--model examples/networks.py:NAME --weights FILE``.

``resnet20``: He et al. 2016, CIFAR-10, with parameter-free shortcuts (option A); keys as in the widely used
PyTorch port by Y. Idelbayev. ``wong_kolter_mnist``: the MNIST network of Wong and Kolter 2018.
``soap_resnet``: the small CIFAR-10 network of Shi et al. 2021 (SOAP), keys as in their repository.
``mead_mnist``, ``mead_cifar10``: the networks of Granese et al. 2022 (MEAD), trained by ``examples/train_mead.py``.
``pooled``: convolutions of 16 and 32 filters with max pooling and two dense layers, after the MNIST network of Croce,
Rauber and Hein 2019, trained by ``examples/train_robust.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalisation and a shortcut that subsamples and pads with zero channels."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.stride = stride
        self.padding = (outside - inside) // 2

    def forward(self, x: Tensor) -> Tensor:
        """Activations of the next block."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + x)


class ResNet20(nn.Module):
    """Inputs (N, 3, 32, 32) in [0, 1], normalised inside; logits (N, 10); 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1), persistent=False)
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10)."""
        x = (x - self.mean) / self.std
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def resnet20() -> nn.Module:
    """A CIFAR-10 ResNet-20 in eval mode; weights are loaded by the caller."""
    return ResNet20().eval()


class ProjectedBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation; a 1x1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int, *, bias: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=bias), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=bias), nn.BatchNorm2d(outside)
        parts = (nn.Conv2d(inside, outside, 1, stride, bias=bias), nn.BatchNorm2d(outside))
        self.shortcut = nn.Sequential(*(() if inside == outside else parts))

    def forward(self, x: Tensor) -> Tensor:
        """Activations of the next block."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def _pair(inside: int, outside: int, stride: int, *, bias: bool) -> nn.Sequential:
    first, second = (inside, outside, stride), (outside, outside, 1)
    return nn.Sequential(ProjectedBlock(*first, bias=bias), ProjectedBlock(*second, bias=bias))


class SOAPResNet(nn.Module):
    """Inputs (N, 3, 32, 32) in [0, 1], normalised inside; logits (N, 10); 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.2023, 0.1994, 0.2010]).view(1, 3, 1, 1), persistent=False)
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16)
        self.layer1 = _pair(16, 16, 1, bias=True)
        self.layer2 = _pair(16, 32, 2, bias=True)
        self.layer3 = _pair(32, 64, 2, bias=True)
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10)."""
        x = (x - self.mean) / self.std
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def soap_resnet() -> nn.Module:
    """The small CIFAR-10 network of Shi et al. (2021), in eval mode; weights are loaded by the caller.

    They lie in ``results/cifar10/resnet-pi-example/latest_model.pth`` of github.com/Mishne-Lab/SOAP, which torch reads
    without running code: 724,977 bytes, SHA-256 0c22db146577ff1ae9c495f42f588531aa463205feb4e08957831b2ce17eabe4.
    """
    return SOAPResNet().eval()


def wong_kolter_mnist() -> nn.Module:
    """The MNIST convnet of Wong and Kolter (2018), inputs (N, 1, 28, 28) in [0, 1], in eval mode."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    ).eval()


def mead_mnist() -> nn.Module:
    """The MNIST network of the MEAD paper, inputs (N, 1, 28, 28) in [0, 1], in eval mode.

    Two blocks of two convolutions and a pool, then three linear layers with dropout before the second. Weights lie
    channels last, in which a forward and backward pass takes about half the time on CPUs.
    """
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 256),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    return network.to(memory_format=torch.channels_last).eval()


class MeadResNet(nn.Module):
    """Inputs (N, 3, 32, 32) in [0, 1], not normalised; logits (N, 10); 8 x ``width`` features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = _pair(width, width, 1, bias=False)
        self.layer2 = _pair(width, 2 * width, 2, bias=False)
        self.layer3 = _pair(2 * width, 4 * width, 2, bias=False)
        self.layer4 = _pair(4 * width, 8 * width, 2, bias=False)
        self.linear = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.linear(x.mean((2, 3)))


def mead_cifar10(width: int = 64) -> nn.Module:
    """The CIFAR-10 network of the MEAD paper, a ResNet-18 whose first convolution is 3x3, in eval mode.

    Its keys are those of the paper's public code, which has no weights of it.

    Args:
        width: Channels of the first convolution; 64 in the paper, fewer for a CPU.
    """
    return MeadResNet(width).to(memory_format=torch.channels_last).eval()


def pooled(side: int = 28, kernel: int = 5) -> nn.Module:
    """A ReLU network of the layers that Croce, Rauber and Hein (2019, section 5.1) attack, in eval mode.

    Kernels, padding (none) and the 256 hidden units are chosen for training on one core: the paper leaves them open.

    Args:
        side: Height and width of the inputs, (N, 1, side, side) in [0, 1].
        kernel: Height and width of the kernels; 5 for images of 28, 2 for images of 8.
    """
    left = ((side - kernel + 1) // 2 - kernel + 1) // 2
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * left * left, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    ).eval()
