"""Time of the whole binarization test, divided by that of the passes it must make.

    python benchmarks/binarization_floor.py [--weights FILE --data-root FOLDER]

The floor is the number of rows that the test counted, times the time of a bare pass of the plain network at its best
batch size, measured before and after the test in the same process.
"""

from __future__ import annotations

from common import THREAT, forward_seconds, gradient_seconds, load, parser, pgd, seconds

import robust_ext


def main() -> None:
    """Print one ratio an attack."""
    options = parser(__doc__)
    options.add_argument("--attack", action="append", help="attack strings instead of the four of this benchmark")
    arguments = options.parse_args()
    network, inputs = load(arguments)
    attacks = arguments.attack or [
        pgd(20),
        pgd(200),
        "foolbox:LinfPGD(steps=20, rel_stepsize=0.125)",
        "foolbox:LinfPGD(steps=200, rel_stepsize=0.125)",
    ]
    for attack in attacks:
        rates = [(forward_seconds(network, inputs), gradient_seconds(network, inputs))]
        results = []
        took = seconds(
            lambda attack=attack, results=results: results.append(
                robust_ext.binarization_test(network, attack, inputs, THREAT)
            )
        )
        rates.append((forward_seconds(network, inputs), gradient_seconds(network, inputs)))
        forward, gradient = (sum(column) / 2 for column in zip(*rates, strict=True))
        (entry,) = results[0].content["attacks"]
        passes, phases = entry["passes"], entry["seconds"]
        floor = (passes["forward"] - passes["backward"]) * forward + passes["backward"] * gradient
        shares = ", ".join(f"{name} {value / took:.0%}" for name, value in phases.items() if name != "total")
        print(f"{entry['name']:<48} whole test / floor = {took / floor:.3f}   ({took:.1f} s; {shares})", flush=True)


if __name__ == "__main__":
    main()
