"""Models of commands: by name, with weights of other prefixes, with a normalisation and at another size."""

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from robust_ext.cli import app as cli
from robust_ext.cli.models import load_model, load_weights
from robust_ext.core.errors import DataError, InvalidArgumentError, RobustExtError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.libraries import library

SETTINGS = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 10}
TIMM = f"timm:vit_tiny_patch16_224({', '.join(f'{key}={value}' for key, value in SETTINGS.items())}{{}})"
STATE = digits_network().state_dict()
WRAPPED = """
from torch import nn
from robust_ext.demo.network import digits_network
def make(): return nn.Sequential(nn.Identity(), digits_network(trained=False))
"""


def run(*arguments):
    done = CliRunner().invoke(cli.app, ["binarization", *arguments, "--no-progress", "--in-process"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_a_verdict_on_a_model_of_timm_whose_images_are_resized(tmp_path):
    """One command; what was done to the images is in the result."""
    library("timm")
    attack = ["--attack", "robust_ext:APGD(steps=5)", "--eps", "0.1", "--inner-points", "20", "--canaries", "0"]
    attack += ["--data", "digits", "--samples", "4"]
    done = run("--model", TIMM.format(", in_chans=1"), *attack, "--out", str(tmp_path))
    assert done.exit_code in (0, 3), done.output
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["settings"]["data_origin"] == "digits-test, order random, resized from 8 x 8 to 16 x 16 (bilinear)"
    with pytest.raises(RobustExtError, match="expected 3 channels"):
        run("--model", TIMM.format(""), *attack)
    with pytest.raises(InvalidArgumentError, match=r"--bounds: got -1,1, expected those of timm:.*, \(0.0, 1.0\)"):
        run("--model", TIMM.format(""), "--bounds=-1,1", *attack)


def test_images_are_resized_as_pillow_does_it():
    dataset = load_dataset("digits")
    inputs, labels = dataset.take([0, 3], size=(12, 5))
    assert (tuple(inputs.shape), labels.tolist()) == ((2, 1, 12, 5), dataset.labels[[0, 3]].tolist())
    image = Image.fromarray(dataset.take([3])[0][0, 0].numpy()).resize((5, 12), Image.Resampling.BILINEAR)
    torch.testing.assert_close(inputs[1, 0], torch.tensor(np.asarray(image)), rtol=1e-4, atol=1e-4)
    low = dataset.take([0], bounds=(-3, 1), size=(64, 64))[0]
    assert -3 <= float(low.min()) < float(low.max()) <= 1


def test_a_mean_and_std_are_put_before_any_model():
    x = torch.rand(3, 1, 8, 8)
    made = load_model("digits", mean=[0.25], std=[0.5]).model
    torch.testing.assert_close(made(x), digits_network()((x - 0.25) / 0.5))
    library("timm")
    named = load_model(TIMM.format(""), mean=[0.1, 0.2, 0.3], std=[0.4]).model
    stated = load_model(TIMM.format("")).model
    x, mean = torch.rand(2, 3, 16, 16), torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    # In place of the library's own mean and standard deviation of 0.5.
    torch.testing.assert_close(named(x), stated((x - mean) / 0.4 * 0.5 + 0.5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefix", ["module.", "model.network.", ""])
def test_weights_whose_names_differ_by_a_prefix_are_loaded_and_it_is_said(prefix, tmp_path, caplog):
    save_file({prefix + name: value + 1 for name, value in STATE.items()}, tmp_path / "w.safetensors")
    model = load_model("digits", weights=str(tmp_path / "w.safetensors")).model
    assert all(torch.equal(value, STATE[name] + 1) for name, value in model.state_dict().items())
    assert bool(caplog.records) == (f"'{prefix}' was taken off all" in caplog.text) == bool(prefix)


def test_weights_of_wrapped_and_older_networks_fit(tmp_path, caplog):
    """The model may have a prefix of its own; counters may be missing, as in files of torch before 0.4.1."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3))
    state = {f"module.{name}": value + 1 for name, value in network.state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "w.safetensors")
    load_weights(network, tmp_path / "w.safetensors")
    assert all(torch.equal(network.state_dict()[name[7:]], value) for name, value in state.items())
    assert network[2].num_batches_tracked == 0
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    state = {f"module.{name}": value for name, value in STATE.items()}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "w.pt")
    model = load_model(f"{tmp_path / 'wrapped.py'}:make", weights=str(tmp_path / "w.pt")).model
    assert torch.equal(model[1].state_dict()["0.weight"], STATE["0.weight"])
    assert f"'module.' was taken off and '1.' was put before all {len(STATE)} names" in caplog.text
    assert "was in train mode; it is put into eval mode" in caplog.text
    assert not model.training


def test_weights_of_a_model_by_name_are_those_of_its_library(tmp_path, caplog):
    """A state dict of timm's own network, without a prefix, goes into the module with the normalisation."""
    network = library("timm").create_model("vit_tiny_patch16_224", **SETTINGS).eval()
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    model = load_model(TIMM.format(""), weights=str(tmp_path / "w.safetensors")).model
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(model(x), network((x - 0.5) / 0.5))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_bad_weights_run_no_code(tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    for name, value in {"harmful": Harm(), "other": {"0.weight": torch.zeros(3)}, "list": [1, 2]}.items():
        torch.save(value, tmp_path / f"{name}.pt")
    for name in ("damaged.pt", "damaged.safetensors"):
        (tmp_path / name).write_bytes(b"\x00\x01")
    for name in ("harmful.pt", "damaged.pt", "damaged.safetensors", "other.pt", "list.pt"):
        with pytest.raises(DataError, match=name):
            load_model("digits", weights=str(tmp_path / name))
    assert not (tmp_path / "harm").exists()
