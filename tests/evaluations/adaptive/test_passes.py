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
from tests.evaluations.adaptive.test_evaluation import Leaving, plain
from tests.evaluations.subjects import rounded

__all__ = ["subject"]
WEAK = ThreatModel(norm="linf", epsilon=0.04)


class Doubtful(torch.nn.Module):
    """Moves its inputs by one step of the classifier's and one of another network."""

    def __init__(self, classifier):
        super().__init__()
        self.classifier, self.other = classifier, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

    def forward(self, x):
        with torch.enable_grad():
            point = x.detach().requires_grad_(True)
            loss = self.classifier(point).logsumexp(1).sum() + 0.1 * self.other(point).sum()
            (step,) = torch.autograd.grad(loss, point)
        return self.classifier(x + 0.02 * step.sign())


@pytest.mark.exhaustive
def test_a_quarter_of_the_passes_of_everything(subject):
    """Of all networks; the steps that come last are run on the samples nearest to being broken, or not at all."""
    torch.manual_seed(0)
    defense = Doubtful(subject[0]).eval()
    short, full = (
        evaluate(subject, defense, full=everything, queries=300, threat=WEAK) for everything in (False, True)
    )
    assert short.content["cost"]["forward"] == 3
    fgsm = next(one for one in full.content["defended"]["attacks"] if one["name"].startswith("FGSM"))
    assert fgsm["passes"] == {"forward": 20 * 3, "backward": 20 * 3}
    total = [sum(one.content["time"]["total"][way] for way in ("forward", "backward")) for one in (short, full)]
    assert total[0] <= total[1] / 4
    cut = {one["name"]: one["reason"] for one in short.content["not_run"]}
    assert cut["APGD-ce, plain gradients"] == "Its gradients are those of APGD-ce, BPDA identity."
    samples = {one["name"]: one["samples"] for one in short.content["defended"]["attacks"]}
    partial = {name: samples[name] for name, reason in cut.items() if "nearest" in reason}
    assert partial
    assert all(f"the nearest {count} of" in cut[name] for name, count in partial.items())


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


def test_costly_attacks_share_samples_with_cheap_ones(subject):
    """What follows is run on equally many samples, but for rounding; equal passes would be enough for all 20."""
    first = Step(name="first", category="naive", attack=Cheap("first", Mock()), exposure="defense")
    steps = [
        replace(
            first, name=f"{kind.__name__} {place}", category="black-box", attack=kind("later", Mock()), after="first"
        )
        for place in range(3)
        for kind in (Priced, Cheap)
    ]
    result = evaluate(subject, lambda x: x, [first, *steps], threat=WEAK)
    samples = [one["samples"] for one in result.content["defended"]["attacks"][1:]]
    assert len(samples) == 6
    assert 5 >= max(samples) >= min(samples) >= 3


class Free(Priced):
    """Takes one, and three to be judged: on all 20 samples less than a twentieth of what there is for all attacks."""

    passes = 1


def test_what_costs_next_to_nothing_comes_before_costly_attacks_on_all_samples(subject):
    first = Step(name="first", category="naive", attack=Cheap("first", Mock()), exposure="defense")
    later = [
        replace(first, name=str(place), category="black-box", attack=kind("later", Mock()), after="first")
        for place, kind in enumerate([Priced] * 6 + [Free])
    ]
    result = evaluate(subject, lambda x: x, [first, *later], threat=WEAK)
    samples = {one["name"]: one["samples"] for one in result.content["defended"]["attacks"]}
    assert list(samples)[:2] == ["first", "6"]
    assert samples["6"] == samples["first"] > max(samples[str(place)] for place in range(6))


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
    tell = Mock()
    steps = [
        Step(name="first", category="naive", attack=as_attack("robust_ext:APGD(steps=3)"), exposure="static"),
        Step(name="second", category="black-box", attack=Beginning("second", tell), exposure="defense", warm=True),
    ]
    evaluate(subject, lambda x: x, steps, out=tmp_path, threat=WEAK)
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


def test_a_cascade_is_gone_on_with(subject, tmp_path):
    """What was spent, what is nearest and where searches begin are found again in the run folder."""

    def run(attack, **keywords):
        mine = Step(name="mine", category="black-box", attack=attack, exposure="defense")
        return evaluate(subject, rounded, ["recommended", mine], threat=WEAK, queries=500, **keywords)

    whole = run(Leaving(), out=tmp_path.with_name(f"{tmp_path.name}_whole"))
    assert any("nearest" in one["reason"] for one in whole.content["not_run"])
    with pytest.raises(AttackError, match="stopped"):
        run(Leaving(raises=True), out=tmp_path)
    assert plain(run(Leaving(), out=tmp_path).content) == plain(whole.content)
    assert plain(run(Leaving(), out=tmp_path).content) == plain(whole.content)
