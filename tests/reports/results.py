"""Results of each kind as runs write them, with numbers that differ from each other.

``changes`` replaces values of what is made. Results of MEAD are made from drawn scores by what makes the rows of real
ones.
"""

import json
from types import SimpleNamespace

import numpy as np

from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.mead import MeadSettings
from robust_ext.evaluations.mead.summary import ArmResult, DetectorRows, arm_row
from robust_ext.reports import Example

_CALIBRATED = {"attack": "pgd", "score": 0.9, "random_score": 0.5, "samples": 64}
_POINTS = [{"kappa": 0.99, "inner_points": 999}, {"kappa": 0.999, "inner_points": 999}]
_POINTS += [{"kappa": 0.9999, "inner_points": 999}, {"kappa": 0.9999, "inner_points": 4999}]
CALIBRATION = {"chosen": _POINTS[-1], "rows": [{**_CALIBRATED, **points} for points in _POINTS]}
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
_EVIDENCE = ("Gradients were exactly zero in 2000 of 2000 steps.", "Candidates equal the inputs.")
_ZERO = {"code": "zero_gradient", "cause": "Layer net.quantise kills the gradient", "evidence": _EVIDENCE}
_ZERO |= {"samples": 49, "of": 50, "layer": "net.quantise", "remedies": (_BPDA,)}
_FOUND = [Finding(**_ZERO, attack=name) for name in ("pgd", "ddn")]
for _code in ("probabilities", "no_gradient"):
    _FOUND.append(Finding(code=_code, cause="No gradient was asked for.", remedies=(_NOTHING,)))
FINDINGS = [json.loads(json.dumps(one.to_dict())) for one in _FOUND]
"""What the diagnosis found, with and without all the optional parts."""

VERSIONS = {"robust_ext": "0.1.0", "torch": "2.5.1"}
_ENDED = "5 of {} samples: the attack's process ended."


def shown(value):
    return "-" if value is None else f"{value * 100:.1f}"


def depth_row(depth, problems, found, random_found, by_others):
    """An attack at one depth; ``by_others``: problems that others prove, those of them it solves, and random search."""
    score = found / problems
    row = {"depth": depth, "problems": problems, "found": found, "score": score}
    row |= {"score_interval": [max(score - 0.1, 0), min(score + 0.1, 1)]}
    row |= {"random_found": random_found, "random_score": random_found / problems}
    keys = ("problems_by_others", "found_by_others", "random_found_by_others")
    return row | dict(zip(keys, by_others, strict=True))


DEPTHS = [depth_row(1.0, 256, 157, 31, (256, 157, 31)), depth_row(2.0, 192, 48, 4, (160, 40, 3))]


def make_time(attacks):
    rows = [("features", None, 64000, 0, 41.5), *(("attack", name, 6400, 6400, 12.5) for name in attacks)]
    keys = ("phase", "of", "forward", "backward", "seconds")
    phases = [dict(zip(keys, row, strict=True)) for row in (*rows, ("rest", None, 0, 0, 3.25))]
    return {"phases": phases, "total": {key: sum(row[key] for row in phases) for key in keys[2:]}, "wall": 21.0}


def make_attack(name, **changes):
    failed = {"not_adversarial": 80, "beyond_epsilon": 11, "out_of_bounds": 5, "not_finite": 2}
    entry = {"name": name, "target": "", "score": 0.61328125, "score_interval": [0.5546875, 0.6690625]}
    entry |= {"random_score": 0.12109375, "random_score_interval": [0.0837, 0.1671], "verdict": "failed"}
    entry |= {"reason": "157 of 256 planted problems were solved.", "depth": None, "depths": DEPTHS, "samples": 256}
    entry |= {"not_separable": 3, "not_planted": 7, "outcomes": {"found": 157, "rejected": 1, **failed, "ended": 5}}
    seconds = {"features": 41.5, "readout": 3.25, "attack": 22.5, "random": 18.75, "verify": 0.5, "total": 87.0}
    entry |= {"canaries": {"planted": 37, "repaired": 9}, "seconds": seconds}
    hardness = [(0.9, 0.83, 0.41), (0.99, 0.72, 0.22)]
    rows = [dict(zip(("kappa", "score", "random_score"), row, strict=True)) for row in hardness]
    entry |= {"passes": {"forward": 716811, "backward": 10249}, "hardness": rows}
    assert changes.keys() <= entry.keys()
    return entry | changes


def make_pair(name):
    own = {"score": 0.25, "score_interval": [0.2, 0.31]}
    tests = {"regular": make_attack(name), "inverted": make_attack(name, **own)}
    entry = make_attack(name, score=0.25, reason="It ignores the detector.")
    entry = {key: entry[key] for key in ("name", "target", "score", "verdict", "reason")}
    return entry | {"tests": {key: test | {"planting": {"samples": 270}} for key, test in tests.items()}}


def make_result(attacks, **changes):
    settings = {"norm": "linf", "epsilon": 8 / 255, "threshold": 0.95, "kappa": 0.999, "depths": [1.0, 2.0, 4.0]}
    entry = {"kind": "binarization", "verdict": "failed", "reason": "Planted adversarial examples were missed."}
    entry |= {"attacks": attacks, "warnings": [f"pgd: {_ENDED.format(256)}"], "findings": [], "calibration": None}
    entry |= {"settings": settings, "isolated": True, "versions": VERSIONS, "seed": 20240501}
    entry |= {"time": make_time([attack["name"] for attack in attacks])}
    assert changes.keys() <= entry.keys()
    return entry | changes


def make_robust_accuracy(*names, **changes):

    def curve(*rows):
        return [
            {"epsilon": epsilon, "robust_accuracy": value, "interval": interval, **more}
            for epsilon, (value, *interval), more in zip((0.5, 1.0), rows, RESTS_ON, strict=True)
        ]

    def attack(place, name):
        entry = {"name": name, "description": f"{name}(steps={place})", "kind": "fixed epsilon"}
        entry |= {"robust_accuracy": curve((0.75 - place / 100, 0.65, 0.83), (0.5 - place / 50, 0.4, 0.6))}
        entry |= {"difference": {"mean": 0.01 * place, "maximum": 0.02 * place}}
        entry |= {"distances": [None, 0.25, 0.75] if place else None}
        entry |= {"outcomes": {"found": 70, "non_finite_logits": 3 * place, "not_adversarial": 27}}
        return entry | {"passes": {"forward": 1000 + place, "backward": 900 + place}, "seconds": 12.5 + place}

    result = {"kind": "robust_accuracy", "norm": "l2", "samples": 100, "clean_accuracy": 0.95}
    result |= {"attacks": [attack(place, name) for place, name in enumerate(names)]}
    result |= {"worst_case": curve((0.7, 0.6, 0.79), (0.4, 0.3, 0.5)), "warnings": [f"ddn: {_ENDED.format(100)}"]}
    result |= {"settings": {"norm": "l2", "batch_size": 100, "seed": 3}, "isolated": True, "versions": VERSIONS}
    return result | {"time": make_time(names), **changes}


def make_adaptive(*names, **changes):
    def attack(place, name, accuracy):
        entry = {"name": name, "category": "transfer" if place else "BPDA", "robust_accuracy": accuracy + place / 100}
        entry |= {"interval": [accuracy - 0.05, accuracy + 0.06], "deviation": 0.0125}
        return entry | {"passes": {"forward": 500 + place, "backward": 400 + place}, "seconds": 3.5 + place}

    def part(accuracy):
        attacks = [attack(place, name, accuracy) for place, name in enumerate(names)]
        worst = {"robust_accuracy": accuracy - 0.02, "deviation": 0.01, **RESTS_ON[accuracy == 0.5]}
        by = {"clean": 2, **{name: 5 + place for place, name in enumerate(names)}}
        worst |= {"without_non_finite": accuracy, "by": by}
        return {"clean_accuracy": accuracy + 0.3, "attacks": attacks, "worst_case": worst}

    result = {"kind": "test_time", "defense": "Purifier", "random": True, "batch_level": False, "norm": "linf"}
    result |= {"epsilon": 0.1, "samples": 64, "static": part(0.25), "defended": part(0.5)}
    result |= {"gain": {"robust_accuracy": 0.25, "interval": [0.1, 0.4]}}
    result |= {"cost": {"seconds_ratio": 3.25, "forward": 7, "backward": 2}}
    result |= {"categories": [{"category": "BPDA", "alone": 0.5, "without": 0.55}]}
    result |= {"refused": [{"name": "RayS", "reason": "Its predictions change."}]}
    result |= {"warnings": ["Gradients are zero on 10% of the samples."], "settings": {"steps": 50, "seed": 1}}
    return result | {"isolated": True, "versions": VERSIONS, "time": make_time(names), **changes}


def make_evaluation(*names, **changes):
    def step(place, name):
        text = f"{name}(steps={place})"
        entry = {"name": name, "text": text, "description": text, "white_box": True, "samples": 60 - place}
        entry |= {"broken": 40 - place, "robust_accuracy": 0.25 - place / 8, "interval": [0.1, 0.3 - place / 100]}
        entry |= {"outcomes": {"found": 40 - place, "not_adversarial": 20}, "seconds": 2.5 + place}
        return entry | {"passes": {"forward": 1200 + place, "backward": 600 + place}}

    text = f"{names[0]}(steps=0)"
    certificate = {"attack": names[0], "text": text, "verdict": "passed", "certified": True}
    certificate |= {"words": "certified: it finds 63 of 64 planted examples, to depth 4"}
    certificate |= {"reason": "It found 63 of 64 planted examples (0.98).", "found": 63, "planted": 64}
    certificate |= {"score": 0.984375, "interval": [0.916, 0.9996], "random_score": 0.15625, "depth": 4.0}
    certificate |= {"witness_depth": 4.0, "head": [], "findings": [], "warnings": []}
    worst = {"robust_accuracy": 0.125, "interval": [0.0556, 0.2315], "samples": 64, "broken": 52}
    worst |= {"not_attacked": 2, "robust": "1" * 8 + "0" * 56}
    curve = [(0.0, 0.9375), (0.02, 0.5), (8 / 255, 0.125), (0.05, 0.0625)]
    result = {"kind": "evaluation", "verdict": "passed", "stopped": None, "samples": 64, "clean_accuracy": 0.9375}
    result |= {"norm": "linf", "epsilon": 8 / 255, "findings": [], "worst_case": worst}
    result |= {"steps": [step(place, name) for place, name in enumerate(names)]}
    result |= {"found_by": [None] * 8 + [names[0]] * 56}
    result |= {"curve": [{"epsilon": size, "robust_accuracy": share} for size, share in curve]}
    result |= {"certificate": certificate, "search": None, "claim": {"claimed": 60.0, "outcome": "refuted"}}
    result |= {"recipe": {"text": text, "foolbox": "attack = 1 < 2\n", "art": "attack = 2 > 1\n"}}
    result |= {"not_tried": [{"name": "Square", "reason": "the time that was given was over"}]}
    result |= {"warnings": [f"ddn: {_ENDED.replace('5', '2').format(64)}"], "isolated": True, "versions": VERSIONS}
    result |= {"settings": {"budget": "standard", "model_origin": "net.py:make", "claim": 60.0, "seed": 3}}
    return result | {"seed": 3, "time": make_time(names), **changes}


def make_example(**changes):
    """An image of sixteen greys on which the attack changed nothing."""
    clean = changes.pop("clean", np.linspace(0, 1, 16).reshape(1, 4, 4))
    entry = {"attack": "pgd", "sample": 3, "outcome": "found", "candidate": clean, "bounds": (0.0, 1.0)}
    return Example(clean=clean, **{**entry, **changes})


def make_diagnosis(*names, **changes):
    def ran(name, place, **more):
        rest = {"gradient": 0.5, "adversarial": 0.0}
        margins = enumerate((-3.5, -1.25 + place, None))
        curve = [{"query": at, "margin": margin, "distance": 0.25 * at, **rest} for at, margin in margins]
        entry = {"name": name, "description": f"{name}(steps={place})", "kind": "fixed epsilon", "epsilon": 0.125}
        entry |= {"robust_accuracy": 0.75 - place / 8, "interval": [0.4, 0.9], "not_attacked": 0, "curve": curve}
        passes = {"forward": 320, "backward": 320}
        return entry | {"seconds": 1.5 + place, "passes": passes, "error": None, **more}

    def attack(place, name):
        larger = {role: ran(name, place + more) for more, role in enumerate(("larger", "unbounded"), 1) if not place}
        return ran(name, place, **planted, not_planted=None, larger=larger, reach=[0.625, 0.6875, 1.0])

    planted = {"score": 0.375, "score_interval": [0.15, 0.65], "random_score": 0.125}
    planted |= {"verdict": "failed", "planted": 16}
    raised = ran("raises", 0, robust_accuracy=None, interval=None, curve=[], passes={}, error="raises: ValueError")
    raised |= {**dict.fromkeys(planted), "planted": 0, "not_planted": None, "larger": {}, "reach": []}
    layers = [("", False, 1.5, None), ("net.conv", True, 0.0, None), ("net.quantise", True, 0.25, "zero_gradient")]
    layers += [("net.head", True, 3.5, None), ("net.unused", True, None, None)]
    keys = ("name", "leaf", "gradient_norm", "fault")
    probe = {"findings": [{**FINDINGS[2], "code": "saturated_layer"}]}
    probe |= {"layers": [{"kind": "Conv2d", **dict(zip(keys, layer, strict=True))} for layer in layers]}
    model = {"name": "Rounded", "inputs": [0.0, 1.0], "logits": [-41.5, 31.25], "mode": "eval", "probe": probe}
    before = {"robust_accuracy": 0.75, "samples": 32, "score": 0.375, "planted": 16, "error": None}
    tried = {"code": "zero_gradient", "attack": "pgd", "remedy": FINDINGS[0]["remedies"][0], "before": before}
    tried |= {"after": {**before, "robust_accuracy": 0.0, "score": 1.0}, "confirmed": True, "error": None}
    result = {"kind": "diagnosis", "likely": FINDINGS[0], "samples": 32, "clean_accuracy": 0.9375}
    result |= {"reason": "The likely cause of pgd: Layer net.quantise kills the gradient", "norm": "linf"}
    result |= {"epsilon": 0.125, "model": model, "references": [ran("Square", 3)], "findings": FINDINGS}
    result |= {"attacks": [*(attack(place, name) for place, name in enumerate(names)), raised], "tried": [tried]}
    result |= {"next": [{"words": "Run the full test.", "command": "robust-ext binarization --attack 'pgd'"}]}
    result |= {"not_run": None, "warnings": [f"pgd: {_ENDED.format(32)}"], "isolated": True, "versions": VERSIONS}
    result |= {"settings": {"planted": 16, "inner_points": 199}, "seed": 3, "time": make_time(["pgd"])}
    return result | changes


def make_reproduction(name):
    figure = {"name": name, "quantity": "test score", "paper": "0.260", "ours": 0.3125, "difference": 0.0525}
    bound = {"name": "mmc", "quantity": "test score", "paper": "< .95", "ours": None, "difference": None}
    result = {"kind": "reproduction", "paper": "Binarization test", "item": "figure 2", "what": "test scores"}
    result |= {"setup": "small versions of the defenses on digits", "where": "`robust-ext casestudies`"}
    result |= {"figures": [{**figure, "agrees": True}, {**bound, "agrees": None}], "agree": 1, "compared": 1}
    result |= {"tolerance": 0.1, "settings": {"data": "digits", "samples": 64}, "versions": VERSIONS, "seed": 0}
    return result


def make_case_studies(name):
    """A result of two case studies: one whose authors' recipe fails, and one in which it runs on a random model."""
    test = {"verdict": "failed", "reason": "It found 12 of 64 planted examples.", "findings": FINDINGS}
    test |= {"score": 0.1875, "score_interval": [0.1, 0.3], "random_score": 0.03125, "samples": 64}
    test |= {"random_score_interval": [0.0, 0.11], "canaries": {"planted": 8, "repaired": 0}, "depth": None}
    test |= {"depths": None, "hardness": make_attack(name)["hardness"], "tests": {}}
    weak = {"attack": "robust_ext:APGD(steps=5)", "words": "No BPDA.", "refused": None, "flagged_by": "score"}
    weak |= {"robust_accuracy": {"claimed": 0.8125, "verified": 0.796875}, **test}
    passed = {"verdict": "passed", "score": 1.0, "score_interval": [0.94, 1.0], "flagged_by": None, "depth": 4.0}
    right = {**weak, "robust_accuracy": {"claimed": 0.1, "verified": 0.1}, **passed}
    refused = {**weak, **dict.fromkeys(test), "verdict": "refused", "refused": "model: is random", "tests": {}}
    mechanism = {"values": {"zero gradients": 1.0}, "present": True, "words": "All gradients are zero."}
    study = {"name": "thermometer", "title": name, "source": "Buckman et al. 2018", "epsilon": 0.1}
    study |= {"notes": "The authors overwrite the sign of the gradient.", "clean_accuracy": 0.953125}
    study |= {"mechanism": mechanism, "causes": ["zero_gradient"], "recipes": {"weak": weak, "right": right}}
    study |= {"published": {"claimed": 0.3, "true": 0.0, "weak_score": "< 0.95", "right_score": None}, "seconds": 12.5}
    other = {"recipes": {"weak": refused | {"flagged_by": "refused"}, "right": right}, "title": f"Not {name}"}
    other |= {"mechanism": mechanism | {"present": False}}
    result = {"kind": "case_studies", "studies": [study, study | other], "flagged": 2, "passed": 2, "samples": 64}
    result |= {"settings": {"data": "digits", "images": 1297}, "versions": VERSIONS, "seed": 0}
    return result | {"time": make_time(["weak", "right"])}


SHORT = {"ace": "ACE", "kl": "KL", "gini": "Gini", "fisher-rao": "FR"}


def make_arm(name, group, **values):
    keys = ("norm", "epsilon", "objective", "algorithm", "adaptive_to")
    arm = SimpleNamespace(name=name, group=group, **{**dict.fromkeys(keys), **values})
    kind = "minimum norm" if arm.epsilon is None else "fixed epsilon"
    description = f"robust_ext:ObjectivePGD(objective={arm.objective!r}, steps=100)"
    arm.resolved = SimpleNamespace(description=description, traits=SimpleNamespace(kind=kind))
    return arm


ALGORITHMS = {"l1": ("pgd",), "linf": ("pgd", "bim", "fgsm")}


def arms_of(*groups):
    """The arms of these groups in the paper's suite: each algorithm with each objective, or one arm of no norm."""
    arms = []
    for group in groups:
        norm, _, epsilon = group.partition(" ")
        for algorithm in ALGORITHMS.get(norm, ()):
            place = {"norm": norm, "epsilon": float(epsilon), "algorithm": algorithm}
            name = f"{algorithm.upper()}-{{}} {group}"
            arms += [make_arm(name.format(title), group, objective=one, **place) for one, title in SHORT.items()]
        if not epsilon:
            arms.append(make_arm(group, group))
    return arms


def adaptive(detector, arms):
    same = {"norm": "linf", "objective": "ace", "algorithm": "pgd", "adaptive_to": detector}
    return [
        make_arm(f"PGD-ACE {group}, knowing {detector}", group, epsilon=epsilon, **same)
        for group, epsilon in dict.fromkeys((arm.group, arm.epsilon) for arm in arms if arm.norm == "linf")
    ]


def make_mead(arms, detectors, *, samples, white_box=(), combines=None, rates=None, unscored=0, published=False):
    """A result of these arms, which are not adaptive, others adaptive to the detectors of ``white_box``, and detectors.

    ``combines`` holds members by detector, ``rates`` by group how often its arms succeed (0.3 to 0.95 otherwise);
    ``unscored`` of the first detector's scores of the first arm are no numbers.
    """
    draw = np.random.default_rng(0)
    everything = [*arms, *(arm for name in white_box for arm in adaptive(name, arms))]
    chances = [(rates or {}).get(arm.group, draw.uniform(0.3, 0.95)) for arm in everything]
    success = draw.random((len(everything), samples)) < np.array(chances)[:, None]
    natural = {name: draw.normal(size=samples) for name in detectors}
    scores = {}
    for name in detectors:
        shift = np.array([draw.uniform(-0.2, 1.8) - (1.5 if arm.adaptive_to == name else 0) for arm in everything])
        scores[name] = draw.normal(size=success.shape) + shift[:, None]
    if unscored:
        scores[detectors[0]][0, :unscored] = np.nan
        success[0, :unscored] = True

    def arm_result(place, arm):
        found = success[place]
        own = {"success": found, "finite": found, "lost": np.zeros_like(found)}
        outcomes = {"found": int(found.sum()), "not_adversarial": int((~found).sum())}
        passes = {"forward": 100 * samples, "backward": 99 * samples}
        cost = {"outcomes": outcomes, "seconds": 3.0 + len(arm.name) / 7, "passes": passes}
        own |= {"scores": {name: scores[name][place] for name in detectors}, "cost": cost}
        return ArmResult(arm=arm, name=arm.name, adaptive_to=arm.adaptive_to, **own)

    results = [arm_result(place, arm) for place, arm in enumerate(everything)]
    chosen = {"settings": MeadSettings(resamples=0, published=published), "correct": np.ones(samples, dtype=bool)}
    entries, averages = [], []
    for name in detectors:
        threshold = float(np.quantile(natural[name], 0.95))
        rows = DetectorRows(detector=name, natural=natural[name], threshold=threshold, **chosen).of(results)
        averages += rows.pop("averages")
        for row in (*rows["results"], *rows["white_box"], *rows["arms"]):
            _add_intervals(row)
        entry = {"name": name, "description": f"{name.upper()}Detector(settings='as in the paper')"}
        entry |= {"differentiable": name in white_box, "random": name == "kd-bu", "seconds": 12.3 + len(name)}
        entry |= {"combines": (combines or {}).get(name), "threshold": threshold, "threshold_fpr": 0.05}
        entries.append(entry | {"achieved_fpr": float((natural[name] > threshold).mean()), **rows})
    result = {"kind": "mead", "samples": samples, "clean_accuracy": 0.992, "suite": "paper-mnist", "naturals": "kept"}
    result |= {"detectors": entries, "averages": averages, "arms": [arm_row(one, (), samples) for one in results]}
    settings = {"bounds": [0.0, 1.0], "batch_size": 256, "resamples": 0, "naturals": "kept", "8-bit": False}
    result |= {"settings": settings, "isolated": False, "versions": VERSIONS, "seed": 20240501}
    return result | {"time": make_time([one.name for one in results])}


def _add_intervals(row):
    for key in ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr"):
        if row[key] is not None:
            row[f"{key}_interval"] = [max(row[key] - 0.021, 0.0), min(row[key] + 0.018, 1.0)]
