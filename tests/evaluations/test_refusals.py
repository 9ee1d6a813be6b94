"""What makes no sense is refused on entry by the name of the argument, with what is expected or the next step."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import MultiLabel, Targeted, TopK
from robust_ext.core.errors import DataError, InconsistentModelError, ModelError, RobustExtError
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors import Detector
from robust_ext.evaluations.detectors import detector_beside
from robust_ext.evaluations.evaluate.suite import standard_suite
from robust_ext.evaluations.mead.fitting import fit_detector, load_detector
from robust_ext.evaluations.mead.suites import load_suite
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
    "device": ({"device": "meta"}, "device: got 'meta', expected a device this torch computes on"),
    "unknown": ({"batchsize": 5}, "did you mean batch_size"),
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
    (TEST, {"readout": "ensemble"}, r"^readout: got Ensemble.* for features of shape \(N, 40\)"),
    *((TEST, {"depths": depths}, "depths") for depths in ((), (2, 4), (1, 2, 2), "1,2", 2, (1, float("nan")))),
    (TEST, {"attack": []}, "at least one attack"),
    (TEST, {"model": through(lambda z: z / 0)}, "NaN or infinite"),
    (TEST, {"attack": "foolbox:LinfPGD", "norm": "l1"}, "not for l1"),
    (TEST, {"detector": Bare(MODEL)}, "detector_data: got nothing, and a detector without a threshold"),
    (TEST, {"detector": Bare(MODEL), "detector_data": X}, r"0\.05 with 4 clean inputs, expected at least 20"),
    (TEST, {"detector": answering(spread), "calibrate_on": 4}, "calibrate_on: got 4, expected 0 with a detector"),
    (TEST, {"detector": answering(lambda seen: seen.logits)}, r"detector Broken: returned shape \(4, 3\) for 4 inputs"),
    (TEST, {"detector": answering(lambda seen: seen.logits[:, 0] * torch.nan)}, "detector Broken: scored NaN"),
    (TEST, {"detector": answering(lambda seen: torch.ones(len(seen.logits))), "x": torch.rand(12, 1, 4, 4)}, "rejects"),
    (MEAD, {"attack": "foolbox:L2PGD(steps=2)"}, "linf"),
    (MEAD, {"attack": "robust_ext:OrthogonalPGD()"}, "no attack was run.*has no threshold"),
    (MEAD, {"combine": ("mean",), "detector_data": X.repeat(9, 1, 1, 1)}, "at least two"),
    (MEAD, {"combine": ("mean",), "detectors": {"a": spread, "b": spread}}, "detector_data"),
    (MEAD, {"detectors": [spread, spread]}, "several named spread"),
    (ROBUST, {"attack": "robust_ext:LinearRegion()", "norm": "l2", "criterion": TopK(2)}, "choose robust_ext:APGD"),
    (ROBUST, {"attack": "robust_ext:RayS()", "criterion": Targeted()}, "cannot aim at a class; choose robust_ext:APGD"),
    (ROBUST, {"attack": "foolbox:LinfDeepFoolAttack()", "criterion": TopK(2)}, "choose robust_ext:BoundarySearch"),
    (DEFENSE, {"only": ("naive",), "skip": ("naive",)}, "at least one category"),
    (DEFENSE, {"surrogates": {"bare": 3}}, "^surrogates: got"),
    (DEFENSE, {"minutes": 1e-9}, "the time is over"),
    (DEFENSE, {"attack": lambda model, x, y: {}["attack"]}, "no attack was run.*raised KeyError"),
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
        (folder / "suite.toml").write_text(f"[[arms]]\nattack='robust_ext:APGD()'\n{text}")
        load_suite(str(folder / "suite.toml"))

    return load


def fit(name, **changed):
    return lambda _: fit_detector(name, **{"classifier": MODEL, "clean": X, "labels": LABELS, **changed})


OF_OTHERS = [
    (lambda _: robust_ext.plant(MODEL, torch.cat([X, X[:1] + 1e-3]).clamp(0, 1), LINF), "inputs: got some that are"),
    (lambda _: robust_ext.plant(FLAT, X, LINF, inner_points=20), "in none of the 4 inputs could anything be planted"),
    (lambda _: robust_ext.plant(MODEL, X, LINF, inner_points=20).score(X[:2]), "expected one candidate an input"),
    (suite("#" * 1_000_001), "larger than a suite"),
    (suite("norm='linf'"), "smallest perturbation"),
    (suite(f"epsilons={list(range(1, 2002))}"), "2001 arms, expected at most 2000"),
    (lambda _: load_suite("papermnist"), "did you mean paper-mnist"),
    (fit("fs", clean=torch.rand(4, 2, 4, 4), classifier=nn.Flatten().eval()), "preset: got 'auto' .*'mnist' or 'cifa"),
    (fit("lid"), "clean: got 4 inputs to train on, of which .* become references, expected at least 5"),
    (lambda _: load_detector("odds", "nowhere", MODEL), "name: got 'odds'"),
    (lambda _: robust_ext.EvaluateSettings(claim=0.6), "claim"),
    (lambda _: robust_ext.evaluate(MODEL, X, LABELS, LINF, detector=Bare), "threshold"),
    (lambda _: robust_ext.evaluate(Chance().eval(), X, ANY, LINF, criterion=MultiLabel()), "fixed draws"),
    (
        lambda _: robust_ext.evaluate(as_defense("bit-depth", MODEL, X), X, ANY, LINF, criterion=MultiLabel()),
        "a class or function that makes the defense",
    ),
    (lambda _: standard_suite(LINF, budget="much", classes=3, square=True), "budget.*'quick'"),
    (lambda _: as_detector(nn.Flatten(0).train(), MODEL), "train mode, expected a score in eval mode"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OF_OTHERS)))
def test_arguments_of_others(number, tmp_path, monkeypatch):
    """Of those of a detector before any attack is run."""
    call, words = OF_OTHERS[number]
    monkeypatch.setattr("robust_ext.evaluations.mead.fitting.run_attack", lambda *_, **__: pytest.fail("attacked"))
    with pytest.raises((RobustExtError, DataError), match=words):
        call(tmp_path)


@pytest.mark.parametrize("kind", ["detector", "detectors"])
@pytest.mark.parametrize("error", [KeyError("score"), SystemExit(0)], ids=repr)
def test_a_detector_that_raises_is_named(error, kind):
    given = {kind: Mock(side_effect=error), "detector_data": X.repeat(8, 1, 1, 1)}
    with pytest.raises(ModelError, match=rf"detector: ScoreDetector, on \d+ inputs, raised {type(error).__name__}"):
        evaluate("mead" if kind == "detectors" else "binarization", **given)


def test_a_failed_attack_on_a_defense_stands_beside_the_others():
    def fails(model, x, y):
        raise KeyError("attack")

    result = evaluate("test_time", attack=[fails, ATTACK], draws=1, repeats=1, epsilon=1e-3)
    assert [entry["name"] for entry in result.content["refused"]] == ["fails"]


class Declared(nn.Module):
    random = True

    def forward(self, x):
        return spread(x) + 0.01 * torch.rand(len(x))


OF_THE_BATCH = [
    lambda x: spread(x) - spread(x).mean(),
    lambda x: spread(x).argsort().argsort().float(),
    lambda x: spread(x) / len(x),
]
SOUND = [
    spread,
    lambda x: torch.zeros(len(x)),
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
