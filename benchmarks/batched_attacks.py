"""Time of attacking problems one at a time, divided by attacking them together, for PGD-200.

python benchmarks/batched_attacks.py [--weights FILE --data-root FOLDER]
"""

from __future__ import annotations

from common import THREAT, load, parser, pgd

from robust_ext.attacks.base import CallableAttack
from robust_ext.core.target import Counted, PassCounter
from robust_ext.engine.task import drive, verified
from robust_ext.evaluations.binarization.attacking import ProblemAttack
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import Split, split


def main() -> None:
    """Print the ratio of the attack phases."""
    options = parser(__doc__)
    options.set_defaults(samples=16)
    arguments = options.parse_args()
    network, inputs = load(arguments)
    settings = BinarizationSettings(threat_model=THREAT, inner_points=200)
    parts = split(network, inputs[:2])
    parts = Split(Counted(parts.features, PassCounter()), parts.readout, parts.layer)
    problems = fit(measure(Forward(parts.features, 64), inputs, range(len(inputs)), settings), parts.readout, settings)
    times = {}
    for batching in ("any", "single", "any", "single"):
        attack = CallableAttack(pgd(200), batching=batching)
        posed = ProblemAttack(attack=attack, features=parts.features, settings=settings)
        done = drive(verified(posed.run(problems)))
        times.setdefault(batching, []).append(done.spent["attack"].seconds)
        found = sum(record["outcome"] == "found" for record in done.records.values())
        print(f"PGD-200, batching={batching:<7} found {found}/{len(inputs)}", flush=True)
    print(f"one at a time / together = {sum(times['single']) / sum(times['any']):.2f}")


if __name__ == "__main__":
    main()
