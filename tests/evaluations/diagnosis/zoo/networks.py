"""Small trained networks for digits, into which a layer is put under a name, and a published one for CIFAR-10."""

import io
import runpy
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

# The published network and images of CIFAR-10 are no part of the project.
ROOT = Path(__file__).parents[4]
WEIGHTS = ROOT.parent / "shared" / "models" / "cifar10_resnet20.safetensors"
IMAGES = ROOT.parent / "shared" / "data" / "cifar10" / "test_jpeg.npz"
NAMES = ("conv1", "relu1", "conv2", "relu2", "flatten", "dense", "relu3", "head")


class Classifier(nn.Module):
    """A network whose layers have names: ``net.head`` makes the logits."""

    def __init__(self, layers):
        super().__init__()
        self.net = nn.Sequential(OrderedDict(layers))
        self.eval()

    def forward(self, x):
        return self.net(x)


@lru_cache
def digits(count=16):
    """Inputs of the test split with their labels, of those that the plain network gets right."""
    inputs, labels = load_dataset("digits").take(range(100))
    right = digits_network()(inputs).argmax(1) == labels
    return inputs[right][:count], labels[right][:count]


def convolutional(*, before="conv1", **put):
    """The demo's network, with layers by name in front of another: ``convolutional(quantise=Rounding())``."""
    layers = list(zip(NAMES, digits_network(), strict=True))
    place = NAMES.index(before) if before else len(layers)
    layers[place:place] = put.items()
    return Classifier(layers).requires_grad_(False)


def scaled(factor, **after):
    """The demo's network with larger logits, and with layers after them."""
    network = convolutional(before=None, **after)
    network.net.head.weight.mul_(factor)
    network.net.head.bias.mul_(factor)
    return network


def training(network, name):
    network.net.get_submodule(name).train()
    return network


def batch_normalised():
    """The demo's network with a batch normalisation whose running statistics are those of digits."""
    network = convolutional(before="relu1", norm=nn.BatchNorm2d(16))
    values, norm = network.net.conv1(digits()[0]), network.net.norm
    norm.running_mean.copy_(values.mean((0, 2, 3)))
    norm.running_var.copy_(values.var((0, 2, 3)))
    # It changes nothing but how the values are computed.
    norm.weight.copy_((norm.running_var + norm.eps).sqrt())
    norm.bias.copy_(norm.running_mean)
    return network


@lru_cache
def trained(name, layer, **settings):
    """A network of one hidden layer, trained for a second with this activation."""
    data = load_dataset("digits", split="train")
    inputs, labels = data.take(range(len(data)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Flatten(), nn.Linear(64, 512), layer(**settings), nn.Linear(512, 10)
        network = Classifier(zip(("flatten", "dense", name, "head"), layers, strict=True)).train()
        optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
        for _ in range(4):
            for batch in torch.randperm(len(inputs)).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(inputs[batch]), labels[batch]).backward()
                optimizer.step()
    return network.eval().requires_grad_(False)


def available():
    """Whether the ResNet-20 and images of CIFAR-10 are on this machine."""
    return WEIGHTS.exists() and IMAGES.exists()


def resnet(**first):
    """The network, with layers by name in front of it."""
    network = runpy.run_path(str(ROOT / "examples" / "networks.py"))["resnet20"]()
    network.load_state_dict(load_file(WEIGHTS))
    layers = OrderedDict(**first, network=network)
    return nn.Sequential(layers).eval().requires_grad_(False)


@lru_cache
def cifar(count=12):
    """Images of the test split that the network gets right, with their labels."""
    held = np.load(IMAGES)
    jpeg, offsets, labels = held["jpeg"], held["offsets"], torch.from_numpy(held["labels"][:60]).long()
    files = (io.BytesIO(jpeg[offsets[row] : offsets[row + 1]].tobytes()) for row in range(60))
    inputs = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255 for file in files])
    right = resnet()(inputs).argmax(1) == labels
    return inputs[right][:count], labels[right][:count]
