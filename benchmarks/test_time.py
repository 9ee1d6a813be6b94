r"""Passes of the cascade against those of every attack on every sample, and both worst cases, for test-time defenses.

    python benchmarks/test_time.py hd "aid(radius=0.1)"   # on the embedded network; parts are trained, in seconds
    python benchmarks/test_time.py "soap()" --model examples/networks.py:resnet20 --weights net.safetensors \
        --data cifar10 --data-root FOLDER --eps 8/255

All nine when none are named. A bare name of these has the settings of `NINE`: lengths relative to epsilon, and fewer
steps where it takes many; `soap()` has the defaults. Passes are rows forward and rows back through all networks,
judging included.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from torch import nn

import robust_ext
from examples.train_defense import save, train
from robust_ext.cli.models import load_model
from robust_ext.cli.options import number
from robust_ext.datasets import load_dataset
from robust_ext.defenses.catalogue import TRAINED

# With an epsilon of E; hd and adp draw, reverse looks at whole groups.
NINE = (
    "sodef",
    "clc(learning_rate=0.05)",
    "hd(radius={E}, step_size={E}/2)",
    "anti-adversary",
    "soap(flip=False, radii=4, steps=3, radius={E}/3, step_size={E}/5)",
    "imf(radius={E})",
    "aid(radius={E})",
    "reverse(group_size=16, steps=8, step_size={E}/4, radius={E}*2, views=2)",
    "adp(runs=2, steps=3)",
)

_WIDTHS = (16, 6, 7, 14, 6, 6)


def main() -> None:
    """A row a defense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("defenses", nargs="*", help="by name, with settings; all nine when left out")
    parser.add_argument("--model", default="digits")
    parser.add_argument("--weights")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root")
    parser.add_argument("--eps", default="0.1")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="that the samples are chosen by")
    parser.add_argument("--settings", default="", help="of the evaluation, as in draws=2,steps=10")
    parser.add_argument("--cascade-only", action="store_true")
    arguments = parser.parse_args()
    epsilon = number("--eps", arguments.eps)
    usual = {name.partition("(")[0]: name for name in NINE}
    names = [_filled(usual.get(name, name), epsilon) for name in arguments.defenses or usual]
    titles = ("cascade: passes", "worst", "cpu s", "full: passes", "worst", "ratio")
    print(f"{'defense':16}", " ".join(title.rjust(width) for title, width in zip(titles, _WIDTHS, strict=True)))
    with TemporaryDirectory() as folder:
        for name in names:
            short = name.partition("(")[0]
            keywords = _subject(short, arguments, epsilon, Path(folder))
            rows = [_evaluated(name, keywords, full) for full in (False, True)[: 1 if arguments.cascade_only else 2]]
            (passes, worst, seconds), *rest = rows
            line = f"{short:16} {passes:16,} {worst:6.3f} {seconds:7.0f}"
            for whole, lowest, _ in rest:
                line += f" {whole:14,} {lowest:6.3f} {passes / whole:6.3f}"
            print(line, flush=True)


def _filled(name: str, epsilon: float) -> str:
    """A name with the lengths that follow from epsilon."""

    def length(found: re.Match[str]) -> str:
        factor = float(found[2] or 1)
        return f"{epsilon * factor if found[1] == '*' else epsilon / factor:.6g}"

    return re.sub(r"\{E\}(?:([*/])(\d+))?", length, name)


def _subject(short: str, arguments: argparse.Namespace, epsilon: float, folder: Path) -> dict[str, Any]:
    """What the evaluation is given beside the defense's name; its part is trained."""
    classifier = load_model(arguments.model, weights=arguments.weights).model
    assert isinstance(classifier, nn.Module)
    found: dict[str, Any] = dict(_settings(arguments.settings))
    if short in TRAINED or short == "soap":
        data = load_dataset(arguments.data, root=arguments.data_root, split="train")
        part = train(short, classifier, *data.take(data.choose(1000, seed=0)), epsilon=epsilon)
        if short == "soap":
            classifier = part
        else:
            save(short, part, folder / short)
            found["defense_weights"] = folder / short
    test = load_dataset(arguments.data, root=arguments.data_root)
    inputs, labels = test.take(test.choose(arguments.samples, seed=arguments.seed))
    threat_model = robust_ext.ThreatModel(norm="linf", epsilon=epsilon)
    return {"classifier": classifier, "inputs": inputs, "labels": labels, "threat_model": threat_model, **found}


def _settings(text: str) -> Iterator[tuple[str, int]]:
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        yield name, int(value)


def _evaluated(name: str, keywords: Mapping[str, Any], full: bool) -> tuple[int, float, float]:
    """Rows forward and back, what is left in the worst case, and CPU seconds."""
    begun = time.process_time()
    result = robust_ext.evaluate_defense(name, attacks=None, full=full, **keywords)
    total = result.content["time"]["total"]
    return total["forward"] + total["backward"], result.defended, time.process_time() - begun


if __name__ == "__main__":
    main()
