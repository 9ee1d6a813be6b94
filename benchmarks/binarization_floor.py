"""CPU time of the whole binarization test, divided by that of the passes it must make.

    python benchmarks/binarization_floor.py [--weights FILE --data-root FOLDER] [--price]

A floor replays the number of rows that the test sent through the network, in batches of the fastest size, weights
frozen, with nothing in between. There are three. "plain": all of them go through the network itself. "folded": points
that are planted and drawn go through the copy with batch normalisation folded into convolutions, as in the test, and
what attacks and the judge send goes through the network itself. "all folded": so do attacks and the judge, which the
test leaves at the network that it was given. Test and floors alternate in one process; the ratio is that of their total
times. ``--price`` divides the test's time by that of the bare attack on the same samples instead, at the defaults and
with random search in all problems, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import THREAT, best_sizes, load, parser, pgd, replay
from torch import Tensor, nn

import robust_ext
from robust_ext.core.target import Counted, PassCounter
from robust_ext.evaluations.binarization.forward import Forward, folded_twin


@contextmanager
def measured_rows() -> Iterator[PassCounter]:
    """The rows of points that are measured inside the block, whichever way they go."""
    counter, call = PassCounter(), Forward.__call__

    def counting(forward: Forward, points: Tensor) -> Tensor:
        counter.count_forward(len(points))
        return call(forward, points)

    Forward.__call__ = counting  # type: ignore[method-assign]
    try:
        yield counter
    finally:
        Forward.__call__ = call  # type: ignore[method-assign]


def price(network: nn.Module, inputs: Tensor, *, rounds: int) -> None:
    """Print CPU seconds of PGD-20 and of a verdict on it, in turn, and the least of each."""
    attack, took = pgd(20), dict[str, list[float]]()
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    settings: dict[str, dict[str, Any]] = {"all searched": {"random_stops": False}, "default": {}}
    for _ in range(rounds):
        start = time.process_time()
        attack(network, inputs, labels, epsilon=THREAT.epsilon)
        took.setdefault("bare", []).append(time.process_time() - start)
        for name, given in settings.items():
            start = time.process_time()
            result = robust_ext.binarization_test(network, attack, inputs, THREAT, **given)
            took.setdefault(name, []).append(time.process_time() - start)
            (entry,) = result.content["attacks"]
            shares = ", ".join(f"{k} {v / entry['seconds']['total']:.0%}" for k, v in entry["seconds"].items())
            print(
                f"{name}: {took[name][-1]:.2f} CPU s, {took[name][-1] / took['bare'][-1]:.2f} of the bare attack; "
                f"{entry['verdict']}, score {entry['score']:.2f}, R-ASR {entry['random_score']:.2f} of "
                f"{entry['random_samples']}; {entry['passes']}; {shares}",
                flush=True,
            )
    least = {name: min(seconds) for name, seconds in took.items()}
    ratios = ", ".join(f"{name} {least[name]:.2f} ({least[name] / least['bare']:.2f})" for name in settings)
    print(f"least of {rounds}: bare {least['bare']:.2f} CPU s; {ratios}")


def main() -> None:
    """Print three ratios an attack."""
    options = parser(__doc__)
    options.add_argument("--attack", action="append", help="attack strings instead of the four of this benchmark")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--price", action="store_true", help="PGD-20 beside the bare attack")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    network, inputs = load(arguments)
    if arguments.price:
        price(network, inputs, rounds=arguments.rounds)
        return
    attacks = arguments.attack or [
        pgd(20),
        pgd(200),
        "foolbox:LinfPGD(steps=20, rel_stepsize=0.125)",
        "foolbox:LinfPGD(steps=200, rel_stepsize=0.125)",
    ]
    twin = folded_twin(Counted(network, PassCounter()), inputs[:2])
    assert twin is not None
    plain, folded = network, twin.module
    # Its inputs are laid out as in the test.
    images = inputs.contiguous(memory_format=torch.channels_last)
    sizes, folded_sizes = best_sizes(plain, inputs), best_sizes(folded, images)
    for attack in attacks:
        took, floors = 0.0, {"plain": 0.0, "folded": 0.0, "all folded": 0.0}
        for _ in range(arguments.rounds):
            with measured_rows() as points:
                start = time.process_time()
                result = robust_ext.binarization_test(network, attack, inputs, THREAT)
                took += time.process_time() - start
            (entry,) = result.content["attacks"]
            gradients = entry["passes"]["backward"]
            others = entry["passes"]["forward"] - gradients - points.forward
            through = {
                "points": replay(plain, inputs, forwards=points.forward, gradients=0, sizes=sizes),
                "points, folded": replay(folded, images, forwards=points.forward, gradients=0, sizes=folded_sizes),
                "others": replay(plain, inputs, forwards=others, gradients=gradients, sizes=sizes),
                "others, folded": replay(folded, images, forwards=others, gradients=gradients, sizes=folded_sizes),
            }
            floors["plain"] += through["points"] + through["others"]
            floors["folded"] += through["points, folded"] + through["others"]
            floors["all folded"] += through["points, folded"] + through["others, folded"]
        shares = ", ".join(
            f"{k} {v / entry['seconds']['total']:.0%}" for k, v in entry["seconds"].items() if k != "total"
        )
        ratios = ", ".join(f"{took / floor:.3f} ({name})" for name, floor in floors.items())
        print(f"{entry['name']:<48} whole test / floor = {ratios}   ({shares})", flush=True)


if __name__ == "__main__":
    main()
