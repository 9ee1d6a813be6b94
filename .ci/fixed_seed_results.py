"""Results at fixed seeds, of every evaluation, beside those that were written down on an earlier day.

    python .ci/fixed_seed_results.py [--record]

They show whether a change that is meant to leave results alone does; no correctness follows from them, which is what
the tests are for. Values are those of one thread; see ``SENSITIVE`` for those of one machine. Where results are meant
to change, record them anew in the same commit.
"""

import json
import math
import sys
import warnings
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import robust_ext
from robust_ext import ThreatModel, binarization_test, defenses, mead, robust_accuracy
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.random import seeded_globals
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.demo.run import run_demo
from robust_ext.evaluations.adaptive import Step, evaluate_defense
from robust_ext.evaluations.binarization import plant
from robust_ext.evaluations.mead import Arm
from robust_ext.evaluations.mead.fitting import fit_detector
from robust_ext.registry.defense import as_defense
from robust_ext.testing.networks import small_network

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.evaluations.subjects import Noisy, Pattern, Rounding, Unsure, rounded, spread

RESULTS = Path(__file__).with_name("fixed_seed_results.json")
# Times, words, statistics of queries, and what depends on where the package is.
LEFT_OUT = {"seconds", "versions", "settings", "description", "attack", "reason", "origin", "seed", "kind"}
LEFT_OUT |= {"findings", "trace", "robust", "time"}
EPSILON = {"linf": 0.15, "l2": 1.0, "l1": 4.0}
# Searches and trainings in which rounding grows: the same on one machine and one thread, not on another machine.
SENSITIVE = ("LinearRegion", "linear region")
CASES = {}


def case(name, function, *arguments, **settings):
    assert name not in CASES
    CASES[name] = partial(function, *arguments, **settings)


# ---- What the cases are about.


@cache
def network():
    return digits_network()


def digits(count, start=0, part="test"):
    return load_dataset("digits", split=part).take(range(start, start + count))


class Widened(nn.Module):
    """The network for inputs in [-1, 2]."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.eval()

    def forward(self, x):
        return self.network((x + 1) / 3)


class NoisyDefense:
    random = True

    def __call__(self, x):
        return (x + 0.1 * torch.randn_like(x)).clamp(0, 1)


def callable_pgd(model, x, y, threat_model):
    adversarial = x.clone()
    for _ in range(10):
        adversarial.requires_grad_()
        loss = nn.functional.cross_entropy(model(adversarial), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, adversarial)
        adversarial = adversarial.detach() + threat_model.epsilon / 5 * gradient.sign()
        adversarial = x + (adversarial - x).clamp(-threat_model.epsilon, threat_model.epsilon)
        adversarial = adversarial.clamp(*threat_model.bounds)
    return adversarial


def predicted_labels(model, x, y, threat_model):
    return callable_pgd(model, x, model(x).argmax(1), threat_model)


def plain(found):
    """Results as JSON data, without times and words; of a curve only the sum."""
    if isinstance(found, Mapping):
        kept = {str(key): plain(value) for key, value in found.items() if key not in LEFT_OUT}
        if isinstance(kept.get("curve"), dict) and "tpr" in kept["curve"]:
            kept["curve"] = math.fsum(kept["curve"]["tpr"])
        return kept
    if isinstance(found, (list, tuple)):
        return [plain(value) for value in found]
    if isinstance(found, (np.generic, Tensor)):
        found = found.item()
    return str(found) if isinstance(found, float) and not math.isfinite(found) else found


def numbers(values):
    """Size and first three values of a tensor; what cancels in a plain sum would be noise."""
    flat = values.detach().double().flatten()
    return {"size": float(flat.abs().sum()), "first": flat[:3].tolist()}


# ---- The binarization test.

QUICK = {"inner_points": 80, "random_inner": 20, "random_corners": 20, "canaries": 2}


def binarization(attack, norm="linf", *, model=None, wide=False, **settings):
    inputs, _ = digits(settings.pop("samples", 8))
    epsilon = settings.pop("epsilon", {"linf": 0.1, "l2": 0.8, "l1": 4.0}[norm]) * (3 if wide else 1)
    model = Widened() if wide else network() if model is None else model()
    bounds = (-1.0, 2.0) if wide else (0.0, 1.0)
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    inputs = inputs * 3 - 1 if wide else inputs
    result = binarization_test(model, attack, inputs, threat_model, **{**QUICK, **settings})
    return {**plain(result.content), "records": plain(result.records)}


def detected(attack, kind=Pattern, **settings):
    data, _ = digits(60, 100)
    return binarization(attack, detector=kind, detector_data=data, detector_fpr=0.3, **settings)


case("binarization foolbox linf", binarization, "foolbox:LinfPGD(steps=10, rel_stepsize=0.2)", kappa=0.99)
case("binarization foolbox tiny steps", binarization, "foolbox:LinfPGD(steps=10, rel_stepsize=0.005)")
case("binarization foolbox l2", binarization, "foolbox:L2DeepFoolAttack(steps=10, overshoot=0.02)", "l2", kappa=0.9)
case("binarization foolbox l1", binarization, "foolbox:SparseL1DescentAttack(steps=10)", "l1", kappa=0.5)
case("binarization art linf", binarization, "art:ProjectedGradientDescent(max_iter=10, eps_step=0.03)", kappa=0.9)
case("binarization art l2", binarization, "art:DeepFool(max_iter=10)", "l2", kappa=0.9, samples=4)
case("binarization torchattacks", binarization, "torchattacks:PGD(steps=10, alpha=0.03)", kappa=0.9)
case("binarization adv_lib l2", binarization, "adv_lib:ddn(steps=20)", "l2", kappa=0.9)
case("binarization adv_lib l1", binarization, "adv_lib:fmn(steps=20)", "l1", kappa=0.9)
APGD, SEARCH, RAYS = "robust_ext:APGD(steps=10)", "robust_ext:RandomSearch(points=30)", "robust_ext:RayS(queries=60)"
OWN = {"apgd": APGD, "square": "robust_ext:Square(queries=30)", "rays": RAYS}
case("binarization own linf", binarization, OWN)
case("binarization own l2", binarization, [APGD, SEARCH], "l2")
case("binarization own l1", binarization, [APGD, "robust_ext:Square(queries=20)"], "l1")
# Draws depend on the attack's name, which spells its settings as when the results were recorded.
REGIONS = {
    "robust_ext:LinearRegion(starts=2, walk=5, hops=2, hop_steps=3, regions=3)": (
        "robust_ext:LinearRegion(budget=600, draws=2, start_steps=5, hops=2, regions=3)"
    )
}
case("binarization linear region", binarization, REGIONS, "l2", samples=4, kappa=0.9)
case("binarization callables", binarization, {"pgd": callable_pgd, "predicted": predicted_labels}, kappa=0.9)
case("binarization wide bounds", binarization, [APGD, "foolbox:LinfPGD(steps=10)"], wide=True)
case("binarization wide bounds l2", binarization, [APGD, callable_pgd], "l2", wide=True)
case("binarization reference", binarization, callable_pgd, kappa=0.5, kappa_convention="reference", logit_scale="unit")
OTHER = {"readout": "max-margin", "boundary": "surface", "boundary_points": 3, "gap": 0.2, "seed": 7, "batch_size": 3}
case("binarization other settings", binarization, APGD, kappa=0.9, **OTHER)
case("binarization calibrated", binarization, [callable_pgd, APGD], calibrate_on=6, samples=12)
case("binarization sequential", binarization, callable_pgd, sequential=True, samples=24, kappa=0.9)
case("binarization batch norm", binarization, APGD, model=lambda: small_network((1, 8, 8), 5), kappa=0.9)
BPDA = partial(AdaptedAttack, attack=robust_ext.as_attack(callable_pgd))
TRAJECTORY = BPDA(gradient_mode="trajectory")
MODELS = {
    "BPDA": lambda: Rounding(network(), steps=2),
    "hd": lambda: defenses.HedgeDefense(network(), steps=1, step_size=0.02),
    "EoT": lambda: as_defense("resize-pad(smallest=0.5, largest=1.0)", network(), digits(2)[0]),
}
BY_BPDA = {
    "BPDA": ([callable_pgd, BPDA(), TRAJECTORY], 8, 0.9),
    "hd": (TRAJECTORY, 6, 0.9),
    "EoT": (BPDA(eot=2).named("callable_pgd through identity"), 6, 0.5),
}
for name, (attack, samples, kappa) in BY_BPDA.items():
    case(f"binarization {name}", binarization, attack, model=MODELS[name], samples=samples, kappa=kappa)
case("binarization detector, blind", detected, callable_pgd)
case("binarization detector, margin", detected, {"own": APGD, "pgd": callable_pgd}, exposure="margin")
case("binarization detector, reject", detected, callable_pgd, exposure="reject", kappa=0.9)
case("binarization detector, random", detected, callable_pgd, Noisy, exposure="margin", detector_draws=3)
AWARE_NAMES = ["OrthogonalPGD(steps=10)", "SelectivePGD(steps=10)", "JointLoss(steps=5, restarts=2)"]
case("binarization detector, aware", detected, [f"robust_ext:{name}" for name in AWARE_NAMES], samples=6)
MATCHING = ["FeatureMatching(steps=10)", "LogitMatching(steps=10, samples=2, check_every=2)"]
case("binarization detector, matching", detected, [f"robust_ext:{name}" for name in MATCHING], samples=6, kappa=0.9)
case("demo", lambda: plain(run_demo(samples=6).content))


def planted():
    inputs, _ = digits(6)
    found = plant(network(), inputs, ThreatModel(norm="l2", epsilon=0.8), inner_points=60)
    with torch.no_grad():
        logits = found.module(found.inputs), found.module(found.planted[:, 0])
    return {"points": numbers(found.planted), "clean": numbers(logits[0]), "adversarial": numbers(logits[1])}


case("binarization planted points", planted)

# ---- MEAD.


def objective_arms(norm, epsilon, *names):
    text = "robust_ext:ObjectivePGD(objective='{}', steps=5)"
    return [Arm(attack=text.format(name), norm=norm, epsilon=epsilon, objective=name, label=name) for name in names]


def mead_of(watched, arms, *, samples=16, wide=False, **settings):
    (inputs, labels), (data, _) = digits(samples), digits(60, 100)
    settings = {"resamples": 20, "batch_size": 10, **settings}
    bounds, model = ((-1.0, 2.0), Widened()) if wide else ((0.0, 1.0), network())
    inputs, data = (inputs * 3 - 1, data * 3 - 1) if wide else (inputs, data)
    threat_model = ThreatModel(norm="linf", epsilon=0.1, bounds=bounds)
    result = mead(model, arms, inputs, labels, threat_model, detectors=watched, detector_data=data, **settings)
    found = plain(result.content)
    if len(found["arms"]) > 9:
        found = {**found, "arms": len(found["arms"]), "detectors": [one["results"] for one in found["detectors"]]}
    return found


BOTH = {"unsure": Unsure, "spread": spread}
FOUR = ("ace", "kl", "gini", "fisher-rao")
DEEPFOOL = "foolbox:L2DeepFoolAttack(steps=10, overshoot=0.02)"
PAIR = objective_arms("linf", 0.2, *FOUR[:2])
MEADS = {
    "objectives": lambda: mead_of(BOTH, objective_arms("linf", 0.2, *FOUR), published=True),
    "norms": lambda: mead_of(BOTH, objective_arms("l2", 1.0, "ace", "kl") + objective_arms("l1", 6.0, "ace", "gini")),
    "filtered": lambda: mead_of(BOTH, PAIR, naturals="filtered", seed=3),
    "combined": lambda: mead_of(
        {**BOTH, "fs": fit_detector("fs", network(), *digits(300, part="train"))},
        PAIR,
        combine=("mean", "max", "mixture"),
    ),
    "wide bounds": lambda: mead_of(BOTH, objective_arms("linf", 0.6, *FOUR[:2]), wide=True),
    "minimum norm": lambda: mead_of(
        BOTH, [Arm(attack=DEEPFOOL, norm="l2", epsilon=epsilon, label="DF") for epsilon in (0.5, 1.0, None)]
    ),
    "aware": lambda: mead_of(
        {"unsure": Unsure, "pattern": Pattern},
        [
            *objective_arms("linf", 0.2, "ace"),
            Arm(attack="robust_ext:SelectivePGD(steps=10)", norm="linf", epsilon=0.2, label="Selective"),
            Arm(attack="robust_ext:OrthogonalPGD(steps=10)", norm="l2", epsilon=1.0, label="Orthogonal"),
            Arm(attack="robust_ext:JointLoss(steps=5, restarts=2)", norm="linf", epsilon=0.2, label="Joint"),
        ],
    ),
    "suite": lambda: mead_of(BOTH, "quick", samples=10, resamples=0),
}
for name, function in MEADS.items():
    case(f"mead {name}", function)

# ---- Robust accuracy.


def robust(attacks, norm, epsilons, *, samples=12, **settings):
    inputs, labels = digits(samples)
    threat_model = ThreatModel(norm=norm, epsilon=epsilons[0])
    settings = {"epsilons": epsilons, "batch_size": 8, **settings}
    result = robust_accuracy(network(), attacks, inputs, labels, threat_model, **settings)
    return plain(result.content)


ROBUST = {
    "linf": (
        {
            **{"apgd": APGD, "pgd": callable_pgd, "fmn": "adv_lib:fmn(steps=20)", "rays": RAYS},
            "cw": "robust_ext:CarliniWagnerLinf(steps=10, learning_rate=0.05)",
        },
        [0.05, 0.1, 0.2],
        0,
    ),
    "l2": (
        {
            **{"apgd": "robust_ext:APGD(steps=10, loss='margin')", "df": DEEPFOOL, "ddn": "adv_lib:ddn(steps=20)"},
            **{"torchattacks": "torchattacks:PGDL2(steps=10)", "art": "art:DeepFool(max_iter=10)"},
        },
        [0.5, 1.0],
        0,
    ),
    "l1": (
        {"apgd": APGD, "search": SEARCH, "ead": "foolbox:EADAttack(steps=20, binary_search_steps=2)"},
        [2.0, 6.0],
        4,
    ),
}
for norm, (attacks, budgets, seed) in ROBUST.items():
    case(f"robust accuracy {norm}", robust, attacks, norm, budgets, seed=seed)
for norm, budgets in {"linf": [0.05, 0.1], "l2": [0.5, 1.0], "l1": [2.0, 4.0]}.items():
    regions = {**REGIONS, "robust_ext:APGD(steps=5)": "robust_ext:APGD(steps=5)"}
    case(f"robust accuracy linear region {norm}", robust, regions, norm, budgets, samples=4)

# ---- Test-time defenses.


def defended(defense, norm="linf", *, samples=8, **settings):
    inputs, labels = digits(samples)
    settings = {"steps": 3, "queries": 10, "draws": 2, "repeats": 2, **settings}
    defense = defense() if callable(defense) and getattr(defense, "__name__", "") == "<lambda>" else defense
    threat_model, attacks = ThreatModel(norm=norm, epsilon=EPSILON[norm] / 1.5), settings.pop("attacks", None)
    result = evaluate_defense(defense, attacks, inputs, labels, threat_model, classifier=network(), **settings)
    found = plain(result.content)
    found.pop("cost")
    cost = {key: result.content["cost"][key] for key in ("forward", "backward")}
    return {**found, "warnings": len(found.pop("warnings")), "cost": cost}


case("test time hd", defended, "hd(steps=2)")
case("test time jpeg", defended, "jpeg(quality=50)", "l2")
case("test time random", defended, NoisyDefense(), repeats=3)
case("test time smoothing", defended, "randomized-smoothing(samples=3)", "l2", samples=6)
case("test time purifier", defended, lambda: Rounding(network(), steps=2))
case("test time l1", defended, rounded, "l1", seed=2)
MORE_PGD = robust_ext.as_attack("foolbox:LinfPGD(steps=3)")
EXTRA = Step(name="more", category="white-box", attack=MORE_PGD, exposure="trajectory")
case(
    "test time surrogates",
    lambda: defended(rounded, attacks=["recommended", EXTRA], surrogates={"rounding": Rounding(network(), steps=1)}),
)

# ---- What was written down, against what is found.


MISSING = object()


def differences(found, wanted, where=""):
    """Where results differ: integers and words exactly, other numbers up to rounding."""
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        pairs = {key: (found.get(key, MISSING), wanted.get(key, MISSING)) for key in sorted({*found, *wanted})}
        return [line for key, pair in pairs.items() for line in differences(*pair, f"{where}/{key}")]
    if isinstance(wanted, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        same = found == wanted or abs(found - wanted) <= max(1e-6, 1e-5 * abs(wanted))
    else:
        same = type(found) is type(wanted) and found == wanted
    return [] if same else [f"{where}: {found!r}, was {wanted!r}"]


def machine():
    """What rounding depends on."""
    return f"torch {torch.__version__}, numpy {np.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def result_of(name):
    """A case's result as it is after a journey through JSON; the global generators start the same."""
    torch.set_num_threads(1)
    with seeded_globals(0):
        return json.loads(json.dumps(plain(CASES[name]()), allow_nan=False))


def check() -> int:
    """How many cases have another result than the one that was written down."""
    written, wrong = json.loads(RESULTS.read_text()), 0
    assert sorted(written) == sorted([*CASES, "machine"]), "cases and records differ; record them"
    elsewhere = written["machine"] != machine()
    for name in CASES:
        if elsewhere and any(part in name for part in SENSITIVE):
            print(f"skipped, as it was written down on {written['machine']}: {name}")
            continue
        found = differences(result_of(name), written[name])
        wrong += bool(found)
        for line in found[:5]:
            print(f"{name}: {line}")
    print(f"{len(CASES) - wrong} of {len(CASES)} results at fixed seeds are those that were written down")
    return wrong


def record() -> None:
    """Write down all results."""
    found = {name: result_of(name) for name in CASES} | {"machine": machine()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}" for name in sorted(found))
    RESULTS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        sys.exit(min(check(), 1))
