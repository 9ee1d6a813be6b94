"""Published networks and images of CIFAR-10 and MNIST, none of which is part of the project."""

import gzip
import io
import runpy
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

ROOT = Path(__file__).parents[4]
WEIGHTS = ROOT.parent / "shared" / "models" / "cifar10_resnet20.safetensors"
IMAGES = ROOT.parent / "shared" / "data" / "cifar10" / "test_jpeg.npz"


DIGITS = ROOT.parent / "shared" / "models" / "mnist_wong_kolter_linf_0.1.safetensors"
FILES = ROOT.parent / "shared" / "data" / "mnist"


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


def mnist(count=64):
    """The network of Wong and Kolter with images of the test split and their labels; skips a test without them."""
    if not (DIGITS.exists() and FILES.exists()):
        pytest.skip("needs the published network and MNIST")
    network = runpy.run_path(str(ROOT / "examples" / "networks.py"))["wong_kolter_mnist"]()
    network.load_state_dict(load_file(DIGITS))
    images, labels = (
        torch.frombuffer(bytearray(gzip.decompress((FILES / name).read_bytes())[offset:]), dtype=torch.uint8)
        for name, offset in (("t10k-images-idx3-ubyte.gz", 16), ("t10k-labels-idx1-ubyte.gz", 8))
    )
    return network.eval(), images.view(-1, 1, 28, 28)[:count] / 255, labels[:count].long()
