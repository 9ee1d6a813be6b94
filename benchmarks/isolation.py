"""Time of a whole binarization test with the attack in a process of its own, divided by that in one process.

    python benchmarks/isolation.py [--weights FILE --data-root FOLDER] [--samples 64]

Both alternate. Every isolated run starts the process that attacks are forked from anew, so its start and imports count.
"""

from __future__ import annotations

from multiprocessing import forkserver

from common import THREAT, load, parser, pgd, seconds

import robust_ext


def main() -> None:
    """Print one ratio an attack."""
    options = parser(__doc__)
    options.set_defaults(samples=64)
    options.add_argument("--attack", action="append", help="attack strings instead of the two of this benchmark")
    options.add_argument("--rounds", type=int, default=2)
    arguments = options.parse_args()
    network, inputs = load(arguments)
    for attack in arguments.attack or [pgd(20), "foolbox:LinfPGD(steps=20, rel_stepsize=0.125)"]:
        took = {False: 0.0, True: 0.0}
        results: list[robust_ext.BinarizationResult] = []
        for number in range(2 * arguments.rounds):
            isolate = number % 2 == 1

            def run(attack=attack, isolate=isolate, results=results) -> None:
                results.append(
                    robust_ext.binarization_test(network, attack, inputs, THREAT, isolate=isolate, judge_seed=0)
                )

            took[isolate] += seconds(run)
            if isolate:
                forkserver._forkserver._stop()
        assert all(one.records == results[0].records for one in results), "the records are the same"
        name = results[0].content["attacks"][0]["name"]
        print(f"{name:<48} isolated / in one process = {took[True] / took[False]:.3f}", flush=True)


if __name__ == "__main__":
    main()
