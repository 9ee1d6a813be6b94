"""Criteria and valid inputs from the command line, on small models: what counts, levels, and limits of entries."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from robust_ext import MultiLabel, Targeted, ThreatModel, TopK, robust_accuracy
from robust_ext.cli.app import app
from robust_ext.cli.entries import EntryOptions
from robust_ext.evaluations.png_export import export_png

NETWORKS = """
import torch
from torch import nn
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 5)).eval()
def coloured():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).eval()
"""
NAMES = {}
exec(NETWORKS, NAMES)  # noqa: S102 - the text above
X = torch.rand(30, 1, 5, 5, generator=torch.Generator().manual_seed(1))
MODEL = ThreatModel(norm="linf", epsilon=0.1)
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 3, 6, 6), dtype=np.uint8)
MASK = np.arange(36).reshape(6, 6) % 6 < 4
NET = NAMES["make"]()
with torch.no_grad():
    SCORES = NET(X)
    COLOURS = NAMES["coloured"]()(torch.tensor(IMAGES) / 255).argmax(1)
LABELS, SETS = SCORES.argmax(1), (SCORES > 0).long()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORKS)
    for name, labels in (("classes", LABELS), ("sets", SETS)):
        np.savez(f"{name}.npz", x_test=X.numpy(), y_test=labels.numpy())
    np.savez("images.npz", images=IMAGES, labels=COLOURS.numpy())
    np.save("targets.npy", ((LABELS + 2) % 5).numpy())
    np.save("mask.npy", MASK)
    return tmp_path


ATTACK = ("--attack", "robust_ext:APGD(steps=10)")


def run(words, *more, data="classes", model="make", fails=False, attack=ATTACK, samples=30, eps="0.1", out="run"):
    given = [*words.split(), "--model", f"net.py:{model}", "--data", f"{data}.npz", "--in-process", "--no-progress"]
    given += ["--samples", str(samples), "--order", "first", "--eps", eps, *attack, "--out", out]
    found = CliRunner().invoke(app, [*given, *more])
    assert (found.exit_code != 0) == fails, found.exception
    return str(found.exception) if fails else json.loads(Path(out, "result.json").read_text())


CRITERIA = {
    "--top 2": (TopK(2), "classes", LABELS),
    "--targets next": (Targeted("next"), "classes", LABELS),
    "--targets targets.npy": (Targeted((LABELS + 2) % 5), "classes", LABELS),
    "--multi-label all": (MultiLabel(), "sets", SETS),
    "--multi-label 0,3": (MultiLabel((0, 3)), "sets", SETS),
}


@pytest.mark.parametrize("words", CRITERIA)
def test_as_in_python(folder, words):
    criterion, data, labels = CRITERIA[words]
    found = run(f"robust-accuracy {words}", data=data)
    expected = robust_accuracy(NET, "robust_ext:APGD(steps=10)", X, labels, MODEL, criterion=criterion)
    for key in ("clean_accuracy", "worst_case", "criterion"):
        assert found[key] == expected.content[key]
    if data == "sets":
        assert "give robust_accuracy" in run("robust-accuracy", data="sets", fails=True)


COLOURED = {"data": "images", "model": "coloured", "samples": 8, "eps": "24/255"}
PGD = ("--attack", "robust_ext:APGD(steps=20)")


@pytest.mark.parametrize("command", ["robust-accuracy", "evaluate"])
def test_images_are_written_read_again_and_break_the_model(folder, command):
    quick = {"attack": ("--budget", "quick", "--planted", "0") if command == "evaluate" else PGD}
    before = {path.name for path in folder.iterdir()}
    result = run(f"{command} --levels 256 --entries mask.npy --png png", **COLOURED, **quick)
    assert {path.name for path in folder.iterdir()} - before - {"__pycache__"} == {"run", "png"}
    written = sorted((folder / "png").iterdir())
    worst = result["worst_case"] if command == "evaluate" else result["worst_case"][0]
    assert 0 < len(written) == worst["robust"].count("0")
    assert worst["without_rounding"] <= worst["robust_accuracy"]
    for path in written:
        row = int(re.fullmatch(r"sample-(\d+)\.png", path.name).group(1))
        read = np.moveaxis(np.asarray(Image.open(path)), -1, 0)
        assert read.dtype == np.uint8
        moved = read.astype(int) - IMAGES[row]
        assert abs(moved).max() <= 24
        assert not moved[:, ~MASK].any()
        with torch.no_grad():
            assert int(NAMES["coloured"]()(torch.tensor(read)[None] / 255).argmax()) != COLOURS[row]


def test_images_between_the_levels_are_rounded_and_those_that_break_nothing_not_written(folder):
    """The run is that of the rounded images; the record says what was done."""
    images, found = IMAGES.clip(1, 254), {}
    shifts = np.where(np.arange(6) % 2, 0.3, -0.3).astype(np.float32)
    for name, given in (("exact", images), ("between", (images + shifts) / np.float32(255))):
        np.savez("images.npz", images=given, labels=COLOURS.numpy())
        found[name] = run("robust-accuracy --levels 256", attack=PGD, out=name, **COLOURED)
    assert found["between"]["worst_case"] == found["exact"]["worst_case"]
    exact, between = (next(Path(name).rglob("arrays.bin")).read_bytes() for name in found)
    assert exact == between
    origins = [one["settings"]["data_origin"] for one in found.values()]
    assert [one.endswith(", rounded to 256 levels") for one in origins] == [False, True]

    constant = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
    constant[1].weight.data.zero_()
    model, labels = ThreatModel(norm="linf", epsilon=24 / 255, levels=256), constant[1].bias.argmax().expand(8)
    written = export_png("exact", "png", constant, torch.tensor(images) / 255, labels, model)
    assert not written.written
    assert written.lost


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
