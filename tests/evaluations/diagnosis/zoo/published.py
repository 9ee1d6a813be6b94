"""A published network and images of CIFAR-10, which are no part of the project."""

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

ROOT = Path(__file__).parents[4]
WEIGHTS = ROOT.parent / "shared" / "models" / "cifar10_resnet20.safetensors"
IMAGES = ROOT.parent / "shared" / "data" / "cifar10" / "test_jpeg.npz"


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
