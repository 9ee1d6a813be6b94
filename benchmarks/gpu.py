"""Planting on a GPU: samples a second, the share of time in which it computes, and memory, beside a loop by hand.

    python benchmarks/gpu.py [--device cuda] [--network resnet20] [--samples 64]

Planting is what the binarization test does for each sample before anything is attacked: points are drawn and measured,
one is chosen, and a readout is fitted. The loop by hand sends as many points, drawn by ``torch.rand``, through the same
features in the same batches, and does nothing else. The share of time is that of all kernels, by torch.profiler, in
the time of a run without it. Weights are random: ResNet-20 at 32 x 32, and torchvision's ResNet-18 at 224 x 224. Where
there is no GPU a few points show that the code runs, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import THREAT
from networks import resnet20
from torch import Tensor, nn
from torch.autograd import DeviceType

from robust_ext.core.target import Counted, PassCounter
from robust_ext.evaluations.binarization.forward import Forward, choose_forward
from robust_ext.evaluations.binarization.posing import fit_problems
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import split

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.libraries import library

SIZES = {"resnet20": 32, "resnet18": 224}


def make_network(name: str) -> nn.Module:
    """A network with random weights, in eval mode."""
    torch.manual_seed(0)
    made: nn.Module = resnet20() if name == "resnet20" else library("torchvision").models.resnet18(weights=None)
    return made.eval()


def by_hand(forward: Forward, inputs: Tensor, points: int) -> None:
    """Points drawn without care, through the features."""
    total = len(inputs) * points
    for start in range(0, total, forward.rows):
        own = inputs[torch.arange(start, min(start + forward.rows, total), device=inputs.device) // points]
        moved = own + THREAT.epsilon * (2 * torch.rand_like(own) - 1)
        with torch.no_grad():
            forward.batch(moved.clamp_(0, 1))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of a call, until the device is done."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def kernel_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of all kernels that a call starts, which follow one another."""
    kind = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[kind]) as profile:
        call()
        torch.cuda.synchronize(device)
    kernels = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    return sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e6


def show(name: str, device: torch.device, samples: int, settings: BinarizationSettings) -> None:
    """Print what planting in one network takes."""
    network = make_network(name).to(device)
    inputs = torch.rand(samples, 3, SIZES[name], SIZES[name], device=device)
    parts = split(network, inputs[:2])
    features = Counted(parts.features, PassCounter())
    forward = choose_forward(features, inputs[:2], rows=settings.forward_batch, fold=settings.fold)
    group = min(samples, settings.group_size)

    def planted() -> None:
        for start in range(0, samples, group):
            ids = range(start, min(start + group, samples))
            fit_problems(forward, parts.readout, inputs[start : start + group], ids, settings)

    # Once before: libraries choose their algorithms.
    planted()
    points = 1 + settings.inner_points + settings.boundary_points * settings.planted_candidates
    by_hand(forward, inputs[:1], points)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    took = {"planting": seconds(planted, device)}
    memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    took["by hand"] = seconds(lambda: by_hand(forward, inputs, points), device)
    print(
        f"{name}, {samples} samples of {points} points, {forward.rows} rows a batch: "
        + ", ".join(f"{part} {samples / one:.3g} samples/s" for part, one in took.items())
        + f"; planting takes {took['planting'] / took['by hand']:.2f} of the loop by hand",
        flush=True,
    )
    if memory is not None:
        share = kernel_seconds(planted, device) / took["planting"]
        print(f"    the GPU computes {share:.0%} of the time in planting; {memory:.0f} MiB at most", flush=True)


def main() -> None:
    """Print one line a network, two on a GPU."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--network", action="append", choices=list(SIZES))
    options.add_argument("--samples", type=int)
    options.add_argument("--inner-points", type=int)
    arguments = options.parse_args()
    device = torch.device(arguments.device)
    tiny = device.type == "cpu"
    if tiny:
        print("no GPU: tiny sizes, to see that the code runs", flush=True)
    inner = arguments.inner_points or (15 if tiny else 149)
    settings = BinarizationSettings(threat_model=THREAT, inner_points=inner, planted_candidates=4 if tiny else 32)
    for name in arguments.network or list(SIZES):
        show(name, device, arguments.samples or (4 if tiny else 64), settings)


if __name__ == "__main__":
    main()
