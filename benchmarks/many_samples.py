"""Where the time of a run of many samples goes, how its memory grows, and how large its files become.

    python benchmarks/many_samples.py [--samples 20000] [--evaluation binarization]

Robust accuracy is that of the network of the MEAD paper at random weights, on noise of 28 x 28 pixels. The binarization
test is that of the network of the demo, on noise of 8 x 8 pixels, with 299 inner points and 120 of the random attack,
and without the sequential rule. The attack is PGD by hand, of 10 steps. Printed are the shares of the whole time of a
call with a run folder: of the attack (with its passes), of the passes of the judge (verification, and the features of
what is planted and drawn), of planting (drawing points, fitting readouts and the steps of witnesses, which is the
method itself), and of the rest, with what a resumed call takes when everything is there. Memory is that of the process
after a tenth of the blocks, and at the end.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import pgd
from networks import mead_mnist
from torch import Tensor, nn

from robust_ext import binarization_test, robust_accuracy
from robust_ext.core.target import PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.demo.network import digits_network

THREAT = ThreatModel(norm="linf", epsilon=0.1)


@dataclass
class Stopwatch(PassCounter):
    """Seconds by name; what is inside another span counts for that one only.

    As a counter it is no part of what identifies a run.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    running: bool = False
    memory: list[int] = field(default_factory=list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the block, unless it lies inside another."""
        if self.running:
            yield
            return
        self.running, begun = True, time.perf_counter()
        try:
            yield
        finally:
            self.running = False
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun


class Timed(nn.Module):
    """A network whose calls are counted."""

    def __init__(self, network: nn.Module, watch: Stopwatch) -> None:
        super().__init__()
        self.network, self.watch = network, watch
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits or features."""
        with self.watch.span("passes"):
            found: Tensor = self.network(x)
            return found


def resident() -> int:
    """Bytes of memory this process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def samples(count: int, side: int) -> tuple[Tensor, Tensor]:
    """Noise, and labels at random: what is judged here is time."""
    draw = torch.Generator().manual_seed(0)
    return torch.rand(count, 1, side, side, generator=draw), torch.randint(10, (count,), generator=draw)


def evaluate(
    evaluation: str, inputs: Tensor, labels: Tensor, folder: Path, watch: Stopwatch
) -> tuple[dict[str, Any], float]:
    """What the result of one call of an evaluation holds, and the seconds of the call."""
    torch.manual_seed(0)
    by_hand = pgd(10)

    def attack(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float) -> Tensor:
        watch.memory.append(resident())
        with watch.span("attack"):
            return by_hand(model, x, y, epsilon=epsilon)

    network: nn.Sequential = mead_mnist() if evaluation == "robust_accuracy" else digits_network()
    begun = time.perf_counter()
    if evaluation == "robust_accuracy":
        made = robust_accuracy(Timed(network, watch), attack, inputs, labels, THREAT, out=folder)
    else:
        parts, sizes = (Timed(network[:-1], watch), network[-1]), {"inner_points": 299, "random_inner": 60}
        settings = {**sizes, "random_corners": 60, "sequential": False, "fold": False}
        made = binarization_test(parts, attack, inputs, THREAT, out=folder, **settings)
    return made.to_dict(), time.perf_counter() - begun


def show(evaluation: str, count: int) -> None:
    """Print the shares of one evaluation."""
    with tempfile.TemporaryDirectory() as name:
        folder, watch = Path(name) / "run", Stopwatch()
        drawn = samples(count, 28 if evaluation == "robust_accuracy" else 8)
        content, total = evaluate(evaluation, *drawn, folder, watch)
        planting = 0.0
        if evaluation == "binarization":
            taken = content["attacks"][0]["seconds"]
            judge = taken["total"] - taken["attack"]
            planting = max(judge - watch.seconds["passes"], 0.0)
        shares = {**watch.seconds, "planting": planting}
        shares["rest"] = total - sum(shares.values())
        again = evaluate(evaluation, *drawn, folder, Stopwatch())[1]
        memory, sizes = watch.memory, {one: (folder / one).stat().st_size for one in ("report.html", "result.json")}
    sys.stdout.write(
        f"{evaluation}, {count} samples, {total:.0f} s: "
        + ", ".join(f"{part} {share / total:.2%}" for part, share in shares.items())
        + f"; again {again / total:.2%}; memory {memory[len(memory) // 10] / 2**20:.0f} MiB after a tenth, "
        f"{memory[-1] / 2**20:.0f} MiB at the end; "
        + ", ".join(f"{one} {size / 2**10:.0f} KiB" for one, size in sizes.items())
        + "\n"
    )


def main() -> None:
    """Print the shares of both evaluations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--evaluation", choices=("robust_accuracy", "binarization"), action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Libraries of plots and intervals, whose import is no part of a run.
    import matplotlib.figure  # noqa: F401
    import scipy.special  # noqa: F401

    for evaluation in arguments.evaluation or ("robust_accuracy", "binarization"):
        show(evaluation, arguments.samples)


if __name__ == "__main__":
    main()
