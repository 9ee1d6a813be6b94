"""Share of planted points that are adversarial through the whole model, at the batch size of the attack.

python benchmarks/planted_survival.py [--weights FILE --data-root FOLDER]
"""

from __future__ import annotations

from common import THREAT, load, parser

from robust_ext.evaluations.binarization.attacking import count_planted
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import split


def main() -> None:
    """Print one line a setting."""
    arguments = parser(__doc__).parse_args()
    network, inputs = load(arguments)
    for points in (1, 10):
        settings = BinarizationSettings(threat_model=THREAT, boundary_points=points)
        parts = split(network, inputs[:2])
        problems = fit(
            measure(Forward(parts.features, 64), inputs, range(len(inputs)), settings), parts.readout, settings
        )
        rows = [row for row in range(len(inputs)) if problems.separable[row]]
        posed = problems.select(rows)
        for kappa in (0.9, 0.999, 0.9999, 0.99999, 1 - 1e-7):
            together = count_planted(posed.classifier(parts.features, position=kappa, batching="full"), posed)
            alone = sum(
                int(count_planted(posed.select([row]).classifier(parts.features, position=kappa), posed.select([row])))
                for row in range(len(rows))
            )
            drawn = points * len(rows)
            print(
                f"N_b {points:>2}, kappa {kappa:<10.7g} separable {len(rows)}/{len(inputs)}, survive together "
                f"{int(together.sum())}/{drawn}, alone {alone}/{drawn}"
            )


if __name__ == "__main__":
    main()
