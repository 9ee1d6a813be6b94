"""docs/robust_accuracy.md and docs/adaptive_defenses.md name what results hold."""

import re
from pathlib import Path

import torch
from torch import nn

from robust_ext import ThreatModel, robust_accuracy
from robust_ext.evaluations.adaptive import evaluate_defense

DOCS = Path(__file__).parents[2] / "docs"


def documented(page, heading):
    table = (DOCS / page).read_text(encoding="utf-8").split(f"| {heading} |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`(\w+)(?:\[\])?`", cell)}


def subject():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 5)).eval()
    x = torch.rand(6, 1, 3, 3)
    with torch.no_grad():
        return network, x, network(x).argmax(1)


def test_robust_accuracy():
    network, x, y = subject()
    content = robust_accuracy(network, "robust_ext:APGD(steps=2)", x, y, norm="linf", epsilons=[0.1]).to_dict()
    assert documented("robust_accuracy.md", "key") == set(content)
    assert documented("robust_accuracy.md", "key of an attack") == set(content["attacks"][0])


def test_test_time():
    network, x, y = subject()
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    content = evaluate_defense(network, lambda x: x, x, y, threat_model, steps=2, queries=5).to_dict()
    assert documented("test_time.md", "key") == set(content)
    for part in ("static", "defended"):
        assert documented("test_time.md", "key of an attack") == set(content[part]["attacks"][0])
