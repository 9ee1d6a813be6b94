"""Compare results at fixed seeds with those that were recorded, for every evaluation and every part of it.

    python .ci/fixed_seed_results.py [--only PART_OF_A_NAME] [--record]

A change that is meant to leave results alone must pass. The results are no evidence of correctness; the tests are.
Values are those of one thread, and ``SENSITIVE`` names cases that depend on the machine. Where results are meant to
change, record them again in the same commit: ``--only mead --record`` records the cases with ``mead`` in their name.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import math
import os
import random
import runpy
import struct
import sys
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from unittest import mock

# The kernels of one instruction set, so that values do not depend on the processor; read when torch is imported.
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

import numpy as np
import torch
from torch import Tensor, nn

import robust_ext
from robust_ext import (
    AdaptedAttack,
    Arm,
    ThreatModel,
    as_defense,
    binarization_test,
    defenses,
    diagnose,
    evaluate,
    evaluate_defense,
    fit_detector,
    mead,
    plant,
    robust_accuracy,
)
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.demo.run import run_demo
from robust_ext.engine.executors import make_executor
from robust_ext.evaluations.adaptive import Step
from robust_ext.testing.networks import small_network

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.evaluations.subjects import Noisy, Pattern, Rounding, Unsure, rounded, spread

RESULTS = Path(__file__).with_name("fixed_seed_results.json")
# Times, texts, statistics of queries, and what depends on where the package is.
LEFT_OUT = {"seconds", "versions", "settings", "description", "attack", "reason", "origin", "seed", "kind"}
LEFT_OUT |= {"findings", "trace", "robust", "time", "likely", "next", "seconds_ratio", "small", "large"}
# A ratio near 1, which holds few digits of a difference.
LEFT_OUT |= {"steepness"}
EPSILON = {"linf": 0.15, "l2": 1.0, "l1": 4.0}
# Cases in which rounding grows: the same on one machine and one thread, not on another machine.
SENSITIVE = (
    *("LinearRegion", "linear region", "EoT", "binarization detector", "aware", "native", "defense clc"),
    *(f"attack {name}" for name in ("ObjectivePGD", "OrthogonalPGD", "SelectivePGD", "JointLoss")),
    *("Matching", "L2BasicIterative", "ml-loo", "test time full"),
)
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
    """Return results as JSON data, without times and texts; of a curve only the sum."""
    if isinstance(found, Mapping):
        kept = {str(key): plain(value) for key, value in found.items() if key not in LEFT_OUT}
        if isinstance(kept.get("curve"), dict) and "tpr" in kept["curve"]:
            kept["curve"] = math.fsum(kept["curve"]["tpr"])
        return kept
    if isinstance(found, (list, tuple)):
        return [plain(value) for value in found]
    if isinstance(found, (np.generic, Tensor)):
        found = found.item()
    if isinstance(found, float):
        return float(f"{found:.8g}") if math.isfinite(found) else str(found)
    return found


def numbers(values):
    """Size and first three values of a tensor; what cancels in a plain sum would be noise."""
    flat = torch.as_tensor(values).detach().double().flatten()
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

# ---- The whole evaluation.


def evaluated(norm, *, model=network, **settings):
    threat_model = ThreatModel(norm=norm, epsilon=EPSILON[norm])
    return plain(evaluate(model(), *digits(12), threat_model, budget="quick", planted=8, **settings).content)


case("evaluate linf", evaluated, "linf", claim=60)
case("evaluate l2, rounded", evaluated, "l2", model=lambda: Rounding(network(), steps=1), search=False)

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
    return {**found, "cost": cost}


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

# ---- Every evaluation in a small form: each record of a sample, each finding, each example.


MISSING = object()


def differences(found, wanted, where=""):
    """Return where results differ: integers and texts exactly, other numbers up to rounding."""
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


class Listener:
    """A callback that collects records, and interrupts the run at one of them."""

    def __init__(self, stop_at=None):
        self.records, self.stop_at = [], stop_at

    def on_record(self, record):
        self.records.append(record)
        if len(self.records) == self.stop_at:
            raise KeyboardInterrupt

    def on_result(self, result):
        pass


def heard(evaluate, *arguments, stop_at=None, **settings):
    listener = Listener(stop_at)
    result = evaluate(*arguments, callbacks=[listener], **settings)
    return {
        "content": plain(result.content),
        "findings": [[one["code"], one["weight"], one["layer"], one["samples"]] for one in result.content["findings"]],
        "examples": [[one.attack, one.sample, one.outcome, numbers(one.candidate)] for one in result.examples],
        "records": sorted(
            (plain(one) for one in listener.records), key=lambda one: (str(one.get("run")), one["index"])
        ),
    }


SMALL = {"inner_points": 40, "random_inner": 10, "random_corners": 10, "canaries": 1, "witness_steps": 4}
SMALL |= {"witness_queries": 10, "planted_candidates": 4}
SHORT_APGD = "robust_ext:APGD(steps=5)"


def small(evaluation, attacks=SHORT_APGD, norm="linf", *, samples=4, model=network, **settings):
    (inputs, labels), module = digits(samples), model()
    threat_model = ThreatModel(norm=norm, epsilon=EPSILON[norm] / 1.5)
    settings = {"batch_size": 2, **settings}
    if evaluation == "binarization":
        return heard(binarization_test, module, attacks, inputs, threat_model, **{**SMALL, **settings})
    if evaluation == "mead":
        settings = {"resamples": 5, "detectors": BOTH, "detector_data": digits(40, 100)[0], **settings}
    elif evaluation == "test time":
        settings = {"classifier": module, "steps": 2, "queries": 5, "draws": 2, "repeats": 2, **settings}
        module = settings.pop("defense", "jpeg(quality=50)")
    elif evaluation == "diagnosis":
        settings = {"inner_points": 40, "planted": 2, "queries": 20, "random_points": 10, **settings}
    evaluate = {"mead": mead, "test time": evaluate_defense, "diagnosis": diagnose}.get(evaluation, robust_accuracy)
    return heard(evaluate, module, attacks, inputs, labels, threat_model, **settings)


def resumed(evaluation):
    with tempfile.TemporaryDirectory() as out:
        with contextlib.suppress(KeyboardInterrupt):
            small(evaluation, stop_at=1, out=out)
            raise AssertionError("the run was not interrupted")
        return small(evaluation, out=out)


def isolated(evaluation):
    # Without a judge's seed, isolated runs draw one.
    return small(evaluation, isolate=True, **({} if evaluation == "robust accuracy" else {"judge_seed": 0}))


@cache
def workers():
    return make_executor("local:2")()


def compared(evaluation, other):
    """Return where another way of running an evaluation changes its result."""
    # Numbers that cross the pipe of a process may come back as floats.
    found, usual = (json.loads(json.dumps(one), parse_int=float) for one in (other(evaluation), small(evaluation)))
    return {"differences": differences(found, usual)}


WAYS = {
    "isolated": isolated,
    "executor": lambda evaluation: small(evaluation, executor=workers()),
    "resumed": resumed,
}
for evaluation in ("binarization", "mead", "robust accuracy", "test time", "diagnosis"):
    case(f"small {evaluation}", small, evaluation)
    for way, function in WAYS.items():
        case(f"small {evaluation} {way}", compared, evaluation, function)


class RandomNetwork(nn.Module):
    """The network with noise at its inputs."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.eval()

    def forward(self, x):
        return self.network(x + 0.02 * torch.randn_like(x))


class Saturated(nn.Module):
    """The network with logits that saturate cross-entropy."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.eval()

    def forward(self, x):
        return 1000 * self.network(x)


class Views(nn.Module):
    """Features ``(N, 3, 128)`` of three views of an image."""

    def __init__(self):
        super().__init__()
        self.body = network()[:-1].eval()

    def forward(self, x):
        return torch.stack([self.body(view) for view in (x, 0.7 * x, x.flip(3))], 1)


class MeanHead(nn.Module):
    """The mean of the logits of views."""

    def __init__(self):
        super().__init__()
        self.linear = network()[-1].eval()

    def forward(self, features):
        return self.linear(features).mean(1)


def views():
    return Views().eval(), MeanHead().eval()


DETECTED = {"detector": Pattern, "detector_data": digits(40, 100)[0], "detector_fpr": 0.3}
MODES = {
    **{f"readout {name}": {"readout": name} for name in ("prototypes", "nearest")},
    **{f"readout {name}": {"readout": name, "model": views} for name in ("ensemble", "code", "mixing")},
    "corners l2": {"norm": "l2", "boundary": "corners"},
    "corners l1": {"norm": "l1", "boundary": "corners", "kappa": 0.5},
    "surface": {"boundary": "surface", "inner": "uniform"},
    "draws": {"model": RandomNetwork, "draws": 3, "kappa": 0.5},
    "depths": {"depths": (1, 3), "least_depth": 3},
    "layer": {"layer": "5", "fold": False},
    "judged otherwise": {"judge_seed": 5, "threshold": 0.5, "proven_rate": 0.5, "confidence": 0.8},
    "detector draws": {**DETECTED, "detector": Noisy, "reference_points": 3},
    "device and ids": {"device": "cpu", "sample_ids": [7, 3, 11, 2]},
}
for name, settings in MODES.items():
    case(f"small binarization {name}", small, "binarization", **settings)
TINY = "robust_ext:ObjectivePGD(steps=2, step_size=0.001)"
case("small diagnosis short path", small, "diagnosis", TINY, try_remedies=True)
case("small diagnosis l2", small, "diagnosis", "foolbox:L2DeepFoolAttack(steps=3)", "l2", references=False)
case("small diagnosis saturated", small, "diagnosis", "foolbox:LinfPGD(steps=5)", model=Saturated)
case("small diagnosis rounding", small, "diagnosis", SHORT_APGD, model=lambda: Rounding(network(), steps=1))
case("small diagnosis random", small, "diagnosis", SHORT_APGD, model=RandomNetwork)
case("small mead mixture", small, "mead", combine=("mixture",), published=True, seed=2)
case("small test time minutes", small, "test time", minutes=60.0, samples=2)
case("small test time white-box", small, "test time", None, only=("white-box",), samples=2)
case(
    "small test time full", small, "test time", None, "l2", defense="hd(steps=1)", full=True, skip=("naive",), samples=2
)

# ---- Attacks by name, in every norm that they take.

OF_CATALOGUE = {
    **{"APGD": "steps=5", "RandomSearch": "points=10", "ObjectivePGD": "steps=4", "RayS": "queries=40"},
    **{"CarliniWagnerLinf": "steps=10, learning_rate=0.05", "Square": "queries=20"},
    "BoundarySearch": "budget=200, draws=1, start_steps=5, hops=2",
    "LinearRegion": "budget=200, draws=1, start_steps=5, hops=2, regions=3",
    "SpatialTransformation": "translation=1, translation_steps=3, rotation_steps=3",
    **{"FeatureMatching": "steps=5", "LogitMatching": "steps=4, samples=2, check_every=2"},
    **{"OrthogonalPGD": "steps=5", "SelectivePGD": "steps=5", "JointLoss": "steps=4"},
}
NEED_DETECTOR = ("FeatureMatching", "LogitMatching", "OrthogonalPGD", "SelectivePGD", "JointLoss")
HOSTED = {
    "foolbox:LinfDeepFoolAttack(steps=5)": ("linf",),
    "foolbox:L2CarliniWagnerAttack(steps=5, binary_search_steps=2)": ("l2",),
    "foolbox:L2BasicIterativeAttack(steps=5)": ("l2",),
    "foolbox:L1FMNAttack(steps=10)": ("l1",),
    "foolbox:L2RepeatedAdditiveGaussianNoiseAttack(repeats=5)": ("l2",),
    "art:FastGradientMethod(eps_step=0.05)": ("linf", "l1"),
    "art:BasicIterativeMethod(max_iter=5, eps_step=0.03)": ("linf",),
    "art:CarliniL2Method(max_iter=3, binary_search_steps=2)": ("l2",),
    "art:SquareAttack(max_iter=10)": ("linf",),
    "art:AutoProjectedGradientDescent(max_iter=5, eps_step=0.03, nb_random_init=1)": ("linf",),
}


def attacked(attack, norms=None):
    found, name = {}, attack.partition(":")[2].partition("(")[0]
    for norm in norms or robust_ext.as_attack(attack).traits.norms:
        if attack.startswith("robust_ext:") and name in NEED_DETECTOR:
            found[norm] = small("binarization", attack, norm, samples=3, batch_size=3, **DETECTED)
        else:
            found[norm] = small("robust accuracy", attack, norm, samples=6, batch_size=6)
    return found


for name, settings in OF_CATALOGUE.items():
    case(f"attack {name}", attacked, f"robust_ext:{name}({settings})")
for attack, norms in HOSTED.items():
    case(f"attack {attack}", attacked, attack, norms)


def covered():
    """Return what each catalogue holds; every entry needs a case above."""
    from robust_ext.attacks.catalogue import ATTACKS
    from robust_ext.defenses.catalogue import NAMED
    from robust_ext.detectors.catalogue import PUBLISHED

    names = sorted(kind.__name__ for kind in ATTACKS)
    assert names == sorted(OF_CATALOGUE), "an attack of the catalogue has no case"
    assert sorted(NAMED) == sorted(DEFENSES), "a defense of the catalogue has no case"
    assert len(PUBLISHED) == len(DETECTORS), "a detector of the catalogue has no case"
    return {"attacks": names, "defenses": sorted(NAMED), "detectors": sorted(kind.__name__ for kind in PUBLISHED)}


case("catalogues", covered)


def native_foolbox(name, settings):
    """Return the points of an attack's Foolbox classes."""
    import foolbox

    from robust_ext.adapters.foolbox import attacks

    (inputs, labels), model = digits(4), foolbox.PyTorchModel(network(), bounds=(0, 1), device="cpu")
    stem = {"APGD": "AutoProjectedGradientDescent", "CarliniWagnerLinf": "CarliniWagner"}.get(name, name)
    found = {}
    for kind in (f"{prefix}{stem}Attack" for prefix in ("Linf", "L2", "L1", "")):
        if hasattr(attacks, kind):
            epsilon = EPSILON.get(kind.partition(stem)[0].lower(), 0.15)
            torch.manual_seed(0)
            attack = getattr(attacks, kind)(**eval(f"dict({settings})".replace("learning_rate", "stepsize")))  # noqa: S307
            raw, clipped, success = attack(model, inputs, labels, epsilons=[epsilon / 2, epsilon])
            found[kind] = [[numbers(points) for points in (*raw, *clipped)], success.tolist()]
    assert found, f"Foolbox has no class of {name}"
    return found


def native_art():
    from art.estimators.classification import PyTorchClassifier

    from robust_ext.adapters.art import attacks

    inputs, labels = (values.numpy() for values in digits(4))
    ways = {"loss": nn.CrossEntropyLoss(), "input_shape": (1, 8, 8), "nb_classes": 10, "clip_values": (0.0, 1.0)}
    estimator, found = PyTorchClassifier(network(), **ways), {}
    for norm, order in {"linf": np.inf, "l2": 2, "l1": 1}.items():
        for name, steps in {"APGD": 5, "ObjectivePGD": 4, "Square": 20}.items():
            np.random.seed(0), torch.manual_seed(0)
            attack = getattr(attacks, name)(estimator, norm=order, eps=EPSILON[norm], max_iter=steps, verbose=False)
            found[f"{norm} {name}"] = numbers(torch.as_tensor(attack.generate(inputs, labels)))
    return found


def conformance(name):
    """Return what the matrix of attacks says of one of the project's own."""
    from robust_ext.registry import adapters
    from robust_ext.testing.conformance import TARGETS, conformance_row

    (listing,) = [one for one in adapters()["robust_ext"].list_attacks() if one.name == name]
    return {target: conformance_row("robust_ext", listing, target).to_dict() for target in TARGETS}


for name, settings in OF_CATALOGUE.items():
    if name not in NEED_DETECTOR:
        case(f"native foolbox {name}", native_foolbox, name, settings)
case("native art", native_art)
for name in ("RandomSearch", "ObjectivePGD"):
    case(f"conformance {name}", conformance, name)

# ---- Every detector and every defense.

DETECTORS = ("nss", "kd-bu", "lid", "fs", "magnet", "odds", "dla", "ml-loo", "trapdoor")
DEFENSES = ("hd", "anti-adversary", "soap", "imf", "aid", "sodef", "clc", "reverse", "adp")
DEFENSES += ("bit-depth", "median", "jpeg", "resize-pad", "randomized-smoothing")


def input_gradient(function, inputs):
    leaf = inputs.clone().requires_grad_()
    values = function(leaf)
    if not values.requires_grad:
        return numbers(values), None
    return numbers(values), numbers(torch.autograd.grad(values.sum(), leaf)[0])


def detector_scores(name):
    from tests.detectors import cases

    detector = cases.fitted(name, cases.network())
    detector.calibrate(cases.CLEAN)
    torch.manual_seed(0)
    scores, gradient = input_gradient(detector.score, cases.ADVERSARIAL[:6])
    return {"threshold": detector.threshold, "scores": scores, "gradient": gradient}


def defended_logits(name):
    from tests.defenses.test_every_defense import of_digits

    inputs, _ = digits(4)
    defense = of_digits(name, inputs)
    torch.manual_seed(0)
    logits, gradient = input_gradient(defense, inputs)
    return {"logits": logits, "gradient": gradient}


for name in DETECTORS:
    case(f"detector {name}", detector_scores, name)
for name in DEFENSES:
    case(f"defense {name}", defended_logits, name)

# ---- Data sets, and the command line.


def idx(values):
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def dataset(spec):
    from PIL import Image

    draw = np.random.default_rng(0)
    bytes_of, labels = partial(draw.integers, 0, 256, dtype=np.uint8), np.array([1, 0, 2], np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "mnist" in spec:
            files = {"t10k-images-idx3-ubyte": idx(bytes_of((3, 28, 28))), "t10k-labels-idx1-ubyte": idx(labels)}
            for name, content in files.items():
                (root / f"{name}.gz").write_bytes(gzip.compress(content))
        elif spec.startswith("cifar"):
            columns = [labels, labels] if spec == "cifar100" else [labels]
            rows = np.column_stack([*columns, bytes_of((3, 3072))])
            (root / ("test.bin" if spec == "cifar100" else "test_batch.bin")).write_bytes(rows.tobytes())
        elif spec == "tiny.npz":
            np.savez(root / spec, images=bytes_of((3, 3, 5, 5)), labels=labels)
        else:
            for name in ("b/0.png", "a/1.png", "b/2.png"):
                (root / spec / name).parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(bytes_of((6, 5, 3))).save(root / spec / name)
        data = load_dataset(spec, root=root)
        inputs, classes = data.take(range(len(data)))
    return {
        "shown": repr(data),
        "names": list(data.class_names or ()),
        "inputs": numbers(inputs),
        "labels": classes.tolist(),
    }


for spec in ("mnist", "fashion-mnist", "cifar10", "cifar100", "tiny.npz", "pictures"):
    case(f"data {spec}", dataset, spec)

DIGITS = "--model digits --data digits --samples 6 --no-progress"
COMMON = f"{DIGITS} --attack robust_ext:APGD(steps=4) --eps 0.1"
COMMANDS = {
    "binarization": f"{COMMON} --inner-points 40 --random-inner 10 --random-corners 10 --canaries 1 --depths 1"
    " --in-process",
    "robust-accuracy": f"{COMMON} --norm l2",
    "test-time": f"{DIGITS} --eps 0.1 --defense jpeg(quality=50) --repeats 2 --steps 2 --queries 5 --only naive",
    "diagnose": f"{COMMON} --inner-points 40 --planted 2 --queries 20 --random-points 10 --in-process",
    "mead": f"{DIGITS} --resamples 5 --detector fs --train-samples 60 --calibration-samples 40"
    " --adversarial-samples 20 --arm linf:0.1,0.2=robust_ext:ObjectivePGD(steps=3)",
}


def command(name, options):
    """Run the command line in this process."""
    with tempfile.TemporaryDirectory() as out:
        words, printed = ["robust-ext", name, *options.split(" "), "--out", out], io.StringIO()
        with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(printed):
            try:
                runpy.run_module("robust_ext", run_name="__main__", alter_sys=False)
                status = 0
            except SystemExit as error:
                status = error.code or 0
        files = sorted(path.relative_to(out).as_posix() for path in Path(out).rglob("*") if path.is_file())
        return {"status": status, "content": plain(robust_ext.load_result(out).content), "files": files}


for name, options in COMMANDS.items():
    case(f"command {name}", command, name, options)

# ---- The comparison with the records.


def machine():
    """What rounding depends on: versions, instructions, and the bits of a network's outputs and gradients.

    The sizes of caches decide on the order of sums too.
    """
    torch.set_num_threads(1)
    inputs = load_dataset("digits").take(range(64))[0].requires_grad_()
    logits = network()(inputs)
    (gradients,) = torch.autograd.grad(logits.logsumexp(1).sum(), inputs)
    digest = hashlib.sha256(logits.detach().numpy().tobytes() + gradients.numpy().tobytes()).hexdigest()[:8]
    versions = f"torch {torch.__version__}, numpy {np.__version__}"
    return f"{versions}, {torch.backends.cpu.get_cpu_capability()}, rounding {digest}"


def result_of(name):
    """Return a case's result as JSON restores it; every case starts with the same global generators."""
    torch.set_num_threads(1)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    return json.loads(json.dumps(plain(CASES[name]()), allow_nan=False))


def check(names) -> int:
    """Return how many of these cases differ from their record."""
    recorded, wrong = json.loads(RESULTS.read_text()), []
    elsewhere = recorded["machine"] != machine()
    for name in names:
        if elsewhere and any(part in name for part in SENSITIVE):
            print(f"skipped, recorded on {recorded['machine']}: {name}")
            continue
        try:
            found = differences(result_of(name), recorded.get(name, "not recorded"))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        wrong += [name] * bool(found)
        for line in found[:5]:
            print(f"{name}: {line}")
    print(f"{len(names) - len(wrong)} of {len(names)} results at fixed seeds are those that were recorded")
    return len(wrong)


def record(names) -> None:
    """Record the results of these cases; drop the records of cases that no longer exist."""
    old = json.loads(RESULTS.read_text())
    assert old["machine"] == machine() or len(names) == len(CASES), "record all cases on another machine"
    found = {name: old[name] for name in CASES if name in old} | {name: result_of(name) for name in names}
    found["machine"] = machine()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name], sort_keys=True)}" for name in sorted(found))
    RESULTS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="PART", help="only cases with this in their name")
    parser.add_argument("--record", action="store_true", help="record the results instead of comparing them")
    options = parser.parse_args()
    chosen = [name for name in CASES if options.only in name]
    assert chosen, f"no case has {options.only!r} in its name; there are: {', '.join(CASES)}"
    status = record(chosen) if options.record else min(check(chosen), 1)
    if workers.cache_info().currsize:
        workers().shutdown()
    sys.exit(status)
