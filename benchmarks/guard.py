"""The guard around an attack in this process, and the look at a model before any work, against PGD.

    python benchmarks/guard.py [--weights FILE --data-root FOLDER] [--samples 16]

Prints processor time, the least of some rounds: of a guarded block in which nothing is done, of the check that logits
of a row follow from that row alone, and both divided by PGD with 20 steps on one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common import THREAT, load, parser, pgd

from robust_ext.core.classifier import check_consistency
from robust_ext.core.guard import guarded


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Least processor time of some rounds, in milliseconds."""
    taken = []
    for _ in range(rounds):
        begun = time.process_time()
        call()
        taken.append(1000 * (time.process_time() - begun))
    return min(taken)


def main() -> None:
    """Print the three times and two ratios."""
    options = parser(__doc__)
    options.set_defaults(samples=16)
    network, inputs = load(options.parse_args())
    network.eval()
    with torch.no_grad():
        labels = network(inputs).argmax(1)

    def nothing() -> None:
        with guarded(network):
            pass

    attack = fastest(lambda: pgd(20)(network, inputs, labels, epsilon=THREAT.epsilon), 3)
    print(f"{'PGD, 20 steps':<20} {attack:8.1f} ms")
    for name, call in (
        ("guard", nothing),
        ("check of the model", lambda: check_consistency(network, inputs, bounds=(0, 1))),
    ):
        taken = fastest(call, 20)
        print(f"{name:<20} {taken:8.1f} ms  {taken / attack:.2%}")


if __name__ == "__main__":
    main()
