"""Time of a whole MEAD run with five detectors, divided by its attacks' own time.

    python benchmarks/mead.py --weights mead_mnist.safetensors --data-root FOLDER [--samples 100]

The rest is verification, the detectors' scores of all candidates and of the clean images, files, and the metric with
its intervals; fitting the detectors is left out. The weights are those of ``examples/train_mead.py``, FOLDER holds the
idx files of MNIST.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from robust_ext.cli.models import load_model
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.evaluations.mead import load_suite, mead
from robust_ext.evaluations.mead.fitting import NAMED, SUPERVISED, fit_detector
from robust_ext.evaluations.mead.training import training_adversarials

NETWORKS = Path(__file__).parents[1] / "examples" / "networks.py"


def main() -> None:
    """Print the ratio, and what the rest was spent on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--samples", type=int, default=100)
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
    # One budget of each norm, with all of the paper's objectives and algorithms.
    groups = ("l1 15", "l2 1", "linf 0.125")
    arms = [arm for arm in load_suite("paper-mnist") if arm.group in groups]
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        threat_model, out = ThreatModel(norm="linf", epsilon=0.125), Path(folder) / "run"
        result = mead(network, arms, inputs, labels, threat_model, detectors=detectors, detector_data=held_out, out=out)
        total = time.perf_counter() - begun
    seconds = {"attack": 0.0, "verify": 0.0, "scores": 0.0}
    for row in result.content["time"]["phases"]:
        if row["phase"] in seconds:
            seconds[row["phase"]] += row["seconds"]
    attack = seconds["attack"]
    sys.stdout.write(
        f"{len(arms)} arms, {arguments.samples} samples: total / attacks {total / attack:.3f}; of the attacks' time: "
        f"verification {seconds['verify'] / attack:.3f}, scores {seconds['scores'] / attack:.3f}, "
        f"the rest {(total - attack - seconds['verify'] - seconds['scores']) / attack:.3f}\n"
    )
    for entry in result.content["detectors"]:
        sys.stdout.write(f"  {entry['name']:<8} scores {entry['seconds'] / attack:.3f}\n")


if __name__ == "__main__":
    main()
