"""What users have, in at most six lines to a verdict: those of docs/start.md and docs/your_model.md, as they stand."""

import ast
import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn

from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.libraries import library
from tests.test_readme import text_of

START = text_of("docs/start.md")
BLOCK = r"<!-- {}: (\w+) -->\n```python\n(.*?)```"
PATHS = dict(re.findall(BLOCK.format("path"), START + text_of("docs/your_model.md"), re.DOTALL))
WHOLE = dict(re.findall(BLOCK.format("whole"), START, re.DOTALL))
FRAMEWORKS = ("jax", "keras", "tensorflow")
DIGITS = load_dataset("digits").take(range(32))
IMAGES = torch.rand(32, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def cell(capsys):
    """Runs the lines of a path as a notebook runs a cell, with a last line that is an expression: what is printed."""

    def run(name, **given):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            assert isinstance(ast.parse(PATHS[name]).body[-1], ast.Expr)
            exec(compile(PATHS[name], name, "exec"), given)  # noqa: S102 - our own page
        return capsys.readouterr().out

    return run


def verdicts(printed):
    return re.findall(r"^Verdict: ([A-Z]+)\.", printed, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.parametrize(
    "name", ["torch", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("foolbox", "art"))]
)
def test_whole_scripts_print_the_verdict_that_is_shown(name, capsys):
    if name != "torch":
        pytest.importorskip(name)
    exec(compile(WHOLE[name], name, "exec"), {"__name__": "__main__"})  # noqa: S102 - our own page
    (shown,) = re.findall(r"```text\n(Verdict: PASSED.*?)```", START, re.DOTALL)
    # What follows is of the attack: how deep it keeps up.
    assert shown.rstrip() in capsys.readouterr().out


def test_each_path_takes_at_most_six_lines():
    assert all(sum(map(bool, map(str.strip, code.splitlines()))) <= 6 for code in PATHS.values())
    others = {"torchvision", "timm", "transformers", "robustbench", "table", "sklearn", "function"}
    assert {*PATHS} == {*FRAMEWORKS, *others}


@pytest.mark.parametrize(
    "name", ["timm", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("torchvision", "transformers"))]
)
def test_networks_of_libraries(name, cell, monkeypatch):
    """One image is too few to pass, and enough to plant in and to find."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    library(name)
    printed = cell(name, inputs=IMAGES[:1])
    assert verdicts(printed) == ["INCONCLUSIVE"]
    assert "It found 1 of 1 planted examples" in " ".join(printed.split())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_models_of_other_frameworks(name, cell):
    pytest.importorskip(name)
    weights = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)).numpy()
    given = {"hidden": np.eye(64, dtype=np.float32), "head": weights, "weights": weights}
    if name == "keras":
        keras = pytest.importorskip("keras")
        keras.utils.set_random_seed(0)
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
        given["model"] = keras.Sequential(layers)
    assert verdicts(cell(name, inputs=DIGITS[0], **given)) == ["PASSED"]


def test_models_without_gradients(cell):
    """A forest is evaluated as it is, and a function of arrays is planted in."""
    inputs, labels = DIGITS
    assert "Square" in cell("sklearn", inputs=inputs.numpy(), labels=labels.numpy())
    network = digits_network()

    def predict(x):
        return network(torch.from_numpy(x)).detach().softmax(1).numpy()

    assert verdicts(cell("function", predict=predict, inputs=inputs)) == ["PASSED"]


def test_a_table_is_attacked_in_the_units_of_its_columns(cell):
    """Thirteen measurements of wines, between 0.1 and 1,700, and a small network that was just trained on them."""
    inputs, labels = load_wine(return_X_y=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(13, affine=False), nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))
    x, y = torch.tensor(inputs).float(), torch.tensor(labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    printed = cell("table", model=model.eval(), inputs=inputs[::4], labels=labels[::4])
    assert "45 samples, clean accuracy" in printed
