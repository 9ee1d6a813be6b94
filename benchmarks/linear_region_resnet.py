"""The linear-region attack on a residual network with batch normalisation, beside DDN and FMN, and its peak memory.

    python benchmarks/linear_region_resnet.py --weights FILE --data-root FOLDER [--samples 20 --others]

ResNet-20 on CIFAR-10. Peak memory is what the attack adds to the resident size of the process, as a multiple of the
network's own activations for the regions that are in flight at once (``--batch``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import load, parser
from linear_region import attacked
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext import robust_accuracy
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.core.threat import ThreatModel

OTHERS = {"DDN, 1,000 steps": "foolbox:DDNAttack(steps=1000)", "FMN, 1,000 steps": "foolbox:L2FMNAttack(steps=1000)"}
EPSILONS = (0.05, 0.1, 0.2)


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--regions", type=int, default=LinearRegion.regions)
    options.add_argument("--hops", type=int, default=LinearRegion.basin_hops)
    options.add_argument("--others", action="store_true", help="run DDN and FMN too")
    options.set_defaults(samples=20)
    given = options.parse_args()
    torch.set_num_threads(1)
    network, inputs = load(given)
    network.eval()
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    chosen = LinearRegion(batch=given.batch, regions=given.regions, basin_hops=given.hops)
    threat_model = ThreatModel(norm="l2", epsilon=1.0)
    attacked(network, inputs[:1], labels[:1], threat_model, 0, LinearRegion(starts=1, basin_hops=1, regions=1))
    activations = activation_bytes(network, inputs[:1])

    def attack() -> tuple[Tensor, Tensor, float]:
        found, seconds, _ = attacked(network, inputs, labels, threat_model, 0, chosen)
        with torch.no_grad():
            wrong = network(found.candidates).argmax(1) != labels
        return found.distances, wrong, seconds

    (distance, wrong, seconds), added = peak(attack)
    accuracies = ", ".join(f"{float((distance > eps).double().mean()):.2f} at {eps}" for eps in EPSILONS)
    print(
        f"LinearRegion: mean {float(distance.mean()):.4f}, median {float(distance.median()):.4f}, robust accuracy "
        f"{accuracies}, {int(wrong.sum())} of {len(wrong)} verified, {seconds / len(wrong):.2f} CPU s an image"
    )
    print(
        f"memory: {added / 2**20:.0f} MiB more, {added / given.batch / activations:.1f} times the activations "
        f"({activations / 2**20:.2f} MiB an image) of {given.batch} regions in flight"
    )
    if not given.others:
        return
    budget = ThreatModel(norm="l2", epsilon=EPSILONS[0])
    result = robust_accuracy(network, OTHERS, inputs, labels, budget, epsilons=EPSILONS)
    for one in result.content["attacks"]:
        known = torch.tensor([d for d in one["distances"] if d is not None])
        print(
            f"{one['name']}: mean {float(known.mean()):.4f}, median {float(known.median()):.4f} of {len(known)} found"
        )
    print(result)


class Outputs(TorchFunctionMode):
    """Counts the bytes that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out a call."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.bytes += out.numel() * out.element_size()
        return out


def activation_bytes(network: nn.Module, x: Tensor) -> int:
    """Bytes of what the network's operations return for one input."""
    with torch.no_grad(), Outputs() as outputs:
        network(x)
    return outputs.bytes


def peak(work: Callable[[], tuple[Tensor, Tensor, float]]) -> tuple[tuple[Tensor, Tensor, float], int]:
    """What it returns, and by how much the resident size grew at most, sampled every 10 ms."""
    before, most, done = resident(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, resident())
            time.sleep(0.01)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        return work(), max(0, most - before)
    finally:
        done.set()
        watcher.join()


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    with Path("/proc/self/status").open() as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
