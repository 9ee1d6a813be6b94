"""CPU time of the linear-region attack for an image, a region and a solver iteration, over that of the bare passes.

    python benchmarks/linear_region_speed.py --weights FILE --data-root FOLDER [--samples 20 --norm l2]

On the network of Wong and Kolter for MNIST, with one thread. An iteration of a region needs one forward and one
backward pass of one row; those of the bare network are timed in the same run, in batches as large as the solver's are
on average. What the solver is given counts as a row until it is solved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from linear_region import attacked, images, wong_kolter_mnist
from safetensors.torch import load_file
from torch import Tensor, nn

from robust_ext.attacks.linear_region import search
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.solver.solve import Solution
from robust_ext.core.threat import NORMS, ThreatModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="state dict (.safetensors)")
    parser.add_argument("--data-root", required=True, help="folder with MNIST")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--norm", default="l2", choices=NORMS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    network = wong_kolter_mnist()
    network.load_state_dict(load_file(given.weights))
    network.eval()
    inputs, labels = images(network, given.data_root, skip=0, count=given.samples)
    solutions: list[Solution] = []
    solving, rounds = Timed(search.solve), Timed(search.RegionSearch.round)

    def solve(*arguments: Any, **keywords: Any) -> Solution:
        found: Solution = solving(*arguments, **keywords)
        solutions.append(found)
        return found

    # The attack's own functions, so that nothing is timed that it does not do.
    search.solve = solve
    search.RegionSearch.round = lambda *given, **ways: rounds(*given, **ways)  # type: ignore[method-assign]
    threat_model = ThreatModel(norm=given.norm, epsilon=1.0)
    found, whole, _ = attacked(network, inputs, labels, threat_model, 0, LinearRegion())
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


if __name__ == "__main__":
    main()
