"""Time of the whole binarization test, divided by that of the passes it must make.

    python benchmarks/binarization_floor.py [--weights FILE --data-root FOLDER]

The floor replays the number of rows that the test counted through the plain network at its best batch sizes, weights
frozen, with nothing in between. Test and floor alternate in one process; the ratio is that of their total times.
"""

from __future__ import annotations

from common import THREAT, best_sizes, load, parser, pgd, replay, seconds

import robust_ext


def main() -> None:
    """Print one ratio an attack."""
    options = parser(__doc__)
    options.add_argument("--attack", action="append", help="attack strings instead of the four of this benchmark")
    options.add_argument("--rounds", type=int, default=2)
    arguments = options.parse_args()
    network, inputs = load(arguments)
    attacks = arguments.attack or [
        pgd(20),
        pgd(200),
        "foolbox:LinfPGD(steps=20, rel_stepsize=0.125)",
        "foolbox:LinfPGD(steps=200, rel_stepsize=0.125)",
    ]
    sizes = best_sizes(network, inputs)
    for attack in attacks:
        took = floor = 0.0
        for _ in range(arguments.rounds):
            results = []
            took += seconds(
                lambda attack=attack, results=results: results.append(
                    robust_ext.binarization_test(network, attack, inputs, THREAT)
                )
            )
            (entry,) = results[0].content["attacks"]
            gradients = entry["passes"]["backward"]
            forwards = entry["passes"]["forward"] - gradients
            floor += replay(network, inputs, forwards=forwards, gradients=gradients, sizes=sizes)
        shares = ", ".join(
            f"{k} {v / entry['seconds']['total']:.0%}" for k, v in entry["seconds"].items() if k != "total"
        )
        print(f"{entry['name']:<48} whole test / floor = {took / floor:.3f}   ({shares})", flush=True)


if __name__ == "__main__":
    main()
