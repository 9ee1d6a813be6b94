r"""Verdicts of the binarization test on recipes for random, batch-level and probability-valued test-time defenses.

    python benchmarks/test_time_planted.py            # hd, adp, clc and reverse on the embedded network
    python benchmarks/test_time_planted.py clc --samples 64

The weak recipe is PGD of 20 steps that end at a tenth of epsilon; the right one PGD of 40 steps through BPDA, averaged
over four draws where the defense is random. Parts are trained, in seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import robust_ext
from examples.train_defense import save, train
from robust_ext import as_attack
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.datasets import load_dataset
from robust_ext.defenses.catalogue import TRAINED
from robust_ext.demo.network import digits_network
from robust_ext.registry.defense import named_defense

# Each with the gradients of the right recipe, and how many draws decide.
CASES: dict[str, tuple[str, str, int]] = {
    "hd": ("hd(radius=0.1, step_size=0.05)", "identity", 9),
    "adp": ("adp(runs=2, steps=3)", "identity", 1),
    "clc": ("clc(learning_rate=0.05, group_size=16)", "frozen", 1),
    "reverse": (
        "reverse(group_size=16, steps=8, step_size=0.025, radius=0.1, views=2)",
        "identity",
        1,
    ),
}


def main() -> None:
    """A row a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("defenses", nargs="*", help=f"of {', '.join(CASES)}; all when left out")
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    print("| defense | recipe | verdict | solved | R-ASR | CPU s |\n|---|---|---|---|---|---|")
    for name in arguments.defenses or CASES:
        judge(name, arguments.samples)


def judge(name: str, samples: int) -> None:
    """Print the verdicts on both recipes for a defense."""
    text, mode, draws = CASES[name]
    network = digits_network()
    inputs, _ = load_dataset("digits").take(range(samples))
    weights: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        if name in TRAINED:
            data = load_dataset("digits", split="train")
            save(name, train(name, network, *data.take(data.choose(1000, seed=0))), Path(folder) / name)
            weights["weights"] = Path(folder) / name
        defense = named_defense(text, network, inputs[:2], **weights)
    weak = as_attack("foolbox:LinfPGD(steps=20, rel_stepsize=0.005, random_start=False)").named("weak")
    strong = as_attack("foolbox:LinfPGD(steps=40, rel_stepsize=0.05)")
    right = AdaptedAttack(attack=strong, gradient_mode=mode, eot=4 if defense.random else 1)
    begun = time.process_time()
    result = robust_ext.binarization_test(
        defense,
        {"weak": weak, "right": right},
        inputs,
        robust_ext.ThreatModel(norm="linf", epsilon=0.1),
        draws=draws,
        depths=(1,),
        inner_points=199,
    )
    taken = time.process_time() - begun
    for one in result.content["attacks"]:
        solved = f"{one['outcomes']['found']} of {one['samples']}"
        row = name, one["name"], one["verdict"], solved, f"{one['random_score']:.2f}", f"{taken:.0f}"
        print("|", " | ".join(row), "|", flush=True)
        print(f"{one['name']}: {one['reason']}", file=sys.stderr)


if __name__ == "__main__":
    main()
