"""Where the time of ``paper-mnist`` goes with five detectors, part by part.

    python benchmarks/mead.py --weights mead_mnist.safetensors --data-root FOLDER [--samples 100] [--all]

Run are one budget of each norm with all objectives and algorithms, and the quick ones of the other attacks (``--all``:
every one, which takes three times as long); the minutes of the whole suite follow from its other budgets. Fitting the
detectors is left out. The weights are those of
``examples/train_mead.py``, FOLDER holds the idx files of MNIST.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from robust_ext.cli.models import load_model
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.evaluations.mead import load_suite, mead
from robust_ext.evaluations.mead.fitting import NAMED, SUPERVISED, fit_detector, training_adversarials

# One budget of each norm, and how many times its steps all budgets of the suite have (BIM's depend on the budget).
GROUPS = ("l1 15", "l2 1", "linf 0.125")
OTHERS = {"PGD l1": 7.0, "PGD l2": 7.0, "PGD linf": 6.0, "BIM linf": 410 / 40, "FGSM linf": 6.0}
QUICK = ("DeepFool", "Square", "Spatial")
NETWORKS = Path(__file__).parents[1] / "examples" / "networks.py"


def main() -> None:
    """Fit the detectors, run the part, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--minutes-of", type=int, default=500, help="images of the whole suite")
    parser.add_argument("--all", action="store_true", help="CW2, CW-inf and HopSkipJump too")
    arguments = parser.parse_args()
    network = load_model(f"{NETWORKS}:mead_mnist", weights=arguments.weights).model
    training = load_dataset("mnist", root=arguments.data_root, split="train")
    clean, labels = training.take(training.choose(3000, seed=0))
    clean, held_out, labels = clean[:2000], clean[2000:], labels[:2000]
    adversarial = training_adversarials(network, clean[:500], labels[:500])
    detectors = {}
    for name in NAMED:
        given = {"adversarial": adversarial, "rows": 500} if name in SUPERVISED else {}
        detectors[name] = fit_detector(name, network, clean, labels, **given)
    test = load_dataset("mnist", root=arguments.data_root)
    inputs, labels = test.take(range(arguments.samples))
    suite = load_suite("paper-mnist")
    arms = [arm for arm in suite if arm.group in GROUPS or arm.short in QUICK or (arguments.all and not arm.algorithm)]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        threat_model, out = ThreatModel(norm="linf", epsilon=0.125), Path(folder) / "run"
        result = mead(network, arms, inputs, labels, threat_model, detectors=detectors, detector_data=held_out, out=out)
        total = time.perf_counter() - begun
    show(result.content["time"]["phases"], total, len(suite) / len(arms), arguments)


def show(rows: list[dict[str, Any]], total: float, runs: float, arguments: argparse.Namespace) -> None:
    """Print a line a part, and what the whole suite would take.

    Args:
        rows: The result's table of phases.
        total: Seconds of the whole call.
        runs: How many times as many arms the suite has.
        arguments: Those of the command line.
    """
    parts: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        name = (row["of"] or "").split("-")[0] if (row["of"] or "").startswith(("PGD", "BIM", "FGSM")) else row["of"]
        norm = f" {row['of'].split()[1]}" if name in ("PGD", "BIM", "FGSM") else ""
        found = parts.setdefault((row["phase"], f"{name or ''}{norm}"), [0.0] * 3)
        values = (row["seconds"], row["forward"], row["backward"])
        found[:] = [kept + value for kept, value in zip(found, values, strict=True)]
    scale, whole = arguments.minutes_of / arguments.samples / 60, 0.0
    sys.stdout.write(
        f"{arguments.samples} samples; rows forward and back a sample, and minutes of a core "
        f"that the whole suite takes for {arguments.minutes_of} images\n"
    )
    for (phase, name), (seconds, forward, backward) in parts.items():
        times = OTHERS.get(name, 1.0) if phase == "attack" else runs
        # What is left is of the whole call: calibration, clean inputs, the metric, files.
        minutes = seconds / 60 if phase == "rest" else seconds * scale * times
        whole += minutes
        rows_of = f"{forward / arguments.samples:8.0f} {backward / arguments.samples:8.0f}"
        sys.stdout.write(f"  {phase:<14} {name:<14} {rows_of} {minutes:7.1f}\n")
    left_out = "" if arguments.all else " without CW2, CW-inf and HopSkipJump"
    sys.stdout.write(f"all: {total:.0f} s here; the suite{left_out} {whole:.1f} minutes\n")


if __name__ == "__main__":
    main()
