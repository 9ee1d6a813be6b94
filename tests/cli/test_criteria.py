"""``--top``, ``--targets`` and ``--multi-label``, and two classes by one logit, on a linear model."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from robust_ext import Targeted, ThreatModel, TopK, evaluate, evaluate_defense, robust_accuracy
from robust_ext.cli.app import app

NETWORKS = """
import torch

def make(columns=5):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, columns)).eval()

def one():
    return make(1)

def chance():
    return torch.nn.Sequential(make(1), torch.nn.Sigmoid()).eval()

def smooth(x):
    return 0.8 * x + 0.2 * x.mean((1, 2, 3), keepdim=True)

def bright(classifier):
    from robust_ext import as_detector
    found = as_detector(lambda x: x.flatten(1).mean(1), classifier)
    found.threshold = torch.tensor(0.52)
    return found
"""
X = torch.rand(30, 1, 5, 5, generator=torch.Generator().manual_seed(1))
MODEL = ThreatModel(norm="linf", epsilon=0.1)


def network(name):
    return named(name)()


def named(name):
    names = {}
    exec(NETWORKS, names)  # noqa: S102 - our own text
    return names[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("networks")
    (path / "net.py").write_text(NETWORKS)
    with torch.no_grad():
        scores, one = network("make")(X), network("one")(X)[:, 0]
    labels = scores.argmax(1)
    np.savez(path / "classes.npz", x_test=X.numpy(), y_test=labels.numpy())
    np.savez(path / "sets.npz", x_test=X.numpy(), y_test=(scores > 0).long().numpy())
    np.savez(path / "two.npz", x_test=X.numpy(), y_test=(one > 0).long().numpy())
    np.save(path / "targets.npy", ((labels + 2) % 5).numpy())
    return path


def out_of_reach(module):
    """Which logits (30, K) keep their sign in the ball and the bounds: each value goes as far as it may."""
    weights, flat = module[1].weight, X.flatten(1)
    with torch.no_grad():
        scores = module(X)
        ways = -scores.sign()[:, :, None] * weights.sign()
        room = torch.where(ways > 0, 1 - flat[:, None], flat[:, None]).clamp_max(0.1)
        return (weights.abs() * room).sum(2) < scores.abs()


ATTACK = ("--attack", "robust_ext:APGD(steps=10)")


def run(folder, *more, data="classes", model="make", fails=False, command="robust-accuracy", attack=ATTACK):
    out = folder / f"run-{len([*folder.iterdir()])}"
    words = [command, "--model", f"{folder}/net.py:{model}", "--data", f"{folder}/{data}.npz", "--in-process"]
    words += ["--samples", "30", "--order", "first", "--eps", "0.1", *attack]
    found = CliRunner().invoke(app, [*words, "--no-progress", "--out", str(out), *more])
    assert (found.exit_code != 0) == fails, found.exception
    return str(found.exception) if fails else json.loads((out / "result.json").read_text())


@pytest.mark.parametrize(
    ("words", "criterion"),
    [
        (("--top", "2"), lambda labels: TopK(2)),
        (("--targets", "next"), lambda labels: Targeted("next")),
        (("--targets", "next", "--top", "2"), lambda labels: Targeted("next", k=2)),
        (("--targets", "targets.npy"), lambda labels: Targeted((labels + 2) % 5)),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, tuple) else "",
)
def test_as_in_python(folder, words, criterion, monkeypatch):
    monkeypatch.chdir(folder)
    found = run(folder, *words)
    labels = torch.from_numpy(np.load(folder / "classes.npz")["y_test"])
    expected = robust_accuracy(
        network("make"), "robust_ext:APGD(steps=10)", X, labels, MODEL, criterion=criterion(labels)
    )
    assert found["worst_case"] == expected.content["worst_case"]
    assert found["criterion"] == expected.content["criterion"]


def test_evaluate_takes_a_criterion_a_defense_and_a_detector(folder):
    sides = ("--defense", f"{folder}/net.py:smooth", "--detector", f"{folder}/net.py:bright", "--detector-samples", "1")
    quick = ("--budget", "quick", "--planted", "0", "--top", "2", "--seed", "1", "--samples", "20")
    found = run(folder, *quick, *sides, command="evaluate", attack=())
    labels = torch.from_numpy(np.load(folder / "classes.npz")["y_test"])[:20]
    sides = {"defense": named("smooth"), "detector": named("bright"), "criterion": TopK(2)}
    result = evaluate(network("make"), X[:20], labels, MODEL, budget="quick", planted=0, seed=1, **sides)
    for key in ("worst_case", "clean_accuracy", "criterion"):
        assert found[key] == result.content[key]
    assert found["detector"]["accepted_accuracy"] == result.content["detector"]["accepted_accuracy"]
    assert found["defense"]["name"] == result.content["defense"]["name"]


def test_a_test_time_defense_takes_a_criterion(folder):
    short = ("--only", "transfer", "--targets", "next", "--seed", "1")
    found = run(folder, *short, "--defense", f"{folder}/net.py:smooth", command="test-time", attack=())
    labels = torch.from_numpy(np.load(folder / "classes.npz")["y_test"])
    keywords = {"classifier": network("make"), "criterion": Targeted("next"), "only": ("transfer",), "seed": 1}
    result = evaluate_defense(named("smooth"), None, X, labels, MODEL, **keywords)
    assert found["criterion"] == result.content["criterion"]
    assert found["defended"]["worst_case"] == result.content["defended"]["worst_case"]
    assert "survive the attacks" in result.headline


def test_the_binarization_test_takes_labels_of_attacks_and_says_first_that_samples_are_too_few(folder, caplog):
    few = ("--samples", "8", "--attack", "weak=robust_ext:RandomSearch(points=4)")
    attack = ("--attack", "strong=robust_ext:APGD(steps=10)")
    found = run(folder, *few, command="binarization", attack=attack)
    assert [one["name"] for one in found["attacks"]] == ["strong", "weak"]
    words = "No attack can pass the binarization test on 8 samples: one that misses none needs"
    assert caplog.text.count(words) == 1
    assert not any(words in one for one in found["warnings"])
    assert "a label of its own for each" in run(folder, command="binarization", attack=attack * 2, fails=True)


def test_samples_of_the_target_class_are_left_out(folder, caplog):
    labels = np.load(folder / "classes.npz")["y_test"]
    rare = int(labels.min())
    found = run(folder, "--targets", str(rare))
    assert found["samples"] == int((labels != rare).sum()) < 30
    assert f"samples of class {rare}, which is the target, are left out" in caplog.text


def test_several_labels(folder):
    attack = ("--attack", "robust_ext:APGD(steps=40, loss='margin')")
    every, some = (run(folder, "--multi-label", one, *attack, data="sets") for one in ("all", "0, 3"))
    assert every["clean_accuracy"] == some["clean_accuracy"] == 1
    robust = [one["worst_case"][0]["robust_accuracy"] for one in (every, some)]
    far = out_of_reach(network("make"))
    assert robust == [pytest.approx(float(part.all(1).double().mean())) for part in (far, far[:, [0, 3]])]
    assert "give robust_accuracy" in run(folder, data="sets", fails=True)


@pytest.mark.parametrize("model", ["one", "chance"])
def test_two_classes_by_one_output(folder, model):
    found = run(folder, data="two", model=model)
    far = out_of_reach(network("one"))
    assert found["worst_case"][0]["robust_accuracy"] == pytest.approx(float(far.double().mean()))
    assert "one output for each input" in found["warnings"][0]
