"""A binarization test at 224 x 224 to its verdict: rows forward and backward, memory, CPU time, beside the bare passes.

    python benchmarks/large_inputs.py --network resnet18
    python benchmarks/large_inputs.py --network vit_tiny_patch16_224

Random weights, torchvision's ResNet-18 and timm's ViT-tiny; inputs are crops of the two photographs that ship with
scikit-learn. Settings are the defaults but for ``proven_rate``: 16 samples cannot show a rate above 0.9, so that
with the default one that all find would be "inconclusive". The floor is what the counted rows take as bare passes of
the network, weights frozen, at the rate of a few batches of the fastest size.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from pathlib import Path

import torch
from common import replay
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import robust_ext
from robust_ext import ThreatModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.libraries import library

SIZE = 224
SIZES = (2, 4, 8, 16, 32)


def make_network(name: str) -> nn.Module:
    """A network with random weights, in eval mode."""
    torch.manual_seed(0)
    if name == "resnet18":
        made: nn.Module = library("torchvision").models.resnet18(weights=None)
    else:
        made = library("timm").create_model(name)
    return made.eval()


def crops(count: int) -> Tensor:
    """Parts of photographs, ``(count, 3, 224, 224)`` in [0, 1]."""
    photographs = [torch.tensor(image).permute(2, 0, 1) / 255 for image in load_sample_images().images]
    drawn = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        image = photographs[number % len(photographs)]
        top, left = (int(torch.randint(size - SIZE + 1, (1,), generator=drawn)) for size in image.shape[1:])
        found.append(image[:, top : top + SIZE, left : left + SIZE])
    return torch.stack(found)


def row_seconds(network: nn.Module, inputs: Tensor) -> tuple[float, float]:
    """CPU seconds of a row forward, and of one forward and backward, in batches of the fastest size."""
    only, both = [], []
    for size in SIZES:
        rows = max(size, 16)
        start = time.process_time()
        replay(network, inputs, forwards=rows, gradients=0, sizes=(size, size))
        middle = time.process_time()
        replay(network, inputs, forwards=0, gradients=rows, sizes=(size, size))
        only.append((middle - start) / rows)
        both.append((time.process_time() - middle) / rows)
    return min(only), min(both)


def peak() -> float:
    """Most memory of the process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the verdict and what it took."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--network", default="resnet18", help="resnet18 (torchvision), or a name of timm's")
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--attack", default="robust_ext:APGD")
    options.add_argument("--epsilon", type=float, default=4 / 255)
    arguments = options.parse_args()
    logging.basicConfig(level=logging.INFO)
    network, inputs = make_network(arguments.network), crops(arguments.samples)
    before, start = peak(), time.process_time()
    began = time.perf_counter()
    threat_model = ThreatModel(norm="linf", epsilon=arguments.epsilon)
    result = robust_ext.binarization_test(network, arguments.attack, inputs, threat_model, proven_rate=0.0)
    took, wall, after = time.process_time() - start, time.perf_counter() - began, peak()
    print(result, flush=True)
    (entry,) = result.content["attacks"]
    forward, backward = (entry["passes"][kind] / len(inputs) for kind in ("forward", "backward"))
    only, both = row_seconds(network, inputs)
    floor = len(inputs) * ((forward - backward) * only + backward * both)
    print(
        f"{arguments.network}, {len(inputs)} samples: {result.verdict}; rows a sample: {forward:.0f} forward, "
        f"{backward:.0f} backward; {took:.0f} CPU s, {wall / 60:.1f} min; floor {floor:.0f} CPU s, ratio "
        f"{took / floor:.2f}; memory {before:.0f} MiB before, {after:.0f} MiB at most"
    )


if __name__ == "__main__":
    main()
