"""Valid inputs from the command line: levels, limits of entries from files, and images that are read again."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from robust_ext import ThreatModel
from robust_ext.cli.app import app
from robust_ext.cli.entries import EntryOptions
from robust_ext.evaluations.png_export import export_png

NETWORK = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).eval()
"""
MASK = np.arange(36).reshape(6, 6) % 6 < 4


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A network, eight images of 8 bits, and a mask."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    names = {}
    exec(NETWORK, names)  # noqa: S102 - the text above
    images = np.random.default_rng(0).integers(0, 256, (8, 3, 6, 6), dtype=np.uint8)
    labels = names["make"]()(torch.tensor(images) / 255).argmax(1).numpy()
    np.savez("data.npz", images=images, labels=labels)
    np.save("mask.npy", MASK)
    return names["make"](), images, labels


def run(*more, command="robust-accuracy"):
    attack = ["--attack", "robust_ext:APGD(steps=20)"] if command != "evaluate" else []
    shared = ["--model", "net.py:make", "--data", "data.npz", "--samples", "8", "--order", "first", "--eps", "24/255"]
    return CliRunner().invoke(app, [command, *shared, *attack, "--in-process", *more], catch_exceptions=True)


@pytest.mark.parametrize("command", ["robust-accuracy", "evaluate"])
def test_images_are_written_read_again_and_break_the_model(folder, tmp_path, command):
    net, images, labels = folder
    budget = ["--budget", "quick", "--planted", "0"] if command == "evaluate" else []
    options = ["--levels", "256", "--entries", "mask.npy", "--out", "run", "--png", "png", *budget]
    done = run(*options, command=command)
    assert done.exit_code == 0, done.output
    before = {path.name for path in tmp_path.iterdir()}
    assert before <= {"net.py", "data.npz", "mask.npy", "run", "png", "__pycache__"}
    written = sorted((tmp_path / "png").iterdir())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    worst = result["worst_case"] if command == "evaluate" else result["worst_case"][0]
    assert f"png holds {len(written)} images" in done.output
    assert 0 < len(written) == worst["robust"].count("0")
    assert worst["without_rounding"] <= worst["robust_accuracy"]
    for path in written:
        row = int(re.fullmatch(r"sample-(\d+)\.png", path.name).group(1))
        read = np.moveaxis(np.asarray(Image.open(path)), -1, 0)
        assert read.dtype == np.uint8
        moved = read.astype(int) - images[row]
        assert abs(moved).max() <= 24
        assert not moved[:, ~MASK].any()
        with torch.no_grad():
            assert int(net(torch.tensor(read)[None] / 255).argmax()) != labels[row]


def test_images_of_points_that_do_not_break_the_model_are_not_written(folder):
    _, images, labels = folder
    assert run("--levels", "256", "--out", "run").exit_code == 0
    inputs, model = torch.tensor(images) / 255, ThreatModel(norm="linf", epsilon=24 / 255, levels=256)

    class Constant(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot(torch.tensor(labels[:1]), 3).float().expand(len(x), 3)

    found = export_png("run", "png", Constant(), inputs, torch.tensor(labels)[:1].expand(8), model)
    assert not found.written
    assert found.lost


def test_images_between_the_levels_are_rounded(folder):
    """The run is that of the rounded images; the record says what was done."""
    _, images, labels = folder
    images, found = images.clip(0, 254), {}
    for name, given in (("exact", images), ("between", (images + np.float32(0.3)) / np.float32(255))):
        np.savez("data.npz", images=given, labels=labels)
        assert run("--levels", "256", "--out", name).exit_code == 0
        found[name] = json.loads(Path(name, "result.json").read_text())
    assert found["between"]["worst_case"] == found["exact"]["worst_case"]
    origins = [one["settings"]["data_origin"] for one in found.values()]
    assert [one.endswith(", rounded to 256 levels") for one in origins] == [False, True]


def test_files_give_the_limits_of_entries(tmp_path):
    plain = ThreatModel(norm="linf", epsilon=0.25)
    weights, low = (np.arange(36).reshape(6, 6) + 29) / 64, np.zeros((6, 6))
    for name, arrays, expected in (
        ("weights", {"mask": MASK, "weights": weights}, {"mask": MASK, "epsilon": weights * 0.25}),
        ("epsilon", {"epsilon": weights * 0.25}, {"epsilon": weights * 0.25}),
        ("bounds", {"low": low, "high": low + weights}, {"epsilon": 0.25, "bounds": (low, low + weights)}),
        ("kinds", {"kinds": np.array(["integer", "real"])}, {"epsilon": 0.25, "kinds": ["integer", "real"]}),
    ):
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)
        assert EntryOptions(entries=path).applied(plain) == ThreatModel(norm="linf", **{"epsilon": 0.25, **expected})
    assert EntryOptions(levels=256).applied(plain) == ThreatModel(norm="linf", epsilon=0.25, levels=256)


def test_a_table_in_its_own_units(tmp_path, monkeypatch):
    """Years and an income, by a linear model: a row is robust where its score exceeds all that the budgets allow."""
    monkeypatch.chdir(tmp_path)
    weight, budgets = np.array([0.3, -0.0001]), np.array([5.0, 2000.0])
    (tmp_path / "net.py").write_text(
        "import torch\n\nmodel = torch.nn.Linear(2, 2).eval()\n"
        f"model.weight.data = torch.tensor([[0.0, 0.0], {weight.tolist()}])\nmodel.bias.data *= 0\n"
    )
    table = np.random.default_rng(0).uniform([30, 60_000], [60, 200_000], (40, 2))
    scores = table @ weight
    np.savez("table.npz", x=table, y=(scores > 0).astype(int))
    np.savez("limits.npz", epsilon=budgets, low=np.array([18.0, 0.0]), high=np.array([90.0, 500_000.0]))
    words = ["--model", "net.py:model", "--data", "table.npz", "--samples", "40", "--order", "first", "--eps", "2000"]
    words += [
        "--entries",
        "limits.npz",
        "--attack",
        "robust_ext:APGD(steps=10)",
        "--bounds",
        "0,500000",
        "--out",
        "run",
    ]
    done = CliRunner().invoke(app, ["robust-accuracy", *words, "--in-process"])
    assert done.exit_code == 0, done.output
    (worst,) = json.loads((tmp_path / "run" / "result.json").read_text())["worst_case"]
    robust = np.abs(scores) > np.abs(weight) @ budgets
    assert 0 < robust.sum() < 40
    assert worst["robust"] == "".join("01"[one] for one in robust.astype(int))
