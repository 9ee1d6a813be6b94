"""The scripts in examples/, as a user runs them."""

import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from robust_ext import ThreatModel, robust_accuracy
from robust_ext.cli import app as cli
from robust_ext.cli.models import load_model
from robust_ext.datasets import load_dataset
from tests.test_readme import ROOT

SCRIPTS, SHARED = ROOT / "examples", ROOT.parent / "shared"
EXAMPLES = {
    "by_hand.py": ("attack", "passed"),
    "foolbox_user.py": ("attack", "passed"),
    "art_user.py": ("attack", "passed"),
    "foolbox_binarized.py": ("test score", "1.00: the share"),
    "art_binarized.py": ("test score", "1.00: the share"),
    "purifier.py": ("Robust accuracy in per cent", "worst case"),
    "nearest_images.py": ("  0.0 regions", "image 2: first region from"),
    "restarts.py": ("Robust accuracy in per cent", "PGD x 5"),
    "train_robust.py": ("batch 100", "after PGD at linf 0.1"),
    "train_defense.py": ("aid: trained on", "defended"),
}
# One of each library, and what is the only one of its kind; the others are mirrored where the docs are.
QUICK = ("foolbox_user.py", "art_binarized.py", "restarts.py", "purifier.py")


def run_script(script, *arguments, folder):
    """What a script in examples/, or another, prints when it is run with these arguments in this folder."""
    command = [sys.executable, *map(str, (SCRIPTS / script, *arguments))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def need(*parts):
    """A file or folder that is not part of the project, without which a test is skipped."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{'/'.join(parts)} is not on this machine")
    return path


@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in EXAMPLES]
)
def test_example(name, tmp_path, monkeypatch, capsys):
    """In this process, where the libraries are imported already; ``by_hand.py`` in one of its own."""
    beginning, held = EXAMPLES[name]
    if name == "by_hand.py":
        printed = run_script(name, folder=tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS / name)])
        monkeypatch.syspath_prepend(str(SCRIPTS))
        with torch.random.fork_rng():
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        printed = capsys.readouterr().out
    assert printed.startswith(beginning)
    assert held in printed
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_run_or_needs_files():
    # The model of the README's diagnosis is run there.
    needy = {f"{name}.py" for name in ("networks", "resnet20_recipes", "train_plain", "train_mead", "rounded")}
    assert {path.name for path in SCRIPTS.glob("*.py")} == {*EXAMPLES, *needy}


def network_of(name, weights=None):
    return load_model(f"{SCRIPTS / 'networks.py'}:{name}", weights=None if weights is None else str(weights)).model


@pytest.mark.exhaustive
def test_recipes_on_a_resnet(tmp_path):
    weights = need("models", "cifar10_resnet20.safetensors")
    # Into the standard layout.
    run_script(need("data", "unpack_cifar10.py"), tmp_path, "--train", "5", folder=tmp_path)
    given = ("--weights", weights, "--data-root", tmp_path, "--samples", "8")
    lines = run_script("resnet20_recipes.py", *given, folder=tmp_path).splitlines()
    scores = {line[:42].strip(): float(line.split("score ")[1].split()[0]) for line in lines}
    assert len(scores) == 5
    for name, score in scores.items():
        assert score >= 0.95 if name.endswith(("x eps/8", "difference")) else score <= 0.5, name


def test_the_architectures_are_those_that_were_published():
    """He et al.'s ResNet-18 with a first convolution of 3 x 3 and 10 classes; weights reproduce their accuracy."""
    assert sum(value.numel() for value in network_of("mead_cifar10").parameters()) == 11_173_962
    weights = need("models", "mnist_wong_kolter_linf_0.1.safetensors")
    inputs, labels = load_dataset("mnist", root=need("data")).take(range(500))
    with torch.no_grad():
        right = network_of("wong_kolter_mnist", weights)(inputs).argmax(1) == labels
    assert float(right.float().mean()) > 0.95


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
def test_adversarial_training_and_the_attacks_with_restarts(tmp_path):
    """A network trained against l2 holds out where a plainly trained one falls."""

    def trained(norm):
        weights = tmp_path / f"{norm}.safetensors"
        size = ("--norm", norm, "--eps", "0.5", "--images", "1000", "--epochs", "8")
        run_script("train_robust.py", *size, "--out", weights, folder=tmp_path)
        return network_of("pooled(side=8, kernel=2)", weights)

    inputs, labels = load_dataset("digits").take(range(100))
    attack = f"{SCRIPTS / 'restarts.py'}:pgd(restarts=2, steps=10)"
    threat_model = ThreatModel(norm="l2", epsilon=0.5)
    plain, robust = (robust_accuracy(trained(norm), attack, inputs, labels, threat_model) for norm in ("none", "l2"))
    assert plain.content["clean_accuracy"] > 0.75
    assert robust.content["clean_accuracy"] > 0.6
    assert robust.robust_accuracy(0.5) > plain.robust_accuracy(0.5) + 0.08


@pytest.mark.exhaustive
def test_the_plain_network_is_trained(tmp_path):
    """On fewer images than the script's default, so with less accuracy."""
    weights = tmp_path / "plain.safetensors"
    given = ("--data-root", need("data"), "--out", weights, "--images", "6000")
    assert float(run_script("train_plain.py", *given, folder=tmp_path).split()[1]) > 0.9
    load_model(f"{SCRIPTS / 'train_plain.py'}:mnist_network", weights=str(weights))


def test_training_that_is_killed_ends_with_the_same_weights(tmp_path):
    """MEAD's ResNet-18 of two channels, on images whose brightness is their class."""
    folder, draws = tmp_path / "cifar-10-batches-bin", np.random.default_rng(0)
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = draws.integers(0, 10, (24, 1))
        pixels = draws.normal(60 + 14 * labels, 30, (24, 3072)).clip(0, 255)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels, pixels]).astype(np.uint8).tobytes())
    size = ("--width", "2", "--epochs", "4", "--batch-size", "16", "--augment", "--decay")
    command = ("--data", "cifar10", "--data-root", str(tmp_path), *size, "--out")
    run_script("train_mead.py", *command, tmp_path / "whole.safetensors", folder=tmp_path)
    again = (*command, str(tmp_path / "killed.safetensors"))
    words = [sys.executable, str(SCRIPTS / "train_mead.py"), *again]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout.readline().startswith("epoch 1")
        process.kill()
    assert "epoch 1" not in run_script("train_mead.py", *again, folder=tmp_path)
    whole, killed = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == network_of("mead_cifar10").state_dict().keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    with pytest.raises(AssertionError, match="other settings"):
        run_script("train_mead.py", *again, "--seed", "1", folder=tmp_path)


@pytest.mark.exhaustive
def test_the_network_of_mead_is_trained_and_its_detectors_are_judged(tmp_path):
    """The script and the command of docs/mead.md on few images: what fools the network more is seen more."""
    weights, out = tmp_path / "mead.safetensors", tmp_path / "run"
    size = ("--images", "6000", "--epochs", "2", "--batch-size", "32")
    printed = run_script("train_mead.py", "--data-root", need("data"), "--out", weights, *size, folder=tmp_path)
    assert float(printed.split()[-1]) > 0.85
    model = ("--model", f"{SCRIPTS / 'networks.py'}:mead_mnist", "--weights", weights)
    data = ("--data", "mnist", "--data-root", need("data"), "--samples", "30")
    sizes = ("--train-samples", "600", "--adversarial-samples", "150", "--calibration-samples", "100")
    arms = ("--arm", "linf:0.125,0.3125=robust_ext:ObjectivePGD(steps=20, step_size=0.02)")
    detectors = ("--detector", "nss", "--detector", "fs", "--detector", "lid")
    command = ("mead", *model, *data, *sizes, *arms, *detectors, "--out", out, "--no-progress")
    done = CliRunner().invoke(cli.app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    content = json.loads((out / "result.json").read_text())
    auroc = {
        (entry["name"], row["group"]): row["auroc"]
        for entry in content["detectors"]
        for row in entry["results"]
        if row["objective"] is row["algorithm"] is None
    }
    # Noise of this size is what the natural scene statistics were made for.
    assert min(auroc["nss", "linf 0.125"], auroc["nss", "linf 0.3125"]) > 0.9
    assert all(0 <= value <= 1 for value in auroc.values())
    successes = {arm["group"]: arm["successes"] for arm in content["arms"]}
    assert successes["linf 0.3125"] >= successes["linf 0.125"] > 5
