"""What the cascade spends: passes of all networks, the nearest samples first, from the best points so far."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from robust_ext import ThreatModel, as_attack
from robust_ext.attacks._common.objectives import margin
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackError
from robust_ext.defenses import HedgeDefense
from robust_ext.evaluations.adaptive import Step
from robust_ext.evaluations.adaptive.predictions import predict_afresh
from tests.evaluations.adaptive.test_cascade import Still, evaluate, records_of, subject
from tests.evaluations.adaptive.test_evaluation import Leaving, Noise, plain
from tests.evaluations.subjects import rounded

__all__ = ["subject"]
WEAK = ThreatModel(norm="linf", epsilon=0.04)


class Priced(Still):
    """Takes a hundred passes of the target."""

    passes = 100

    def cost(self, threat_model, *, classes):
        return Cost(self.passes)

    def search(self, target, inputs, labels, *, threat_model, generator):
        for _ in range(self.passes):
            target.module(inputs)
        return inputs


class Cheap(Priced):
    """Takes ten."""

    passes = 10


def test_no_attack_goes_beyond_the_quarter(subject):
    """Nor one that comes after no other; naive ones come first in any case."""
    kinds = {"a": "naive", "b": "white-box", "c": "white-box", **dict.fromkeys("defgh", "black-box")}
    steps = [
        Step(
            name=name,
            category=kind,
            attack=Priced(name, Mock()),
            exposure="defense",
            after="a" if kind == "black-box" else "",
        )
        for name, kind in kinds.items()
    ]
    result = evaluate(subject, lambda x: x, steps, threat=WEAK)
    samples = {one["name"]: one["samples"] for one in result.content["defended"]["attacks"]}
    stood = round(20 * result.content["defended"]["clean_accuracy"])
    assert samples["a"] == stood
    # A quarter of eight attacks on 20 samples, of a hundred passes; three more judge each sample.
    assert stood < sum(samples.values()) <= 4000 / 103
    assert min(samples.values()) < stood
    assert {one["name"] for one in result.content["not_run"]} > set("efgh")
    alone = evaluate(subject, lambda x: x, steps[1], threat=WEAK)
    assert alone.content["not_run"] == []


FIRST = Step(name="first", category="naive", attack=Cheap("first", Mock()), exposure="defense")


def samples_of(subject, kinds):
    """How many samples each attack is run on, of those that come after a first one and take so many passes."""
    later = [
        replace(
            FIRST, name=f"{kind.__name__} {place}", category="black-box", attack=kind("later", Mock()), after="first"
        )
        for place, kind in enumerate(kinds)
    ]
    result = evaluate(subject, lambda x: x, [FIRST, *later], threat=WEAK)
    return {one["name"]: one["samples"] for one in result.content["defended"]["attacks"]}


def test_costly_attacks_share_samples_with_cheap_ones(subject):
    """What follows is run on equally many samples, but for rounding; equal passes would be enough for all 20."""
    _, *samples = samples_of(subject, [Priced, Cheap] * 3).values()
    assert len(samples) == 6
    assert 5 >= max(samples) >= min(samples) >= 3


class Free(Priced):
    """Takes one, and three to be judged: on all 20 samples less than a twentieth of what there is for all attacks."""

    passes = 1


def test_what_costs_next_to_nothing_comes_before_costly_attacks_on_all_samples(subject):
    samples = samples_of(subject, [Priced] * 6 + [Free])
    assert list(samples)[:2] == ["first", "Free 6"]
    assert samples["Free 6"] == samples["first"] > max(samples[f"Priced {place}"] for place in range(6))


def test_a_samples_draws_do_not_depend_on_what_is_judged_beside_it(subject):
    network, inputs, labels = subject
    defense = HedgeDefense(network, steps=1, radius=0.2, step_size=0.1)

    def margins(rows, number=0):
        return predict_afresh(defense, inputs[rows], labels[rows], ids=rows, seed=3, keys=("answers", number))[2]

    every = margins(list(range(20)))
    torch.testing.assert_close(margins([2, 5, 6]), every[[2, 5, 6]])
    assert (margins(list(range(20)), 1) != every).any(0)


class Beginning(Still):
    """Keeps where it was to begin."""

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.tell(target.starting_points)
        return inputs


def test_a_warm_start_is_the_best_point_so_far(subject, tmp_path):
    network, inputs, labels = subject
    # Also where a block's first sample is not attacked, as it is wrong without an attack.
    labels = torch.where(torch.arange(20) % 8 == 0, (labels + 1) % 10, labels)
    tell = Mock()
    steps = [
        Step(name="first", category="naive", attack=as_attack("robust_ext:APGD(steps=3)"), exposure="static"),
        Step(name="second", category="black-box", attack=Beginning("second", tell), exposure="defense", warm=True),
    ]
    evaluate((network, inputs, labels), lambda x: x, steps, out=tmp_path, threat=WEAK, batch_size=20)
    records = records_of(tmp_path)
    rows = [record["index"] for record in records["second"]]
    (starts,) = tell.call_args.args
    assert rows
    assert not torch.equal(starts[:, 0], inputs[rows])
    best = [
        max(one["margin"] for name in ("clean", "first") for one in records[name] if one["index"] == row)
        for row in rows
    ]
    torch.testing.assert_close(margin(network(starts[:, 0]), labels[rows]).detach(), torch.tensor(best))


@pytest.mark.parametrize(
    "defense", [rounded, pytest.param(Noise(), marks=pytest.mark.exhaustive)], ids=["rounded", "noise"]
)
def test_a_cascade_is_gone_on_with(subject, tmp_path, defense):
    """What was spent, what is nearest and where searches begin are found again in the run folder."""

    def run(attack, **keywords):
        mine = Step(name="mine", category="black-box", attack=attack, exposure="defense")
        more = {"queries": 500, "repeats": 2, "draws": 2, **keywords}
        return evaluate(subject, defense, ["recommended", mine], threat=WEAK, **more)

    whole = run(Leaving(), out=tmp_path.with_name(f"{tmp_path.name}_whole"))
    assert whole.content["not_run"]
    with pytest.raises(AttackError, match="stopped"):
        run(Leaving(raises=True), out=tmp_path)
    for _ in range(2):
        assert plain(run(Leaving(), out=tmp_path).content) == plain(whole.content)
