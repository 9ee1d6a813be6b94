"""The scripts in examples/, the tutorials and the how-tos: they run, and print what is shown."""

import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
import typer.main
from safetensors.torch import load_file

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


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in an empty folder and returns what it prints: in this process, which has the libraries already."""

    def here(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [*map(str, (SCRIPTS / name, *arguments))])
        monkeypatch.syspath_prepend(str(SCRIPTS))
        with torch.random.fork_rng():
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        return capsys.readouterr().out

    return here


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
def test_example(name, run, tmp_path):
    beginning, held = EXAMPLES[name]
    if name == "by_hand.py":
        # In a process of its own: its attacks go to others.
        printed = subprocess.check_output([sys.executable, SCRIPTS / name], cwd=tmp_path, text=True)
    else:
        printed = run(name)
    assert printed.startswith(beginning)
    assert held in printed
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_run_or_needs_files():
    # The model of the README's diagnosis is run there.
    needy = {f"{name}.py" for name in ("networks", "resnet20_recipes", "train_plain", "train_mead", "rounded")}
    assert {path.name for path in SCRIPTS.glob("*.py")} == {*EXAMPLES, *needy}


@pytest.mark.exhaustive
def test_recipes_on_a_resnet(run, tmp_path):
    weights = need("models", "cifar10_resnet20.safetensors")
    # Into the standard layout.
    run(need("data", "unpack_cifar10.py"), tmp_path, "--train", "5")
    lines = run("resnet20_recipes.py", "--weights", weights, "--data-root", tmp_path, "--samples", "8").splitlines()
    scores = {line[:42].strip(): float(line.split("score ")[1].split()[0]) for line in lines}
    assert len(scores) == 5
    for name, score in scores.items():
        assert score >= 0.95 if name.endswith(("x eps/8", "difference")) else score <= 0.5, name


def test_the_architectures_are_those_that_were_published():
    """He et al.'s ResNet-18 with a first convolution of 3 x 3 and 10 classes; weights reproduce their accuracy."""
    networks = SCRIPTS / "networks.py"
    assert sum(value.numel() for value in load_model(f"{networks}:mead_cifar10").model.parameters()) == 11_173_962
    weights = need("models", "mnist_wong_kolter_linf_0.1.safetensors")
    inputs, labels = load_dataset("mnist", root=need("data")).take(range(500))
    with torch.no_grad():
        right = load_model(f"{networks}:wong_kolter_mnist", weights=str(weights)).model(inputs).argmax(1) == labels
    assert float(right.float().mean()) > 0.95


def test_training_that_is_killed_ends_with_the_same_weights(run, tmp_path):
    """MEAD's ResNet-18 of two channels, on images whose brightness is their class."""
    folder, draws = tmp_path / "cifar-10-batches-bin", np.random.default_rng(0)
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = draws.integers(0, 10, (24, 1))
        pixels = draws.normal(60 + 14 * labels, 30, (24, 3072)).clip(0, 255)
        (folder / f"{name}.bin").write_bytes(np.hstack([labels, pixels]).astype(np.uint8).tobytes())
    size = ("--width", "2", "--epochs", "4", "--batch-size", "16", "--augment", "--decay")
    command = ("train_mead.py", "--data", "cifar10", "--data-root", str(tmp_path), *size, "--out")
    again = (*command, str(tmp_path / "killed.safetensors"))
    words = [sys.executable, str(SCRIPTS / again[0]), *again[1:]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout.readline().startswith("epoch 1")
        process.kill()
    assert "epoch 1" not in run(*again)
    assert "epoch 1" in run(*command, tmp_path / "whole.safetensors")
    whole, killed = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    with pytest.raises(SystemExit, match="other settings"):
        run(*again, "--seed", "1")


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.py"))
HOWTO = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "howto").glob("*.md"))}
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
RUN = [name for name, text in HOWTO.items() if BLOCK.search(text)]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(script, tmp_path, monkeypatch, capsys):
    """From an empty folder, with warnings as errors; each ends with a figure."""
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    pyplot.close("all")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as absent:
            pytest.skip(str(absent))
    assert capsys.readouterr().out
    figure = pyplot.figure(max(pyplot.get_fignums()))
    assert any(axes.has_data() for axes in figure.axes)
    # Text that leaves the figure, or axes that collapse, are warnings here.
    figure.savefig(tmp_path / "figure.png")
    pyplot.close("all")


@pytest.mark.parametrize("name", RUN)
def test_the_lines_of_a_how_to_run(name, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": name}
    for code, shown in BLOCK.findall(HOWTO[name]):
        exec(compile(code, f"{name}.md", "exec"), names)  # noqa: S102 - our own pages
        assert capsys.readouterr().out.startswith(shown)
    if name == "pytest":
        names["test_my_attack"](request.getfixturevalue("attack_test"))
    if name == "attack_for_a_detector":
        aware, blind = (attack["score"] for attack in names["result"].content["attacks"])
        assert aware > blind


def test_every_how_to_is_in_the_table_and_its_commands_have_options_that_exist():
    assert set(re.findall(r"\((\w+)\.md\)", HOWTO["README"])) == {*HOWTO} - {"README"}
    assert {*RUN} >= {"logits_in_a_dict", "inconclusive", "attack_for_a_detector", "resume", "add_an_attack", "compare"}
    commands = typer.main.get_command(cli.app).commands
    for text in HOWTO.values():
        lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
        for name, rest in re.findall(r"robust-ext ([a-z-]+)((?:[^\n\\]|\\\n)*)", lines):
            known = {option for one in commands[name].params for option in one.opts}
            assert {*re.findall(r"(?<= )--[a-z-]+", rest)} <= known, f"robust-ext {name}{rest}"
