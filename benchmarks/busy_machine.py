"""CPU time of evaluations next to busy processes, over that on a quiet machine.

    python benchmarks/busy_machine.py [--busy 2] [--samples 16]

A ResNet-20 at random weights on noise, or with ``--weights`` and ``--data-root`` its own. The threads of each operation
wait for the last one, so what a busy core costs depends on how many threads are used.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from common import THREAT, load, parser

from robust_ext import binarization_test, diagnose

ATTACK = "foolbox:LinfPGD(steps=20)"


def cpu(function: Callable[[], object], *, busy: int) -> float:
    """CPU seconds of a call next to so many busy processes."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        begun = time.process_time()
        function()
        return time.process_time() - begun
    finally:
        for loop in loops:
            loop.kill()


def main() -> None:
    """Print a line an evaluation."""
    options = parser(__doc__)
    options.set_defaults(samples=16)
    options.add_argument("--busy", type=int, default=2, help="busy processes")
    arguments = options.parse_args()
    network, x = load(arguments)
    network.eval()
    y = network(x).argmax(1)
    calls: dict[str, Callable[[], object]] = {
        "binarization test": lambda: binarization_test(network, ATTACK, x, THREAT, inner_points=199),
        "diagnosis": lambda: diagnose(network, ATTACK, x, y, THREAT),
    }
    for name, call in calls.items():
        quiet, loaded = (cpu(call, busy=busy) for busy in (0, arguments.busy))
        print(f"{name}: {loaded / quiet:.2f} x the CPU time of the quiet machine ({quiet:.1f} s)")


if __name__ == "__main__":
    main()
