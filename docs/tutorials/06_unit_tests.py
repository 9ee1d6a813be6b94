# %% [markdown]
# # Your own attack, and unit tests for it
#
# A bug in an attack raises no error. Robust accuracy goes up, which looks like good news. This tutorial writes an
# attack from scratch, tests it as any other code, and then breaks it on purpose in four ways, to see that the tests
# notice.
#
# ## The attack
#
# PGD on the difference of logits, in a dozen lines of PyTorch. The faults that will be switched on later are
# parameters. A function `(model, x, y)` is an attack here; one with a parameter `epsilon` is given the budget.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from robust_ext import ThreatModel, binarization_test
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.testing import assert_attack_passes

LINF = ThreatModel(norm="linf", epsilon=0.1)


def make_attack(*, rel_step=0.1, sign=1, project=True, predicted=False):
    """PGD on the margin, 20 steps from the input, and the faults it may have."""

    def attack(model, x, y, epsilon):
        labels = model(x).argmax(1) if predicted else y
        points = x.clone()
        for _ in range(20):
            points.requires_grad_(True)
            logits = model(points)
            own = logits.gather(1, labels[:, None]).squeeze(1)
            other = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
            (gradient,) = torch.autograd.grad((other - own).sum(), points)
            points = points.detach() + sign * rel_step * epsilon * gradient.sign()
            if project:
                points = x + (points - x).clamp(-epsilon, epsilon)
            points = points.clamp(0, 1)
        return points

    return attack


# %% [markdown]
# ## The test
#
# `assert_attack_passes` plants adversarial examples in the network and raises an `AssertionError` unless the attack
# finds them. The rule is sequential: 32 inputs suffice for an attack that misses nothing. The seed is fixed, so the
# verdict is the same each time.

# %%
network = digits_network()
inputs, _ = load_dataset("digits").take(range(64))
result = assert_attack_passes(network, make_attack(), inputs, LINF)
print(result)
assert result.verdict == "passed"

# %% [markdown]
# ## Four mutants
#
# A test is worth what it catches. Each of these faults has been in published code.

# %%
faults = {
    "steps too small": {"rel_step": 0.005},
    "wrong sign": {"sign": -1},
    "no projection": {"project": False},
    "predicted labels": {"predicted": True},
}
messages = {}
for name, fault in faults.items():
    try:
        assert_attack_passes(network, make_attack(**fault), inputs, LINF)
    except AssertionError as error:
        messages[name] = str(error)
assert list(messages) == list(faults)

# %% [markdown]
# All four are caught. Each message begins with the table of the test, then has the cause and a remedy. The causes:

# %%
for name, message in messages.items():
    cause = " ".join(message.partition("\n1. [high] attack: ")[2].partition("Remedy")[0].split())
    print(f"{name}: {cause}\n")
assert "The path is too short" in messages["steps too small"]
assert "It moves in the wrong direction" in messages["wrong sign"]
assert "It leaves the ball" in messages["no projection"]
assert "It attacks the model's predicted labels" in messages["predicted labels"]

# %% [markdown]
# Three of them find nothing that was planted. The fourth finds all of it, and fails nevertheless: the test also poses
# *canaries*, inputs that are misclassified as they are. An attack on predicted labels moves them back into their class,
# and robust accuracy counts them as robust.

# %%
settings = {"sequential": True, "depths": (1,)}
attacks = {"as it should be": make_attack(), **{name: make_attack(**fault) for name, fault in faults.items()}}
entries = {}
for name, attack in attacks.items():
    entries[name] = binarization_test(network, {name: attack}, inputs, LINF, **settings).attacks[name]
assert entries["predicted labels"]["score"] == 1
assert entries["predicted labels"]["canaries"]["repaired"] == entries["predicted labels"]["canaries"]["planted"]
assert all(entries[name]["score"] == 0 for name in list(faults)[:3])

# %% [markdown]
# ## In pytest
#
# The package is a pytest plugin: the fixture `attack_test` is the same function, and the marker has its settings, a
# budget in seconds among them. Faults that are known and not fixed yet are marked as expected failures; with
# `strict=True` pytest reports when one is fixed.

# %%
TESTS = """
import pytest
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

LINF = ThreatModel(norm="linf", epsilon=0.1)


@pytest.fixture(scope="module")
def digits():
    return digits_network(), load_dataset("digits").take(range(64))[0]


@pytest.mark.attack_test(budget=600, depths=(1,))
@pytest.mark.parametrize(
    "attack",
    [
        "foolbox:LinfPGD(steps=40)",
        pytest.param(
            "foolbox:LinfPGD(steps=20, rel_stepsize=0.005)",
            marks=pytest.mark.xfail(raises=AssertionError, strict=True, reason="steps too small"),
        ),
    ],
)
def test_attack(attack_test, digits, attack):
    attack_test(digits[0], attack, digits[1], LINF)
"""
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "test_attacks.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "test_attacks.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
print(done.stdout)
assert done.returncode == 0
assert "1 passed, 1 xfailed" in done.stdout

# %% [markdown]
# ## The figure
#
# What the tests see of the attack and of its mutants: shares of planted examples found, and of canaries spoiled.

# %%
figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
for place, entry in enumerate(entries.values()):
    found, spoiled = entry["score"], entry["canaries"]["repaired"] / entry["canaries"]["planted"]
    axes.barh(place - 0.2, found, height=0.36, color="#3b6ea5", label="planted examples found" if not place else None)
    axes.barh(place + 0.2, spoiled, height=0.36, color="#d9a441", label="canaries spoiled" if not place else None)
    low, high = entry["score_interval"]
    axes.plot([low, high], [place - 0.2] * 2, color="black", linewidth=1)
    axes.annotate(entry["verdict"], (1.04, place), va="center", annotation_clip=False)
axes.set(yticks=range(len(entries)), yticklabels=list(entries), xlim=(0, 1.2), xticks=(0, 0.5, 1), xlabel="share")
axes.invert_yaxis()
figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
assert [entry["verdict"] for entry in entries.values()] == ["passed"] + 4 * ["failed"]

# %% [markdown]
# ## What to take along
#
# - Test an attack as code is tested: on a network small enough that the test takes seconds.
# - Break it on purpose once, and see that the test notices.
# - Do not assert a score of 1: one miss may be chance, and the test's rule allows for it.
#
# More: [unit tests for attacks](../unit_tests_for_attacks.md), [my attack failed, now what?](../my_attack_failed.md).
