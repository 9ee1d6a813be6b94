"""No attack passes the binarization test by reading, making up or changing what decides about it."""

from functools import cache

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, binarization_test
from robust_ext.core.errors import DisturbedError
from tests.engine import cheats

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.1)


class Rounded(nn.Module):
    """Features without a gradient, linear in the rounded input."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.hidden, self.head = nn.Linear(36, 80), nn.Linear(80, 3)

    def forward(self, x):
        return self.head(self.hidden((x.flatten(1) * 50).round() / 50))


class Keeping(Rounded):
    """The same, with all inputs kept."""

    def __init__(self):
        super().__init__()
        self.last, self.seen = None, []

    def forward(self, x):
        self.last = x.detach()
        self.seen.append(self.last)
        return super().forward(x)


def judged(attack, *, model=Rounded, **options):
    x = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    few = {"inner_points": 50, "planted_candidates": 1, "random_inner": 20, "random_corners": 20, "canaries": 0}
    options = {**few, **options}
    return binarization_test(model().eval(), attack, x, THREAT_MODEL, **options)


@pytest.mark.exhaustive
def test_no_cheat_passes_at_arms_length_and_an_attack_after_them_is_judged_as_it_is_alone():
    options = {"model": Keeping, "isolate": True, "judge_seed": 3}
    alone = judged("robust_ext:Square(queries=200)", **options)
    after = judged([*cheats.ALL, "robust_ext:Square(queries=200)"], **options)
    name = "robust_ext:Square(queries=200)"
    assert [r["attacks"][name] for r in after.records] == [r["attacks"][name] for r in alone.records]
    *cheating, _ = after.content["attacks"]
    assert [one["name"] for one in cheating] == [cheat.__name__ for cheat in cheats.ALL]
    for one in cheating:
        assert (one["verdict"], one["samples"], one["score"]) == ("failed", 12, 0), one["name"]


def test_the_same_cheats_work_where_nothing_keeps_them_away():
    """So the test above fails where an attack's process has what it should not have."""
    for one in judged(cheats.READING, model=Keeping).content["attacks"]:
        assert one["score"] == 1, one["name"]


def test_what_a_model_keeps_of_its_inputs_stays_with_the_judge():
    result = judged(cheats.kept_inputs, model=Keeping, isolate=True, judge_seed=3)
    assert result.content["attacks"][0]["score"] == 0


@cache
def untouched():
    """Records of an attack before any tampering."""
    return judged("robust_ext:APGD(steps=3)").records


@pytest.mark.parametrize("cheat", cheats.TAMPERING, ids=lambda cheat: cheat.__name__)
def test_tampering_with_the_model_in_this_process_does_not_reach_the_judge(cheat):
    """Tampering with classes and functions of the judge needs a process of its own."""
    before = untouched()
    if cheat in (cheats.patched_forward, cheats.buffer_swap, cheats.tensor_subclass):
        assert judged(cheat).content["attacks"][0]["score"] == 0
    else:
        with pytest.raises(DisturbedError, match=cheat.__name__):
            judged(cheat)
    assert judged("robust_ext:APGD(steps=3)").records == before, "nothing of it is left"
