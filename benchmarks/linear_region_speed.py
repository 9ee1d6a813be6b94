"""CPU time of the linear-region attack for an image, a region and a solver iteration, over bare passes; its memory.

    python benchmarks/linear_region_speed.py wong_kolter_mnist=FILE --mnist FOLDER [--images 20 --norm l2]
    python benchmarks/linear_region_speed.py resnet20=FILE --cifar10 FOLDER [--images 20 --batch 16]
    python benchmarks/linear_region_speed.py cifar10_plain=FILE --cifar10 FOLDER --images 4
        --against "robust_ext:LinearRegion.paper(pool='cifar10', root='FOLDER', points=3, regions=400, gamma=9)"
        --against "art:ProjectedGradientDescent(eps_step=0.1, max_iter=40, num_random_init=10)" --against foolbox:...

One thread. An iteration of a region needs one forward and one backward pass of one row; those of the bare network are
timed in the same run, in batches as large as the solver's are on average. What the solver is given counts as a row
until it is solved. Peak memory is what the attack adds to the resident size of the process, as a multiple of what the
network's operations return for the regions that are in flight at once (``--batch``). ``--against`` measures nothing of
this, but the seconds an image of each attack named, run once (section 5.4 of Croce, Rauber and Hein 2019).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from linear_region import measured, searched, toy
from linear_region_networks import load, parser
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from robust_ext.attacks.linear_region import search
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.solver import Solution
from robust_ext.core.threat import NORMS

T = TypeVar("T")


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, networks=1)
    options.add_argument("--norm", default="l2", choices=NORMS)
    options.add_argument("--batch", type=int, default=16, help="most regions solved at once")
    options.add_argument("--against", action="append", metavar="ATTACK", help="time these attacks; repeatable")
    given = options.parse_args()
    torch.set_num_threads(1)
    sample = load(given.networks[0], given)
    for text in given.against or ():
        found = measured(sample, given.norm, 0, lambda _, text=text: text, seconds=0)
        norms = [one for one in found["distances"] if one is not None]
        least = f"mean norm {sum(norms) / max(1, len(norms)):.4f} of {len(norms)} found"
        print(f"{text}: {found['seconds'] / len(sample.inputs):.3f} CPU s an image; {least}", flush=True)
    if given.against:
        return
    network, inputs, attack = sample.network, sample.inputs, LinearRegion(batch=given.batch)
    searched(attack, toy(), given.norm)
    solutions: list[Solution] = []
    solving, rounds = Timed(search.solve), Timed(search.RegionSearch.round)

    def solve(*arguments: Any, **keywords: Any) -> Solution:
        found: Solution = solving(*arguments, **keywords)
        solutions.append(found)
        return found

    # The attack's own functions, so that nothing is timed that it does not do.
    search.solve = solve
    search.RegionSearch.round = lambda *given, **ways: rounds(*given, **ways)  # type: ignore[method-assign]
    (found, whole), added = peak(lambda: searched(attack, sample, given.norm))
    regions = int(found.regions.sum())
    iterations = torch.cat([one.iterations for one in solutions])
    steps = sum(int(one.iterations.max()) for one in solutions)
    rows = max(1, round(int(iterations.sum()) / steps))
    bare = passes(network, inputs.repeat(-(-rows // len(inputs)), 1, 1, 1)[:rows])
    step = solving.seconds / int(iterations.sum())
    print(
        f"{given.norm}: mean norm {float(found.distances.mean()):.4f}, {whole / len(inputs):.2f} CPU s an image; "
        f"{1e3 * rounds.seconds / regions:.2f} ms a region of {float(iterations.double().mean()):.1f} iterations"
    )
    print(
        f"an iteration: {1e3 * step:.3f} ms a row, a bare forward and backward pass {1e3 * bare:.3f} ms in batches of "
        f"{rows}, ratio {step / bare:.2f}"
    )
    activations = activation_bytes(network, inputs[:1])
    print(
        f"memory: {added / 2**20:.0f} MiB more, {added / given.batch / activations:.1f} times what operations return "
        f"for {given.batch} images ({activations / 2**20:.2f} MiB an image)"
    )


class Timed:
    """A function, and the CPU seconds that its calls took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it."""
        begin = time.process_time()
        try:
            return self.function(*arguments, **keywords)
        finally:
            self.seconds += time.process_time() - begin


def passes(network: nn.Module, x: Tensor) -> float:
    """CPU seconds of a forward and a backward pass for one row."""
    begin, times = 0.0, 30
    for number in range(times + 5):
        if number == 5:
            begin = time.process_time()
        leaf = x.clone().requires_grad_(True)
        torch.autograd.grad(network(leaf).sum(), leaf)
    return (time.process_time() - begin) / times / len(x)


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


def peak(work: Callable[[], T]) -> tuple[T, int]:
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
