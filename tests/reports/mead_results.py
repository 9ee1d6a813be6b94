"""MEAD results made from drawn scores, small and large, by what makes the rows of real ones."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from robust_ext.evaluations.mead import MeadSettings
from robust_ext.evaluations.mead.summary import ArmResult, DetectorRows, arm_row
from tests.reports.results import make_time

SHORT = {"ace": "ACE", "kl": "KL", "gini": "Gini", "fisher-rao": "FR"}
SUITE = {"l1": (5, 10, 15, 20, 25, 30, 40), "l2": (0.125, 0.25, 0.3125, 0.5, 1, 1.5, 2)}
LINF = (0.03125, 0.0625, 0.125, 0.25, 0.3125, 0.5)


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    group: str
    norm: str | None = None
    epsilon: float | None = None
    objective: str | None = None
    algorithm: str | None = None
    adaptive_to: str | None = None

    @property
    def resolved(self):
        kind = "minimum norm" if self.epsilon is None else "fixed epsilon"
        description = f"robust_ext:ObjectivePGD(objective={self.objective!r}, steps=100)"
        return SimpleNamespace(description=description, traits=SimpleNamespace(kind=kind))


def suite():
    """The arms of the paper on MNIST: 21 groups."""
    arms = []
    for norm, epsilons in (*SUITE.items(), ("linf", LINF)):
        for epsilon in epsilons:
            group = f"{norm} {epsilon:g}"
            place = {"group": group, "norm": norm, "epsilon": epsilon}
            for algorithm in ("pgd", "bim", "fgsm") if norm == "linf" else ("pgd",):
                for objective in SHORT:
                    name = f"{algorithm.upper()}-{SHORT[objective]} {group}"
                    arms.append(Arm(name=name, objective=objective, algorithm=algorithm, **place))
            if group == "linf 0.3125":
                arms += [Arm(name=f"{name} {group}", **place) for name in ("Square", "CWinf")]
    arms += [Arm(name=name, group=name, norm="l2") for name in ("DeepFool", "CW2", "HopSkipJump")]
    return [*arms, Arm(name="Spatial", group="Spatial")]


def arms_of(*groups):
    return [arm for arm in suite() if arm.group in groups]


def adaptive(detector, arms):
    """For every linf epsilon an arm that is adaptive to the detector."""
    groups = dict.fromkeys((arm.group, arm.epsilon) for arm in arms if arm.norm == "linf")
    same = {"norm": "linf", "objective": "ace", "algorithm": "pgd", "adaptive_to": detector}
    return [
        Arm(name=f"PGD-ACE {group}, knowing {detector}", group=group, epsilon=epsilon, **same)
        for group, epsilon in groups
    ]


def make(arms, detectors, *, samples, white_box=(), combines=None, rates=None, unscored=0, published=False):
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
    results = [
        ArmResult(
            arm=arm,
            name=arm.name,
            adaptive_to=arm.adaptive_to,
            success=success[place],
            finite=success[place],
            lost=np.zeros_like(success[place]),
            scores={name: scores[name][place] for name in detectors},
            cost={
                "outcomes": {"found": int(success[place].sum()), "not_adversarial": int((~success[place]).sum())},
                "seconds": 3.0 + len(arm.name) / 7,
                "passes": {"forward": 100 * samples, "backward": 99 * samples},
            },
        )
        for place, arm in enumerate(everything)
    ]
    settings = MeadSettings(resamples=0, published=published)
    correct = np.ones(samples, dtype=bool)
    entries, averages = [], []
    for name in detectors:
        threshold = float(np.quantile(natural[name], 0.95))
        chosen = {"correct": correct, "settings": settings, "threshold": threshold}
        rows = DetectorRows(detector=name, natural=natural[name], **chosen).of(results)
        averages += rows.pop("averages")
        for row in (*rows["results"], *rows["white_box"], *rows["arms"]):
            _add_intervals(row)
        entries.append(
            {
                "name": name,
                "description": f"{name.upper()}Detector(settings='as in the paper')",
                "differentiable": name in white_box,
                "random": name == "kd-bu",
                "combines": (combines or {}).get(name),
                "seconds": 12.3 + len(name),
                "threshold": threshold,
                "threshold_fpr": 0.05,
                "achieved_fpr": float((natural[name] > threshold).mean()),
                **rows,
            }
        )
    return {
        "kind": "mead",
        "samples": samples,
        "clean_accuracy": 0.992,
        "suite": "paper-mnist",
        "naturals": "kept",
        "detectors": entries,
        "averages": averages,
        "arms": [arm_row(one, (), samples) for one in results],
        "settings": {"bounds": [0.0, 1.0], "batch_size": 256, "resamples": 0, "naturals": "kept", "8-bit": False},
        "isolated": False,
        "versions": {"robust_ext": "0.1.0", "torch": "2.5.1"},
        "seed": 20240501,
        "time": make_time([one.name for one in results]),
    }


def _add_intervals(row):
    """Intervals as the bootstrap would make them, without its work."""
    for key in ("auroc", "fpr_at_95_tpr", "tpr_at_5_fpr"):
        if row[key] is not None:
            row[f"{key}_interval"] = [max(row[key] - 0.021, 0.0), min(row[key] + 0.018, 1.0)]


def small_result(**changes):
    """Two detectors, three groups of arms of two norms and one of no norm; ``changes`` replaces whole values."""
    arms = arms_of("l1 5", "linf 0.125", "linf 0.3125", "Spatial")
    result = make(arms, ["nss", "lid"], samples=60, white_box=["lid"])
    assert changes.keys() <= result.keys()
    return {**result, **changes}


def large_result(detectors=7):
    """The first of seven detectors, two of them combinations, against the whole suite; some are known to arms."""
    combines = {"mean(nss, lid)": ["nss", "lid"], "max(nss, kd-bu, lid, magnet)": ["nss", "kd-bu", "lid", "magnet"]}
    names = ["nss", "mean(nss, lid)", "lid", "kd-bu", "magnet", "feature-squeezing", "max(nss, kd-bu, lid, magnet)"]
    return make(
        suite(),
        names[:detectors],
        samples=300,
        white_box=[name for name in ("lid", "kd-bu", "magnet") if name in names[:detectors]],
        combines=combines,
        rates={"l1 5": 0.01, "l1 10": 0.0, "l2 0.125": 0.02},
        unscored=3,
    )
