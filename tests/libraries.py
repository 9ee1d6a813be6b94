"""Libraries of models in tests; nothing else in the tests imports torchvision, timm or transformers.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its import ends with "operator torchvision::nms does
not exist", and timm's with it. Its networks need no such operators, so their names are declared first.
"""

import importlib
import sys
from functools import cache

import pytest
import torch

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def library(name):
    """The module ``name`` (torchvision, timm, transformers), or a skipped test where its package is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if importlib.util.find_spec("torchvision") is not None:
        _torchvision()
    return importlib.import_module(name)


@cache
def _torchvision():
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    declared = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        declared.define(operator + _BOXES)
    importlib.import_module("torchvision")
    # The declarations last as long as the object.
    return declared
