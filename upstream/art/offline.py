"""Pytest plugin: ART's tests for PyTorch, without TensorFlow, Keras or a network.

ART's conftest.py imports TensorFlow for the default of an option, and tests/attacks/utils.py imports Keras, which no
test for PyTorch uses: empty modules stand in for them. Tests that read MNIST or CIFAR-10, which ART downloads, are
deselected, and so are unittest classes, whose base class reads MNIST.
"""

import sys
import unittest
from importlib.machinery import ModuleSpec
from types import ModuleType

DOWNLOADED = {"load_mnist_dataset", "load_cifar10_dataset"}

for name in ("tensorflow", "keras", "keras.backend"):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules[name] = module
sys.modules["tensorflow"].__version__ = "2.0"
sys.modules["keras"].backend = sys.modules["keras.backend"]


def pytest_collection_modifyitems(config, items):
    """Deselect tests that read what ART downloads."""
    left_out = [
        item
        for item in items
        if DOWNLOADED & set(item.fixturenames) or (item.cls is not None and issubclass(item.cls, unittest.TestCase))
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
