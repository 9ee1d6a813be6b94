"""A search that is stopped within a block is gone on with, to the records that it would have left anyway."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.core.errors import RobustExtWarning
from robust_ext.core.settings import settings_class
from robust_ext.engine import saved

INPUTS = torch.rand(5, 12, generator=torch.Generator().manual_seed(0))


def evaluate(out, *, norm="l2", name="LinearRegion", unit="passes", isolate=False):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    attack = f"robust_ext:{name}(budget={200 if unit == 'passes' else 0.05}, budget_unit='{unit}', regions=2, hops=9)"
    attack = attack if name == "LinearRegion" else attack.replace("regions=2, ", "")
    labels, threat_model = network(INPUTS).argmax(1), ThreatModel(norm=norm, epsilon=0.1)
    given = {"out": out, "batch_size": 3, "isolate": isolate}
    return robust_ext.robust_accuracy(network, attack, INPUTS, labels, threat_model, **given)


def stopped(monkeypatch, out, after, **given):
    """An evaluation that is stopped once its searches were kept so many times."""
    kept, offer = [], saved.TaskSearch.offer

    def stopping(self, state):
        offer(self, state)
        kept.append(self)
        if len(kept) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saved, "_SECONDS", 0.0)
        patch.setattr(saved, "_RATIO", 0.0)
        patch.setattr(saved.TaskSearch, "offer", stopping)
        with pytest.raises(KeyboardInterrupt):
            evaluate(out, **given)
    return [file.name for file in out.rglob("search-*")]


def left(folder):
    """Records without what queries showed, and passes."""
    (records,) = folder.rglob("records.jsonl")
    (timings,) = folder.rglob("timings.jsonl")
    apart = ("trace", "checksum", "phases")
    found = [json.loads(line) for file in (records, timings) for line in file.read_text().splitlines()]
    passes = [entry["phases"]["attack"][:2] for entry in found if "phases" in entry]
    return passes, [{key: one for key, one in entry.items() if key not in apart} for entry in found if "index" in entry]


@pytest.mark.parametrize(
    ("after", "more"),
    [
        (3, {"norm": "linf", "name": "BoundarySearch"}),
        (7, {}),
        *(pytest.param(after, {"norm": "l1"}, marks=pytest.mark.exhaustive) for after in (1, 5, 7)),
    ],
)
def test_what_is_found_is_that_of_a_search_that_was_not_stopped(tmp_path, monkeypatch, after, more):
    evaluate(tmp_path / "whole", **more)
    assert len(stopped(monkeypatch, tmp_path / "cut", after, **more)) == 1
    found = evaluate(tmp_path / "cut", **more)
    assert left(tmp_path / "cut") == left(tmp_path / "whole")
    for one, other in zip(*(sorted((tmp_path / name).rglob("*.npz")) for name in ("cut", "whole")), strict=True):
        assert (np.load(one)["candidates"] == np.load(other)["candidates"]).all()
    assert found.content["time"]["resumed"] == 1
    assert "Searches of an earlier call were gone on with within 1 block." in str(found)
    assert not list(tmp_path.rglob("search-*"))


@pytest.mark.exhaustive
def test_a_process_of_an_attack_goes_on_too(tmp_path, monkeypatch):
    evaluate(tmp_path / "whole")
    stopped(monkeypatch, tmp_path / "cut", 3)
    assert evaluate(tmp_path / "cut", isolate=True).content["time"]["resumed"] == 1
    assert left(tmp_path / "cut") == left(tmp_path / "whole")


@settings_class
class Dying(BoundarySearch):
    """Kills its process after it was kept twice, where nothing was kept before."""

    name = "Dying"

    def run(self, *args, saved, **given):
        first = saved.load() is None
        times, offer = [], saved.offer

        def dying(state):
            saved._due = 0.0
            offer(state)
            times.append(0)
            if first and len(times) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        saved.offer = dying
        return super().run(*args, saved=saved, **given)


@pytest.mark.exhaustive
def test_the_judge_keeps_what_a_process_of_an_attack_sends(tmp_path):
    network = nn.Linear(12, 3).eval()
    labels, threat_model = network(INPUTS).argmax(1), ThreatModel(norm="l2", epsilon=9.0)
    given = {"out": tmp_path, "isolate": True}
    found = robust_ext.robust_accuracy(network, Dying(budget=200, hops=2), INPUTS, labels, threat_model, **given)
    assert found.robust_accuracy(9.0) == 0
    (records,) = tmp_path.rglob("records.jsonl")
    assert all(json.loads(line)["trace"] is None for line in records.read_text().splitlines()), "it was gone on with"


def test_seconds_go_on_and_what_is_damaged_is_begun_anew(tmp_path, monkeypatch):
    stopped(monkeypatch, tmp_path, 2, unit="seconds")
    (file,) = tmp_path.rglob("search-*")
    content = file.read_bytes()
    file.write_bytes(content[:90] + bytes([content[90] ^ 1]) + content[91:])
    with pytest.warns(RobustExtWarning, match="it starts again"):
        found = evaluate(tmp_path, unit="seconds")
    assert found.content["time"]["resumed"] == 0
