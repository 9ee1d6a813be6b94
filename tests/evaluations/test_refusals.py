"""What makes no sense is refused on entry by the name of the argument, with what is expected or the next step."""

import re

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import MultiLabel, Targeted, TopK
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import AttackError, DataError, InconsistentModelError, ModelError, RobustExtError
from robust_ext.core.statistics import proportion_interval, sequential_decision
from robust_ext.core.threat import ThreatModel
from robust_ext.defenses import IMF, DiscriminatorTraining, JPEGCompression, RandomResizePad
from robust_ext.defenses.clc import Projections, ProjectionsTraining
from robust_ext.detectors import Detector
from robust_ext.engine.context import RunContext
from robust_ext.evaluations.detectors import detector_beside
from robust_ext.evaluations.evaluate.suite import standard_suite
from robust_ext.evaluations.mead.fitting import fit_detector, load_detector
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.models.features import split
from robust_ext.registry.defense import as_defense
from robust_ext.registry.detector import as_detector
from tests.evaluations import small
from tests.evaluations.subjects import spread

ATTACK = "robust_ext:APGD(steps=2)"
X = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
MODEL, LINF = small.NETWORK, small.LINF


def evaluate(kind, *, epsilon=0.1, norm="linf", **given):
    """One evaluation of a small network on four samples, with some arguments changed."""
    labels = {"labels": given["y"]} if kind == "binarization" and "y" in given else {}
    defaults = {"model": MODEL, "attack": ATTACK, "x": X, "y": MODEL(X).argmax(1)}
    defaults["threat_model"] = ThreatModel(norm=norm, epsilon=epsilon)
    return small.call(kind, **{**defaults, **labels, **given})


OF_EVERY = {
    "samples": ({"x": X[:0], "y": torch.zeros(0, dtype=torch.int64)}, "inputs: got no samples"),
    "pixels": ({"x": (X * 255).byte()}, r"inputs: got dtype torch.uint8, .* divide pixels of 0..255"),
    "values": ({"x": X * 2}, r"inputs: got values in .* \[0, 1\]"),
    "device": ({"device": "meta"}, "device: got 'meta', expected a device this torch computes on"),
    "labels": ({"y": torch.zeros(3, dtype=torch.int64)}, "labels: got"),
    "unknown": ({"batchsize": 5}, "did you mean batch_size"),
    "settings": ({"settings": {}}, r"settings: got \w+, expected \w+Settings"),
    "ids": ({"sample_ids": [0, 0, 1, 2]}, "^sample_ids: got an id twice"),
    "folder": ({"out": ""}, "out: got '', expected the name of a folder"),
    "epsilon": ({"norm": "l2", "epsilon": 1e-6}, "epsilon: got 1e-06, expected at least .* in l2: float32"),
    "callbacks": ({"callbacks": [print]}, r"callbacks: got .* method on_result\(result\)"),
    "mode": ({"model": nn.Sequential(nn.Flatten(), nn.Dropout()).train()}, r"train mode.*call model.eval\(\)"),
}


@pytest.mark.parametrize("kind", small.KINDS[:-1])
@pytest.mark.parametrize("case", OF_EVERY)
def test_arguments_of_every_evaluation(kind, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, words = OF_EVERY[case]
    with pytest.raises(RobustExtError, match=words):
        evaluate(kind, **change)
    assert not list(tmp_path.iterdir())


class Bare(Detector):
    def score_of(self, seen):
        return seen.logits[:, 0]


def answering(answer):
    """A calibrated detector that answers with a function of what it sees."""
    detector = type("Broken", (Detector,), {"score_of": lambda self, seen: answer(seen)})(MODEL)
    detector.threshold = torch.tensor(0.0)
    return detector


def through(function):
    """The network, of whose logits a function is returned."""
    made = nn.Sequential(*MODEL, nn.Identity()).eval()
    made[-1].forward = function
    return made


ROBUST, TEST, MEAD, DEFENSE = "robust_accuracy", "binarization", "mead", "test_time"
OF_ONE = [
    (TEST, {"kappa": 1.0}, r"kappa: got 1.0, expected a finite number in \[0, 1\)"),
    (TEST, {"boundary": "edge"}, "boundary: got 'edge', expected one of 'auto', 'corners', 'surface'"),
    (TEST, {"readout": "ensemble"}, r"^readout: got Ensemble.* for features of shape \(N, 40\)"),
    (TEST, {"random_inner": 0, "random_corners": 0}, "random_inner"),
    (TEST, {"inner_point": 5}, "inner_point: got an unknown setting, expected .* did you mean inner_points"),
    *((TEST, {"depths": depths}, "depths") for depths in ((), (2, 4), (1, 2, 2), "1,2", 2, (1, float("nan")))),
    (TEST, {"attack": []}, "at least one attack"),
    (TEST, {"x": torch.rand(2, 3, 5, 5)}, "inputs of shape"),
    (TEST, {"model": through(lambda z: z[:1])}, r"returned shape \(1, 3\)"),
    (TEST, {"model": through(lambda z: z / 0)}, "NaN or infinite"),
    (TEST, {"attack": lambda model, x, y: x[:1]}, r"returned shape \(1, 1, 4, 4\)"),
    (TEST, {"attack": lambda model, x, y: None}, "returned NoneType"),
    (TEST, {"attack": lambda model, x, y: 1 / 0}, "raised ZeroDivisionError"),
    (TEST, {"attack": "foolbox:LinfPGD", "norm": "l1"}, "not for l1"),
    (TEST, {"detector": Bare(MODEL)}, "detector_data: got nothing, and a detector without a threshold"),
    (TEST, {"detector": Bare(MODEL), "detector_data": X}, r"0\.05 with 4 clean inputs, expected at least 20"),
    (TEST, {"detector": answering(spread), "exposure": "both"}, "exposure: got 'both'"),
    (TEST, {"detector": answering(spread), "calibrate_on": 4}, "calibrate_on: got 4, expected 0 with a detector"),
    (TEST, {"detector": answering(lambda seen: seen.logits)}, r"detector Broken: returned shape \(4, 3\) for 4 inputs"),
    (TEST, {"detector": answering(lambda seen: seen.logits[:, 0] * torch.nan)}, "detector Broken: scored NaN"),
    (TEST, {"detector": answering(lambda seen: torch.ones(len(seen.logits))), "x": torch.rand(12, 1, 4, 4)}, "rejects"),
    (MEAD, {"attack": []}, "at least one arm"),
    (MEAD, {"attack": "nothing"}, "suite"),
    (MEAD, {"attack": "foolbox:L2PGD(steps=2)"}, "linf"),
    (MEAD, {"attack": "robust_ext:OrthogonalPGD()"}, "no attack was run.*has no threshold"),
    (MEAD, {"combine": ("median",)}, "combine"),
    (MEAD, {"combine": ("mean",), "detector_data": X.repeat(9, 1, 1, 1)}, "at least two"),
    (MEAD, {"combine": ("mean",), "detectors": {"a": spread, "b": spread}}, "detector_data"),
    (MEAD, {"detectors": [spread, spread]}, "several named spread"),
    (MEAD, {"detectors": []}, "at least one detector"),
    (ROBUST, {"epsilons": []}, "epsilons"),
    (ROBUST, {"epsilons": [0.1, 0.1]}, "once"),
    (ROBUST, {"attack": "robust_ext:LinearRegion()", "norm": "l2", "criterion": TopK(2)}, "choose robust_ext:APGD"),
    (ROBUST, {"attack": "robust_ext:RayS()", "criterion": Targeted()}, "cannot aim at a class; choose robust_ext:APGD"),
    (ROBUST, {"attack": "foolbox:LinfDeepFoolAttack()", "criterion": TopK(2)}, "choose robust_ext:BoundarySearch"),
    (ROBUST, {"attack": lambda model, x, y: x, "criterion": Targeted("next")}, "cannot aim at a class"),
    (DEFENSE, {"only": ("naive",), "skip": ("naive",)}, "at least one category"),
    (DEFENSE, {"surrogates": {"bare": 3}}, "^surrogates: got"),
    (DEFENSE, {"minutes": 1e-9}, "the time is over"),
    (DEFENSE, {"attack": lambda model, x, y: {}["attack"]}, "no attack was run.*raised KeyError"),
    ("diagnosis", {"readout": "nearer"}, "readout: got 'nearer'"),
]


@pytest.mark.parametrize("number", range(len(OF_ONE)))
def test_arguments_of_one_evaluation(number):
    kind, given, words = OF_ONE[number]
    with pytest.raises(RobustExtError, match=words):
        evaluate(kind, **given)


FLAT = nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.Linear(2, 3)).eval()
nn.init.zeros_(FLAT[1].weight)
LABELS, ANY = torch.arange(4) % 3, torch.ones(4, 3)


class Chance(nn.Module):
    """A random model."""

    def forward(self, x):
        return MODEL(x + 0.1 * torch.randn_like(x))


def suite(text):
    def load(folder):
        file = folder / "suite.toml"
        file.write_text(text)
        with pytest.raises(RobustExtError, match=re.escape(str(file))) as caught:
            load_suite(str(file))
        raise caught.value

    return load


def fit(name, **changed):
    return lambda _: fit_detector(name, **{"classifier": MODEL, "clean": X, "labels": LABELS, **changed})


def arm(rest):
    return suite(f"[[arms]]\nattack='robust_ext:APGD()'\n{rest}")


def planted():
    return robust_ext.plant(MODEL, X, LINF, inner_points=20)


OF_OTHERS = [
    (lambda _: robust_ext.plant(MODEL, torch.cat([X, X[:1] + 1e-3]).clamp(0, 1), LINF), "inputs: got some that are"),
    (lambda _: robust_ext.plant(FLAT, X, LINF, inner_points=20), "in none of the 4 inputs could anything be planted"),
    (lambda _: planted().single(6), "row: got 6, expected an integer from"),
    (lambda _: planted().score(X[:2]), "expected one candidate an input"),
    (suite(f"a = {'[' * 5000}{']' * 5000}"), "TOML"),
    (suite(f"a = {'9' * 5000}"), "TOML"),
    (suite("#" * 1_000_001), "larger than a suite"),
    (suite(""), "no arms"),
    (suite("other = 1\n[[arms]]\nattack='robust_ext:APGD()'"), "other"),
    (suite("[[arms]]\nattack='robust_ext:APDG()'\nnorm='linf'\nepsilons=[0.1]"), "APGD"),
    (arm("epsilon=1"), "epsilons"),
    (arm("norm='linf'\nepsilons=['a']"), "number"),
    (arm("norm='linf'\nepsilons=[nan]"), "an epsilon: got nan"),
    (arm(f"epsilons=[1{'0' * 400}]"), "an epsilon: got 1000"),
    (arm("norm='linf'"), "smallest perturbation"),
    (arm("norm='linf'\nepsilons=[0.1, 0.1]"), "several named"),
    (arm(f"epsilons={list(range(1, 2002))}"), "2001 arms, expected at most 2000"),
    (lambda _: load_suite("papermnist"), "did you mean paper-mnist"),
    (fit("mahalanobis"), "name: got 'mahalanobis', expected one of 'nss', 'kd-bu', 'lid', 'fs', 'magnet'"),
    (fit("fs", clean=torch.rand(4, 2, 4, 4), classifier=nn.Flatten().eval()), "preset: got 'auto' .*'mnist' or 'cifa"),
    (fit("nss", bandwidth=1.2), "settings: got bandwidth, expected settings of nss: output, penalty, gamma, batch"),
    (fit("lid", layers=["99"]), "layers: got 99, expected names of layers"),
    (fit("lid"), "clean: got 4 inputs to train on, of which .* become references, expected at least 5"),
    (fit("nss", clean=X * 2), "clean: got values in"),
    (fit("nss", labels=LABELS + 3), "labels: got labels in 3..5"),
    (fit("nss", adversarial=torch.rand(7, 1, 4, 4)), "adversarial: got shape .* one for each clean input"),
    (lambda _: load_detector("odds", "nowhere", MODEL), "name: got 'odds'"),
    (lambda _: robust_ext.compare(3, 4), "got int"),
    (lambda folder: robust_ext.compare(folder, folder), r"no such folder or result\.json"),
    (lambda _: robust_ext.EvaluateSettings(claim=0.6), "claim"),
    (lambda _: robust_ext.evaluate(MODEL, X, LABELS, LINF, detector=Bare), "threshold"),
    (lambda _: robust_ext.evaluate(Chance().eval(), X, ANY, LINF, criterion=MultiLabel()), "fixed draws"),
    (
        lambda _: robust_ext.evaluate(as_defense("bit-depth", MODEL, X), X, ANY, LINF, criterion=MultiLabel()),
        "a class or function that makes the defense",
    ),
    (lambda _: standard_suite(LINF, budget="much", classes=3, square=True), "budget.*'quick'"),
    (lambda _: RunContext(origin={"model": 3}), "^origin: got"),
    (lambda _: RunContext(repair="yes"), "^repair: got"),
    (lambda _: split(MODEL, X, layer="nowhere"), "layer: got 'nowhere'"),
    (lambda _: proportion_interval(3, 2), "hits: got"),
    (lambda _: sequential_decision(1, 2, threshold=0), "threshold: got"),
    (lambda _: as_detector(3, MODEL), "detector: got int, expected a Detector, a callable score"),
    (lambda _: as_detector(nn.Flatten(0).train(), MODEL), "train mode, expected a score in eval mode"),
    (lambda _: robust_ext.as_module("shelf:net(3)"), "key=3|did you mean|library"),
    (lambda _: robust_ext.as_attack(lambda model, x: x), r"\(model, x, y\) -> x_adv"),
    (lambda _: Transfer(surrogates={}), "surrogates: "),
    (lambda _: Transfer(surrogates={"a": MODEL}, attacks=[3]), "attacks: "),
    (lambda _: ProjectionsTraining(layers=["9"]).fit(MODEL, X), "names of layers, such as"),
    (lambda _: Projections(["1", "1"], [torch.eye(2)] * 2, [torch.zeros(2)] * 2), "one or more different names"),
    (lambda _: DiscriminatorTraining().fit(MODEL, X, LABELS[:3]), "labels"),
    (lambda _: IMF(MODEL, nn.Identity(), doubtful=(0.3,)), "doubtful: got .*a pair"),
    (lambda _: JPEGCompression(MODEL)(torch.rand(2, 5)), "images"),
    (lambda _: RandomResizePad(MODEL, smallest=2.0), "largest"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OF_OTHERS)))
def test_arguments_of_others(number, tmp_path, monkeypatch):
    """Of those of a detector before any attack is run."""
    call, words = OF_OTHERS[number]
    monkeypatch.setattr("robust_ext.evaluations.mead.fitting.run_attack", lambda *_, **__: pytest.fail("attacked"))
    with pytest.raises((RobustExtError, DataError), match=words):
        call(tmp_path)


@pytest.mark.parametrize("bounds", [None, 1, (0,), (1, 0), (0, "1"), (0, 1e300), torch.zeros(2)], ids=str)
def test_bounds(bounds):
    for call in (
        lambda: ThreatModel(norm="linf", epsilon=0.1, bounds=bounds),
        lambda: load_suite("quick", bounds=bounds),
        lambda: as_defense("bit-depth", MODEL, X, bounds=bounds),
    ):
        with pytest.raises(RobustExtError, match=r"^bounds: got"):
            call()


@pytest.mark.parametrize("error", [KeyError("score"), SystemExit(0)], ids=repr)
def test_a_detector_that_raises_is_named(error):
    def score(x):
        raise error

    for kind, given in (
        ("mead", {"detectors": score}),
        ("binarization", {"detector": score, "detector_data": X.repeat(8, 1, 1, 1)}),
    ):
        with pytest.raises(ModelError, match=rf"detector: ScoreDetector, on \d+ inputs, raised {type(error).__name__}"):
            evaluate(kind, **given)


def test_a_failed_attack_on_a_defense_stands_beside_the_others():
    def fails(model, x, y):
        raise KeyError("attack")

    result = evaluate("test_time", attack=[fails, ATTACK], draws=1, repeats=1, epsilon=1e-3)
    assert [entry["name"] for entry in result.content["refused"]] == ["fails"]
    with pytest.raises(AttackError, match="no attack was run"):
        evaluate("test_time", attack=fails, draws=1, repeats=1)


class Declared(nn.Module):
    random = True

    def forward(self, x):
        return spread(x) + 0.01 * torch.rand(len(x))


OF_THE_BATCH = [
    lambda x: spread(x) - spread(x).mean(),
    lambda x: spread(x).argsort().argsort().float(),
    lambda x: spread(x).softmax(0),
    lambda x: spread(x).cumsum(0),
    lambda x: spread(x) / len(x),
]
SOUND = [
    spread,
    lambda x: torch.zeros(len(x)),
    lambda x: 1e4 + spread(x),
    lambda x: 1e-12 * spread(x),
    Declared().eval(),
]


@pytest.mark.parametrize("rows", [1, 4])
def test_detectors_whose_scores_do_not_follow_from_each_row_alone_are_refused(rows):
    for score in OF_THE_BATCH:
        with pytest.raises(InconsistentModelError, match="rows next to it") as raised:
            detector_beside(score, MODEL, X[:rows])
        assert raised.value.kind == "batch"
    with pytest.raises(InconsistentModelError, match="random = True"):
        detector_beside(lambda x: spread(x) + torch.rand(len(x)), MODEL, X)
    for score in SOUND:
        assert detector_beside(score, MODEL, X[:rows]) is not None
    for kind in ("binarization", "mead"):
        given = {"detector_data": small.INPUTS, "detector" if kind == "binarization" else "detectors": OF_THE_BATCH[0]}
        with pytest.raises(InconsistentModelError, match="detector "):
            evaluate(kind, **given)
