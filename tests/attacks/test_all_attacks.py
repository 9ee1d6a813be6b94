"""What every attack of this project promises alike: of its settings, candidates, rows, randomness and arguments."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.attacks import Attack, AttackTraits
from robust_ext.attacks._common.objectives import DIVERGENCES, OBJECTIVES
from robust_ext.attacks._common.rows import STARTS
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.objective_pgd import ALGORITHMS, PROJECTIONS, ObjectivePGD
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.running import run_attack
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.square import Square
from robust_ext.core.errors import AttackError, DisturbedError, InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.engine.verify import verify
from robust_ext.models.defended import Defended
from robust_ext.registry import as_attack
from tests.attacks.defenses import small_defense
from tests.attacks.problems import MADE, Lambda, attacked, in_every_norm, predicted, rowwise_problem, target_of

every = pytest.mark.parametrize("made", MADE.values(), ids=MADE)
BLACK_BOX = [name for name, made in MADE.items() if not made.traits.gradients]


def changed(problem, classifier):
    defended = Defended(classifier, problem.defended.detector)
    target = replace(problem.target, module=classifier, defended=defended)
    return replace(problem, target=target, defended=defended)


def rows_of(problem, rows):
    target = replace(problem.target, references=problem.target.references[rows])
    return replace(problem, inputs=problem.inputs[rows], labels=problem.labels[rows], target=target)


@in_every_norm
def test_candidates_and_steps_are_allowed_and_layouts_make_no_difference(name, norm):
    made, seen = MADE[name], []
    problem = small_defense(5, norm=norm, epsilon={"linf": 0.2, "l2": 0.6, "l1": 1.5}[norm], bounds=(-1.0, 2.0))
    out = attacked(made, problem, watch=seen.append)
    assert [step.number for step in seen] == list(range(len(seen)))
    assert len(seen) <= seen[0].total == seen[-1].total
    assert (out.shape, out.dtype, out.requires_grad) == (problem.inputs.shape, torch.float32, False)
    assert -1 <= float(out.min()) <= float(out.max()) <= 2
    if not made.traits.leaves_ball or isinstance(made, LogitMatching):
        points = [out] if made.traits.leaves_ball else [out, *(step.points for step in seen)]
        assert all(bool(problem.threat_model.contains(one, problem.inputs).all()) for one in points)
    strided = problem.inputs.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(attacked(made, problem, inputs=strided), out)
    assert torch.equal(strided, problem.inputs)
    if not isinstance(made, ObjectivePGD):
        assert torch.equal(attacked(made, problem, inputs=problem.inputs.double()), out)


def stated(made):
    """An attack with the rows forward and backward, for each row, that it states."""
    cost = made.cost(ThreatModel(norm="linf", epsilon=0.3), classes=4)
    return made, int(cost.forward), int(cost.backward)


@pytest.mark.parametrize(
    ("made", "forward", "backward"),
    [
        *(stated(made) for name, made in MADE.items() if not made.traits.detector and name != "CarliniWagnerLinf"),
        (OrthogonalPGD(steps=7, restarts=2, samples=3), 2 * 3 * 8, 2 * 3 * 7 * 2),
        (SelectivePGD(steps=7, restarts=2), 2 * 8, 2 * 7 * 2),
        (JointLoss(steps=7, restarts=2, samples=3), 2 * 3 * 8, 2 * 3 * 7 * 2),
        # Features: 7 steps, the input, 2 references. Classifier: 7 steps, twice the input, the references. Judged: 8.
        (FeatureMatching(features="2", steps=7), (7 + 1 + 2) + (7 + 2 + 2) + 8, 2 * 7),
        # Judged: points 0, 5 and 7.
        (LogitMatching(steps=7, samples=3, check_every=5), 7 * 3 + 2 * (1 + 2) + 3, 7 * 3),
    ],
)
def test_passes_are_those_stated_and_every_query_is_the_batch(made, forward, backward, monkeypatch):
    problem, counted, gradients, real = small_defense(5), [], [], torch.autograd.grad
    problem.defended.detector.classifier.register_forward_hook(lambda _, args, out: counted.append(len(args[0])))
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **way: gradients.append(len(args[1])) or real(*args, **way)
    )
    attacked(made, problem)
    assert gradients == [5] * backward
    # Searches by queries may end early.
    assert counted == [5] * (forward if made.traits.gradients else len(counted))
    assert len(counted) <= forward


@in_every_norm
def test_a_row_gets_the_same_alone_and_in_any_batch(name, norm):
    made = MADE[name]
    problem = small_defense(6, norm=norm, epsilon={"linf": 0.3, "l2": 0.6, "l1": 1.5}[norm])
    # Adam divides by roots of small numbers, in which other sums of a batch of another size would show.
    slack = 1e-4 if isinstance(made, CarliniWagnerLinf) else 0
    together = attacked(made, problem)
    for count in (1, 4):
        torch.testing.assert_close(attacked(made, rows_of(problem, slice(count))), together[:count], rtol=0, atol=slack)
    # The last row, among others.
    mixed = rows_of(problem, torch.tensor([4, 3, 2, 1, 0, 5]))
    torch.testing.assert_close(attacked(made, mixed)[5], together[5], rtol=0, atol=slack)
    assert torch.equal(attacked(made, problem), together)
    if made.traits.seeds == "generator" and name != "APGD from the input":
        assert not torch.equal(attacked(made, problem, seed=1), together)


def drawn(kind, **settings):
    return st.builds(kind, **{name: st.sampled_from(list(values)) for name, values in settings.items()})


ASCENTS = {"objective": DIVERGENCES, "algorithm": ALGORITHMS, "start": [None, *STARTS], "projection": PROJECTIONS}
DRAWN = [
    drawn(APGD, loss=OBJECTIVES, steps=[1, 2, 12], start=STARTS),
    drawn(ObjectivePGD, rel_step_size=[None, 0.3], best=[False, True], **ASCENTS),
    drawn(Square, queries=[20], p=[0.01, 0.3, 1], stop_early=[False]),
    drawn(RandomSearch, points=[20]),
]


@settings(max_examples=60)
@given(
    made=st.one_of(DRAWN),
    norm=st.sampled_from(NORMS),
    bounds=st.sampled_from([(0.0, 1.0), (-3.0, 1.5), (0.0, 255.0)]),
    epsilon=st.sampled_from([1e-7, 0.01, 0.5, 100.0]) | st.floats(0.01, 3),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    rows=st.integers(0, 4),
    targeted=st.booleans(),
)
def test_every_point_lies_in_ball_and_bounds(made, norm, bounds, epsilon, shape, rows, targeted):
    target, inputs, labels = rowwise_problem(rows=rows, shape=shape, bounds=bounds)
    targeted = targeted and getattr(made, "objective", "ace") == "ace"
    labels = (labels + targeted) % 5
    inputs[:1, :, 0], inputs[1:2, :, :, -1] = bounds
    seen, threat_model = [], ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds)
    given = {"threat_model": threat_model, "targeted": targeted, "watch": seen.append}
    out = made.search(target, inputs, labels, generator=stream(0), **given)
    tried = [step.points for step in seen]
    if isinstance(made, APGD):
        result = made.run(target, inputs, labels, generator=stream(0), **given)
        assert torch.equal(result.candidates, out)
        assert torch.equal(result.found, (predicted(target.module, out) == labels) == targeted)
        tried.append(result.best_points)
    for points in (out, *tried):
        assert (points.shape, points.dtype, points.requires_grad) == (inputs.shape, torch.float32, False)
        assert bool(((points >= bounds[0]) & (points <= bounds[1])).all())
        assert bool(threat_model.contains(points, inputs).all())


@every
def test_no_rows_and_wrong_inputs_and_labels(made):
    queries, problem = [], small_defense(2)
    problem.defended.classifier.register_forward_hook(lambda *_: queries.append(1))
    assert attacked(made, rows_of(problem, slice(0, 0))).shape == (0, 1, 3, 4)
    assert not queries
    x, y = problem.inputs, problem.labels
    # ObjectivePGD takes inputs as they are, in any precision.
    for match, wrong in (("labels", {"labels": y + 4}), ("labels", {"labels": y[:1]}), ("bounds", {"inputs": x + 1})):
        if not isinstance(made, ObjectivePGD):
            with pytest.raises(InvalidArgumentError, match=match):
                attacked(made, problem, **wrong)


@pytest.mark.parametrize("name", [name for name in MADE if name not in BLACK_BOX])
def test_classifiers_without_gradients_are_refused(name):
    steps = Lambda(lambda x: x.flatten(1)[:, :4].detach())
    with pytest.raises(AttackError, match=r"gives no gradients; .*BPDA"):
        attacked(MADE[name], changed(small_defense(3), steps))


@every
def test_points_with_logits_that_are_not_finite_are_kept_and_harm_no_other_row(made):
    """What fools a network is where the same network that returns NaN there breaks down; other rows stay the same."""
    if isinstance(made, LogitMatching):
        # Noise may meet such points where its row does not, and references have other labels.
        made = replace(made, level=0.0, samples=1, logits="detector")
    problem = small_defense(12, epsilon=0.3)
    plain, network = attacked(made, problem), problem.target.module
    fooled = predicted(network, plain) != problem.labels
    assert bool(fooled.any())

    def breaking(x):
        """NaN wherever the class is not the label of the row, in other batches of the nearest."""
        logits, near = network(x), torch.cdist(x.detach().flatten(1), problem.inputs.flatten(1)).argmin(1)
        rows = torch.arange(12) if len(x) == 12 else near
        return torch.where((logits.argmax(1) != problem.labels[rows])[:, None], torch.nan, logits)

    out = attacked(made, changed(problem, Lambda(breaking)))
    assert torch.equal(breaking(out).isnan().any(1), fooled)
    assert torch.equal(out[~fooled], plain[~fooled])


def test_settings_that_do_not_go_together_are_refused():
    for attack_class, chosen in (
        (ObjectivePGD, {"algorithm": "fgsm", "steps": 2}),
        (CarliniWagnerLinf, {"largest_const": 1e-6}),
        (SpatialTransformation, {"translation_steps": 4}),
        (FeatureMatching, {"features": []}),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{list(chosen)[-1]}: got "):
            attack_class(**chosen)


THREAT_MODEL = ThreatModel(norm="l2", epsilon=0.5)
INPUTS, LABELS = torch.full((2, 3), 0.25), torch.tensor([0, 1])
# Made once: making a layer draws from the global generator, whose state some tests compare.
MODULE = nn.Linear(3, 2).eval()


def run(attack, seed=0, classes=2):
    target = target_of(MODULE if classes == 2 else nn.Linear(3, classes), (3,), classes)
    generator = torch.Generator().manual_seed(seed)
    return run_attack(attack, target, INPUTS, LABELS, threat_model=THREAT_MODEL, generator=generator)


class Probe(Attack):
    """Notes what it meets, and changes what it is given."""

    def __init__(self, **traits):
        self.name, self.traits = "probe", AttackTraits(**traits)

    def search(self, target, inputs, labels, **_):
        self.seen = target.classes, target.module(inputs).shape[1]
        self.required = [p.requires_grad for p in target.module.parameters()]
        nn.functional.cross_entropy(target.module(inputs.clone().requires_grad_()), labels).backward()
        inputs.zero_()
        labels.zero_()
        target.module.train()
        return inputs


def test_targets_with_too_few_classes_are_padded_and_nothing_of_the_callers_is_changed():
    for fewest, classes, seen in ((5, 2, 5), (3, 4, 4), (2, 2, 2)):
        probe = Probe(minimum_classes=fewest)
        run(probe, classes=classes)
        assert probe.seen == (seen, seen)
    assert INPUTS.unique().tolist() == [0.25]
    assert LABELS.tolist() == [0, 1]
    assert probe.required == [False, False]
    assert all(p.grad is None and p.requires_grad for p in MODULE.parameters())
    assert not MODULE.training


def careless(model, x, y):
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    return x


def failing(model, x, y):
    torch.rand(3)
    np.random.rand(3)
    random.random()
    raise KeyError("step")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (failing, AttackError, "failing: raised KeyError: 'step'"),
        (lambda model, x, y: ThreatModel(norm="l7", epsilon=1.0), InvalidArgumentError, "norm: got 'l7'"),
        (careless, DisturbedError, r"careless: changed what it attacks .*; what changed of the model was put back"),
        *(
            (lambda model, x, y, returned=returned: returned(x), AttackError, "mine: returned ")
            for returned in (lambda x: x.numpy(), lambda x: x.T, lambda x: (x * 255).to(torch.uint8))
        ),
    ],
)
def test_what_an_attack_raises_returns_and_disturbs_is_put_right_and_names_it(function, error, message):
    attack = as_attack(function, name="mine" if function.__name__ == "<lambda>" else None)
    weight, expected = MODULE.weight.clone(), state()
    with pytest.raises(error, match=message):
        verify(run(attack), INPUTS, LABELS, module=MODULE, threat_model=THREAT_MODEL, attack=attack.name)
    assert torch.equal(MODULE.weight, weight)
    unchanged = state() == expected
    assert unchanged


def seed_all(seed):
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed)


def reseeding(model, x, y, generator):
    start = torch.rand(x.shape, generator=generator)
    seed_all(0)
    return start


DRAWS = {
    "torch": lambda model, x, y: torch.rand_like(x),
    "numpy": lambda model, x, y: torch.from_numpy(np.random.rand(*x.shape)).float(),
    "python": lambda model, x, y: torch.tensor([[random.random() for _ in row] for row in x]),
    "generator": lambda model, x, y, generator: torch.rand(x.shape, generator=generator),
    "reseeding": reseeding,
}


def state():
    kind, keys, *rest = np.random.get_state()
    numpy_state = kind, np.asarray(keys).tobytes(), rest
    return pickle.dumps((random.getstate(), numpy_state, torch.random.get_rng_state().numpy().tobytes()))


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
@given(seed=st.integers(0, 2**31), before=st.integers(0, 2**31))
@settings(max_examples=20)
def test_randomness_of_every_kind_follows_the_generator(function, seed, before):
    attack = as_attack(function)
    first = run(attack, seed)
    seed_all(before)
    expected = state()
    assert torch.equal(run(attack, seed), first)
    unchanged = state() == expected
    assert unchanged
    assert not torch.equal(run(attack, seed + 1), first)
