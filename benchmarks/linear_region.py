"""The minimum-norm attacks of this project and their peers on several networks, at equal CPU time.

    python benchmarks/linear_region.py networks/*.safetensors resnet20=FILE wong_kolter_mnist=FILE --mnist FOLDER
        --cifar10 FOLDER --out results.jsonl [--norms l2,l1,linf --images 16 --half odd --seeds 0,1,2]

A network is named like its file, or before "=": those of ``benchmarks/linear_region_networks.py``, which trains them,
and the two of ``examples/networks.py``. Images are the first of the test set that the network classifies correctly, of
odd index (settings are chosen on those of even index, ``--half even``). The first ``--attack`` runs first; all others
then run again and again, with another seed and, where it does not depend on one, with twice the steps, until it has
had as much CPU time (one thread); the nearest of its points count. Peers that draw nothing are measured with one seed,
and again with another only where they had less time than the attack took with that. Each attack's results are a line of
``--out`` as soon as it is done, and are not measured again by a later call (``--again``: the attacks are, after a
change of their code, and so are peers that had less time than they now take). Tables of all lines that fit the call
end it.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from linear_region_networks import HALVES, Sample, load, name_of, parser
from linear_region_tables import Lines, show
from torch import Tensor, nn

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.state import LinearRegionResult
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackError
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.engine.progress import showing, watching
from robust_ext.registry import as_attack

# Lowest epsilon that minimal APGD finds is a millionth of this.
LARGEST = {"linf": 1.0, "l2": 20.0, "l1": 200.0}
# Steps are doubled from run to run where nothing is drawn.
DOUBLED = {
    "FMN": ("adv_lib:fmn(steps={})", NORMS),
    "PDPGD": ("adv_lib:pdpgd(num_steps={})", NORMS),
    "ALMA": ("adv_lib:alma(num_steps={})", ("l2", "l1")),
    "PDGD": ("adv_lib:pdgd(num_steps={})", ("l2",)),
    "DDN": ("foolbox:DDNAttack(steps={})", ("l2",)),
    "C&W": ("foolbox:L2CarliniWagnerAttack(steps={})", ("l2",)),
}
# Peers whose results are those of any seed.
UNDRAWN = (*DOUBLED, "Brendel-Bethge from DDN")


def main() -> None:
    """Measure and print."""
    given = _options()
    torch.set_num_threads(1)
    lines = Lines(given.out)
    networks = {name_of(text): text for text in given.networks}
    keys = [
        {"network": name, "norm": norm, "seed": seed, "images": given.images, "half": given.half}
        for name in networks
        for norm in given.norms
        for seed in given.seeds
    ]
    warnings.filterwarnings("ignore", module="foolbox|eagerpy")
    others = {
        norm: {name: run for name, run in peers(norm).items() if name in (given.peers or (name,))} for norm in NORMS
    }
    runs = sum(len(given.attack) + len(others[key["norm"]]) for key in keys)
    with showing("minimum-norm attacks", shown=True, total=runs, unit="run") as progress:
        assert progress is not None
        for key in keys:
            name, norm = key["network"], key["norm"]
            sample = load(networks[name], given, half=given.half)
            least = 0.0
            for text in given.attack:
                measured(toy(), norm, 0, lambda _, text=text: text, seconds=0)
            for attack, run in (dict.fromkeys(given.attack) | others[norm]).items():
                progress.phase(f"{name}, {norm}, seed {key['seed']}: {attack}")
                one = key | {"attack": attack}
                if run is not None and attack in UNDRAWN:
                    lines.take_over(one, least=least)
                if (given.again and run is None) or not lines.hold(one, least=0 if run is None else least):
                    found = measured(sample, norm, key["seed"], run or (lambda _, it=attack: it), seconds=least)
                    lines.add(one | found | {"indices": sample.indices, "labels": sample.labels.tolist()})
                least = least or float(lines.of(one)["seconds"])
                progress.advance()
    show(lines.fitting(keys), given.attack[0])


def peers(norm: str) -> dict[str, Callable[[int], object]]:
    """Attacks of other libraries that minimise a norm: what is run for the first, second, ... time."""
    import foolbox.attacks as host

    noise = host.LinearSearchBlendedUniformNoiseAttack(directions=20)
    made: dict[str, Callable[[int], object]] = {
        "Brendel-Bethge": lambda _: brendel_bethge(norm)(init_attack=noise),
        "Brendel-Bethge from DDN": lambda run: brendel_bethge(norm)(init_attack=host.DDNAttack(steps=1000 << run)),
        "FAB x 5": lambda _: "adv_lib:fab(restarts=5)",
        "minimal APGD": lambda _: f"adv_lib:minimal_apgd(max_eps={LARGEST[norm]})",
    }
    doubled = {name: text for name, (text, norms) in DOUBLED.items() if norm in norms}
    return made | {name: partial(_doubled, text) for name, text in doubled.items()}


def _doubled(text: str, run: int) -> str:
    return text.format(1000 << run)


@cache
def brendel_bethge(norm: str) -> Any:
    """Foolbox's class, after it ran once: what numba compiles is not counted."""
    import foolbox

    name = {"linf": "Linfinity", "l2": "L2", "l1": "L1"}[norm]
    made = getattr(foolbox.attacks, f"{name}BrendelBethgeAttack")
    measured(toy(), norm, 0, lambda _: made(steps=2), seconds=0)
    return made


def toy() -> Sample:
    """A random network and input, on which attacks run before they are timed."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10)).eval()
    inputs = torch.rand(1, 1, 4, 4)
    return Sample(network, inputs, network(inputs).argmax(1), [0])


def measured(sample: Sample, norm: str, seed: int, runs: Callable[[int], object], *, seconds: float) -> dict[str, Any]:
    """Distances (null where nothing was found), classes of the nearest points, CPU seconds and runs of an attack."""
    network, inputs, labels = sample.network, sample.inputs, sample.labels
    threat_model, target = ThreatModel(norm=norm, epsilon=LARGEST[norm]), target_of(network, inputs)
    distances = torch.full((len(inputs),), math.inf, dtype=torch.float64)
    classes, spent, number, failures = labels.clone(), 0.0, 0, list[str]()
    while number == 0 or spent < seconds:
        attack = as_attack(runs(number))
        begin = time.process_time()
        try:
            generator = stream(seed, number)
            with watching(target.counter):
                points = run_attack(attack, target, inputs, labels, threat_model=threat_model, generator=generator)
        except AttackError as error:
            failures.append(str(error)[:200])
            points = inputs
        spent += time.process_time() - begin
        number += 1
        points = points.detach().float().clamp(0, 1)
        with torch.no_grad():
            predicted = network(points).argmax(1)
        found = torch.where(predicted != labels, threat_model.distance(points, inputs).double(), math.inf)
        nearer = found < distances
        distances[nearer], classes[nearer] = found[nearer], predicted[nearer]
        if len(failures) == 3:
            break
    known = [value if math.isfinite(value) else None for value in distances.tolist()]
    return {"distances": known, "classes": classes.tolist(), "seconds": spent, "runs": number, "failures": failures}


def target_of(network: nn.Module, inputs: Tensor) -> Target:
    """What attacks may query, with its gradients to the inputs alone."""
    counter = PassCounter()
    with torch.no_grad():
        classes = network(inputs[:1]).shape[1]
    return Target(
        module=Counted(network.requires_grad_(False), counter),
        bounds=(0.0, 1.0),
        classes=classes,
        input_shape=tuple(inputs.shape[1:]),
        device=inputs.device,
        counter=counter,
    )


def searched(attack: LinearRegion, sample: Sample, norm: str) -> tuple[LinearRegionResult, float]:
    """All that the linear-region attack returns, and its CPU seconds."""
    threat_model, begin = ThreatModel(norm=norm, epsilon=1.0), time.process_time()
    target = target_of(sample.network, sample.inputs)
    found = attack.run(target, sample.inputs, sample.labels, threat_model=threat_model, generator=stream(0))
    return found, time.process_time() - begin


def _options() -> argparse.Namespace:
    made = parser(__doc__, networks="+")
    made.add_argument("--norms", type=_words, default=NORMS, help="with commas between")
    made.add_argument("--seeds", type=lambda text: [int(word) for word in _words(text)], default=[0])
    made.add_argument("--half", choices=tuple(HALVES), default="odd")
    made.add_argument("--attack", action="append", metavar="ATTACK", help="robust_ext:LinearRegion() when left out")
    made.add_argument("--peers", type=_words, help="names of those to run; all when left out")
    made.add_argument("--out", type=Path, required=True, help="results, a JSON line for each attack")
    made.add_argument("--again", action="store_true", help="measure the attacks again")
    given = made.parse_args()
    given.attack = given.attack or ["robust_ext:LinearRegion()"]
    return given


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
