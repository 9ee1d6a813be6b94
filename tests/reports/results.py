"""Results of each kind as runs write them, with numbers that differ from each other."""

import json

import numpy as np

from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.reports import Example

CALIBRATION = {
    "chosen": {"kappa": 0.9999, "inner_points": 4999},
    "rows": [
        {"attack": "pgd", "kappa": kappa, "inner_points": inner, "score": 0.9, "random_score": 0.5, "samples": 64}
        for kappa, inner in [(0.99, 999), (0.999, 999), (0.9999, 999), (0.9999, 4999)]
    ],
}
FAILED = {"not_adversarial": 80, "beyond_epsilon": 11, "out_of_bounds": 5, "not_finite": 2}
RESTS_ON = (
    {"non_finite": 0, "without_non_finite": 0.7, "not_attacked": 5},
    {"non_finite": 3, "without_non_finite": 0.43, "not_attacked": 0},
)
_BPDA = Remedy(
    words="Replace the backward pass of net.quantise by the identity.",
    view={"bpda": "net.quantise"},
    paste="attack = AdaptedAttack(\n    attack, bpda='net.quantise'\n)",
)
_NOTHING = Remedy(words="Nothing is to be done", code="if True:\n    pass")
_FOUND = [
    *(
        Finding(
            code="zero_gradient",
            cause="Layer net.quantise kills the gradient",
            evidence=(
                "Gradients were exactly zero in 2000 of 2000 steps.",
                "Candidates equal the inputs.",
            ),
            attack=name,
            samples=49,
            of=50,
            layer="net.quantise",
            remedies=(_BPDA,),
        )
        for name in ("pgd", "ddn")
    ),
    *(
        Finding(code=code, cause="No gradient was asked for.", remedies=(_NOTHING,))
        for code in ("probabilities", "no_gradient")
    ),
]
FINDINGS = [json.loads(json.dumps(one.to_dict())) for one in _FOUND]
"""What the diagnosis found, with and without all the optional parts."""

VERSIONS = {"robust_ext": "0.1.0", "torch": "2.5.1"}


def shown(value):
    """A share as tables and pages write it."""
    return "-" if value is None else f"{value * 100:.1f}"


def every_float(value):
    """Every number anywhere in a result."""
    if isinstance(value, dict):
        return every_float(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(every_float, value))
    return {value} if isinstance(value, float) else set()


def depth_row(depth, problems, found, random_found, by_others):
    """An attack at one depth; ``by_others``: problems that others prove, those of them it solves, and random search."""
    return {
        "depth": depth,
        "problems": problems,
        "found": found,
        "score": found / problems,
        "score_interval": [max(found / problems - 0.1, 0), min(found / problems + 0.1, 1)],
        "random_found": random_found,
        "random_score": random_found / problems,
        **dict(zip(("problems_by_others", "found_by_others", "random_found_by_others"), by_others, strict=True)),
    }


DEPTHS = [depth_row(1.0, 256, 157, 31, (256, 157, 31)), depth_row(2.0, 192, 48, 4, (160, 40, 3))]


def make_time(attacks):
    """What it took: planting by a folded copy, attacks, and a rest of which no rows are known."""

    def row(phase, of, forward, backward, seconds):
        return {"phase": phase, "of": of, "forward": forward, "backward": backward, "seconds": seconds}

    rows = [
        row("features", None, 64000, 0, 41.5),
        *(row("attack", name, 6400, 6400, 12.5) for name in attacks),
        row("rest", None, 0, 0, 3.25),
    ]
    whole = (sum(one[key] or 0 for one in rows) for key in ("forward", "backward", "seconds"))
    total = row(None, None, *whole)
    return {"phases": rows, "total": {key: total[key] for key in list(total)[2:]}, "wall": 21.0}


def make_attack(name, **changes):
    """The entry of one attack in a binarization test; ``changes`` replaces whole values."""
    entry = {
        "name": name,
        "target": "",
        "score": 0.61328125,
        "score_interval": [0.5546875, 0.6690625],
        "random_score": 0.12109375,
        "random_score_interval": [0.0837, 0.1671],
        "verdict": "failed",
        "reason": "157 of 256 planted problems were solved.",
        "depth": None,
        "depths": DEPTHS,
        "samples": 256,
        "not_separable": 3,
        "not_planted": 7,
        "outcomes": {"found": 157, "rejected": 1, **FAILED, "ended": 5},
        "canaries": {"planted": 37, "repaired": 9},
        "seconds": {"features": 41.5, "readout": 3.25, "attack": 22.5, "random": 18.75, "verify": 0.5, "total": 87.0},
        "passes": {"forward": 716811, "backward": 10249},
        "hardness": [
            {"kappa": 0.9, "score": 0.83, "random_score": 0.41},
            {"kappa": 0.99, "score": 0.72, "random_score": 0.22},
        ],
    }
    assert changes.keys() <= entry.keys()
    return {**entry, **changes}


def make_pair(name):
    """The entry of an attack that went through a regular and an inverted test."""
    planting = {"samples": 270}
    tests = {
        "regular": {**make_attack(name), "planting": planting},
        "inverted": {**make_attack(name, score=0.25, score_interval=[0.2, 0.31]), "planting": planting},
    }
    entry = make_attack(name, score=0.25, reason="It ignores the detector.")
    return {**{key: entry[key] for key in ("name", "target", "score", "verdict", "reason")}, "tests": tests}


def make_result(attacks, **changes):
    """A binarization test of these attacks; ``changes`` replaces whole values."""
    entry = {
        "kind": "binarization",
        "verdict": "failed",
        "reason": "Planted adversarial examples were missed.",
        "attacks": attacks,
        "warnings": ["pgd: 5 of 256 samples: the attack's process ended."],
        "findings": [],
        "calibration": None,
        "settings": {"norm": "linf", "epsilon": 8 / 255, "threshold": 0.95, "kappa": 0.999, "depths": [1.0, 2.0, 4.0]},
        "isolated": True,
        "versions": VERSIONS,
        "seed": 20240501,
        "time": make_time([attack["name"] for attack in attacks]),
    }
    assert changes.keys() <= entry.keys()
    return {**entry, **changes}


def make_robust_accuracy(*names, **changes):
    """Robust accuracy under these attacks at two budgets; ``changes`` replaces whole values."""

    def curve(*rows):
        return [
            {"epsilon": epsilon, "robust_accuracy": value, "interval": interval, **more}
            for epsilon, (value, *interval), more in zip((0.5, 1.0), rows, RESTS_ON, strict=True)
        ]

    attacks = [
        {
            "name": name,
            "description": f"{name}(steps={place})",
            "kind": "fixed epsilon",
            "robust_accuracy": curve((0.75 - place / 100, 0.65, 0.83), (0.5 - place / 50, 0.4, 0.6)),
            "difference": {"mean": 0.01 * place, "maximum": 0.02 * place},
            "distances": [None, 0.25, 0.75] if place else None,
            "outcomes": {"found": 70, "non_finite_logits": 3 * place, "not_adversarial": 27},
            "passes": {"forward": 1000 + place, "backward": 900 + place},
            "seconds": 12.5 + place,
        }
        for place, name in enumerate(names)
    ]
    return {
        "kind": "robust_accuracy",
        "norm": "l2",
        "samples": 100,
        "clean_accuracy": 0.95,
        "attacks": attacks,
        "worst_case": curve((0.7, 0.6, 0.79), (0.4, 0.3, 0.5)),
        "warnings": ["ddn: 5 of 100 samples: the attack's process ended."],
        "settings": {"norm": "l2", "batch_size": 100, "seed": 3},
        "isolated": True,
        "versions": VERSIONS,
        "time": make_time(names),
        **changes,
    }


def make_adaptive(*names, **changes):
    """A random defense that helps a little against these attacks; ``changes`` replaces whole values."""

    def part(accuracy):
        attacks = [
            {
                "name": name,
                "category": "transfer" if place else "BPDA",
                "robust_accuracy": accuracy + place / 100,
                "interval": [accuracy - 0.05, accuracy + 0.06],
                "deviation": 0.0125,
                "passes": {"forward": 500 + place, "backward": 400 + place},
                "seconds": 3.5 + place,
            }
            for place, name in enumerate(names)
        ]
        worst = {
            "robust_accuracy": accuracy - 0.02,
            "deviation": 0.01,
            **RESTS_ON[accuracy == 0.5],
            "without_non_finite": accuracy,
        }
        by = {"clean": 2, **{name: 5 + place for place, name in enumerate(names)}}
        return {"clean_accuracy": accuracy + 0.3, "attacks": attacks, "worst_case": {**worst, "by": by}}

    return {
        "kind": "test_time",
        "defense": "Purifier",
        "random": True,
        "batch_level": False,
        "norm": "linf",
        "epsilon": 0.1,
        "samples": 64,
        "static": part(0.25),
        "defended": part(0.5),
        "gain": {"robust_accuracy": 0.25, "interval": [0.1, 0.4]},
        "cost": {"seconds_ratio": 3.25, "forward": 7, "backward": 2},
        "categories": [{"category": "BPDA", "alone": 0.5, "without": 0.55}],
        "refused": [{"name": "RayS", "reason": "Its predictions change."}],
        "warnings": ["Gradients are zero on 10% of the samples."],
        "settings": {"steps": 50, "seed": 1},
        "isolated": True,
        "versions": VERSIONS,
        "time": make_time(names),
        **changes,
    }


def make_evaluation(*names, **changes):
    """An evaluation with a certificate and a refuted claim, by these attacks; ``changes`` replaces whole values."""
    steps = [
        {
            "name": name,
            "text": f"{name}(steps={place})",
            "description": f"{name}(steps={place})",
            "white_box": True,
            "samples": 60 - place,
            "broken": 40 - place,
            "robust_accuracy": 0.25 - place / 8,
            "interval": [0.1, 0.3 - place / 100],
            "outcomes": {"found": 40 - place, "not_adversarial": 20},
            "seconds": 2.5 + place,
            "passes": {"forward": 1200 + place, "backward": 600 + place},
        }
        for place, name in enumerate(names)
    ]
    certificate = {
        "attack": names[0],
        "text": f"{names[0]}(steps=0)",
        "verdict": "passed",
        "certified": True,
        "words": "certified: it finds 63 of 64 planted examples, to depth 4",
        "reason": "It found 63 of 64 planted examples (0.98).",
        "found": 63,
        "planted": 64,
        "score": 0.984375,
        "interval": [0.916, 0.9996],
        "random_score": 0.15625,
        "depth": 4.0,
        "witness_depth": 4.0,
        "head": [],
        "findings": [],
        "warnings": [],
    }
    return {
        "kind": "evaluation",
        "verdict": "passed",
        "stopped": None,
        "samples": 64,
        "clean_accuracy": 0.9375,
        "norm": "linf",
        "epsilon": 8 / 255,
        "findings": [],
        "worst_case": {
            "robust_accuracy": 0.125,
            "interval": [0.0556, 0.2315],
            "samples": 64,
            "broken": 52,
            "not_attacked": 2,
            "robust": "1" * 8 + "0" * 56,
        },
        "steps": steps,
        "found_by": [None] * 8 + [names[0]] * 56,
        "curve": [
            {"epsilon": size, "robust_accuracy": share}
            for size, share in ((0.0, 0.9375), (0.02, 0.5), (8 / 255, 0.125), (0.05, 0.0625))
        ],
        "certificate": certificate,
        "recipe": {"text": f"{names[0]}(steps=0)", "foolbox": "attack = 1 < 2\n", "art": "attack = 2 > 1\n"},
        "search": None,
        "claim": {"claimed": 60.0, "outcome": "refuted"},
        "not_tried": [{"name": "Square", "reason": "the time that was given was over"}],
        "warnings": ["ddn: 2 of 64 samples: the attack's process ended."],
        "settings": {"budget": "standard", "model_origin": "net.py:make", "claim": 60.0, "seed": 3},
        "isolated": True,
        "versions": VERSIONS,
        "seed": 3,
        "time": make_time(names),
        **changes,
    }


def make_example(**changes):
    """An image of sixteen greys on which the attack changed nothing; ``changes`` replaces whole values."""
    clean = changes.pop("clean", np.linspace(0, 1, 16).reshape(1, 4, 4))
    entry = {"attack": "pgd", "sample": 3, "outcome": "found", "candidate": clean, "bounds": (0.0, 1.0)}
    return Example(clean=clean, **{**entry, **changes})


def make_diagnosis(*names, **changes):
    """A diagnosis of these attacks, with a remedy that was tried; ``changes`` replaces whole values."""

    def ran(name, place, **more):
        margins = (-3.5, -1.25 + place, None)
        curve = [
            {"query": query, "margin": margin, "distance": 0.25 * query, "gradient": 0.5, "adversarial": 0.0}
            for query, margin in enumerate(margins)
        ]
        return {
            "name": name,
            "description": f"{name}(steps={place})",
            "kind": "fixed epsilon",
            "epsilon": 0.125,
            "robust_accuracy": 0.75 - place / 8,
            "interval": [0.4, 0.9],
            "not_attacked": 0,
            "curve": curve,
            "seconds": 1.5 + place,
            "passes": {"forward": 320, "backward": 320},
            "error": None,
            **more,
        }

    planted = {
        "score": 0.375,
        "score_interval": [0.15, 0.65],
        "random_score": 0.125,
        "verdict": "failed",
        "planted": 16,
    }
    layers = [
        {"name": name, "kind": "Conv2d", "leaf": leaf, "gradient_norm": norm, "fault": fault}
        for name, leaf, norm, fault in (
            ("", False, 1.5, None),
            ("net.conv", True, 0.0, None),
            ("net.quantise", True, 0.25, "zero_gradient"),
            ("net.head", True, 3.5, None),
            ("net.unused", True, None, None),
        )
    ]
    before = {"robust_accuracy": 0.75, "samples": 32, "score": 0.375, "planted": 16, "error": None}
    attacks = [
        ran(
            name,
            place,
            **planted,
            not_planted=None,
            larger={role: ran(name, place + more) for more, role in enumerate(("larger", "unbounded"), 1) if not place},
            reach=[0.625, 0.6875, 1.0],
        )
        for place, name in enumerate(names)
    ]
    raised = ran("raises", 0, robust_accuracy=None, interval=None, curve=[], passes={}, error="raises: ValueError")
    raised |= {**dict.fromkeys(planted), "planted": 0, "not_planted": None, "larger": {}, "reach": []}
    return {
        "kind": "diagnosis",
        "likely": FINDINGS[0],
        "reason": "The likely cause of pgd: Layer net.quantise kills the gradient",
        "samples": 32,
        "clean_accuracy": 0.9375,
        "norm": "linf",
        "epsilon": 0.125,
        "model": {
            "name": "Rounded",
            "inputs": [0.0, 1.0],
            "logits": [-41.5, 31.25],
            "mode": "eval",
            "probe": {"findings": [{**FINDINGS[2], "code": "saturated_layer"}], "layers": layers},
        },
        "attacks": [*attacks, raised],
        "references": [ran("Square", 3)],
        "findings": FINDINGS,
        "tried": [
            {
                "code": "zero_gradient",
                "attack": "pgd",
                "remedy": FINDINGS[0]["remedies"][0],
                "before": before,
                "after": {**before, "robust_accuracy": 0.0, "score": 1.0},
                "confirmed": True,
                "error": None,
            }
        ],
        "next": [{"words": "Run the full test.", "command": "robust-ext binarization --attack 'pgd'"}],
        "not_run": None,
        "warnings": ["pgd: 5 of 32 samples: the attack's process ended."],
        "settings": {"planted": 16, "inner_points": 199},
        "isolated": True,
        "versions": VERSIONS,
        "seed": 3,
        "time": make_time(["pgd"]),
        **changes,
    }


def make_reproduction(name):
    """A result of ``robust-ext reproduce``."""
    figure = {"name": name, "quantity": "test score", "paper": "0.260", "ours": 0.3125, "difference": 0.0525}
    bound = {"name": "mmc", "quantity": "test score", "paper": "< .95", "ours": None, "difference": None}
    return {
        "kind": "reproduction",
        "paper": "Binarization test",
        "item": "figure 2",
        "what": "test scores",
        "setup": "small versions of the defenses on digits",
        "where": "`robust-ext casestudies`",
        "figures": [{**figure, "agrees": True}, {**bound, "agrees": None}],
        "agree": 1,
        "compared": 1,
        "tolerance": 0.1,
        "settings": {"data": "digits", "samples": 64},
        "versions": VERSIONS,
        "seed": 0,
    }


def make_case_studies(name):
    """A result of two case studies: one whose authors' recipe fails, and one in which it runs on a random model."""
    test = {
        "verdict": "failed",
        "reason": "It found 12 of 64 planted examples.",
        "findings": FINDINGS,
        "score": 0.1875,
        "score_interval": [0.1, 0.3],
        "random_score": 0.03125,
        "random_score_interval": [0.0, 0.11],
        "samples": 64,
        "canaries": {"planted": 8, "repaired": 0},
        "depth": None,
        "depths": None,
        "hardness": make_attack(name)["hardness"],
        "tests": {},
    }
    weak = {
        "attack": "robust_ext:APGD(steps=5)",
        "words": "No BPDA.",
        "robust_accuracy": {"claimed": 0.8125, "verified": 0.796875},
        "refused": None,
        "flagged_by": "score",
        **test,
    }
    passed = {"verdict": "passed", "score": 1.0, "score_interval": [0.94, 1.0], "flagged_by": None, "depth": 4.0}
    right = {**weak, "robust_accuracy": {"claimed": 0.1, "verified": 0.1}, **passed}
    nothing = dict.fromkeys((*test, "flagged_by"))
    refused = {**weak, **nothing, "verdict": "refused", "refused": "model: is random", "flagged_by": "refused"}
    study = {
        "name": "thermometer",
        "title": name,
        "source": "Buckman et al. 2018",
        "notes": "The authors overwrite the sign of the gradient.",
        "epsilon": 0.1,
        "clean_accuracy": 0.953125,
        "mechanism": {"values": {"zero gradients": 1.0}, "present": True, "words": "All gradients are zero."},
        "published": {"claimed": 0.3, "true": 0.0, "weak_score": "< 0.95", "right_score": None},
        "causes": ["zero_gradient"],
        "recipes": {"weak": weak, "right": right},
        "seconds": 12.5,
    }
    unseen = {**study["mechanism"], "present": False}
    other = {"recipes": {"weak": {**refused, "tests": {}}, "right": right}, "mechanism": unseen, "title": f"Not {name}"}
    return {
        "kind": "case_studies",
        "studies": [study, {**study, **other}],
        "flagged": 2,
        "passed": 2,
        "samples": 64,
        "settings": {"data": "digits", "images": 1297},
        "versions": VERSIONS,
        "seed": 0,
        "time": make_time(["weak", "right"]),
    }
