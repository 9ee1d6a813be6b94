"""docs/mead.md names what a result holds, and its example of a suite is one."""

import re
from pathlib import Path

import torch
from torch import nn

from robust_ext.evaluations.mead import Arm, load_suite, mead

PAGE = (Path(__file__).parents[3] / "docs" / "mead.md").read_text(encoding="utf-8")


def documented(heading):
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`(\w+)(?:\[\])?`", cell)}


def mentioned(heading):
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0]
    return set(re.findall(r"`(\w+)(?:\[\])?`", table))


def test_the_suite_can_be_loaded(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "mine.toml"
    file.write_text(text)
    arms = load_suite(str(file))
    assert len(arms) == 17
    assert {arm.group for arm in arms} == {"linf 0.03", "linf 0.1", "DeepFool"}


def test_the_keys_are_those_of_a_result():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 3)).eval()
    x = torch.rand(6, 1, 3, 3)
    with torch.no_grad():
        labels = network(x).argmax(1)
    result = mead(
        network,
        {"spread": lambda x: x.flatten(1).std(1)},
        x,
        labels,
        suite=(),
        arms=[Arm(attack="robust_ext:ObjectivePGD(steps=3)", norm="linf", epsilon=0.5)],
        published=True,
        resamples=5,
    )
    content = result.to_dict()
    (detector,) = content["detectors"]
    (arm,) = content["arms"]
    assert documented("key") == set(content)
    assert documented("key of a detector") == set(detector)
    assert documented("key of an arm") == set(arm)
    row = detector["results"][0]
    assert set(row) <= mentioned("key of a result")
    assert documented("key of a result") <= set(row)
    assert set(content["averages"][0]) <= mentioned("key")
