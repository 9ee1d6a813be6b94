"""What the attacks that know the detector promise alike: what they need, keep, ask for and leave alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks._common.detector_aware import DetectorAwareAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.core.threat import NORMS
from robust_ext.detectors import Detector, Observation
from robust_ext.models.defended import Defended
from robust_ext.registry.attack import as_attack
from robust_ext.testing.defenses import Problem, small_defense

Make = Callable[[], DetectorAwareAttack]

MAKERS: dict[str, Make] = {
    "FeatureMatching": lambda: FeatureMatching(features="2", steps=15, restarts=2),
    "LogitMatching": lambda: LogitMatching(
        steps=15, rel_step_size=0.1, restarts=2, samples=2, level=0.01, check_every=1
    ),
    "OrthogonalPGD": lambda: OrthogonalPGD(steps=15, restarts=2),
    "SelectivePGD": lambda: SelectivePGD(steps=15, restarts=2),
    "JointLoss": lambda: JointLoss(steps=15, restarts=2),
}
SCORED = ("OrthogonalPGD", "SelectivePGD", "JointLoss")
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def attack(
    made: DetectorAwareAttack, problem: Problem, *, seed: int = 0, rows: slice = slice(None), **extras: Any
) -> Tensor:
    target, labels = problem.target, extras.pop("labels", problem.labels)
    if target.references is not None:
        target = replace(target, references=target.references[rows])
    generator = torch.Generator().manual_seed(seed)
    return made.search(
        target, problem.inputs[rows], labels[rows], threat_model=problem.threat_model, generator=generator, **extras
    )


def recorded(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every question put to classifier and detector together, with what was said."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    asked = problem.defended.both

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        logits, excess = asked(x)
        calls.append((x.detach().clone(), logits.detach(), excess.detach()))
        return logits, excess

    monkeypatch.setattr(problem.defended, "both", both)
    return calls


@every
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize("inverted", [False, True])
def test_the_point_kept_is_the_one_that_a_loop_over_all_points_keeps(
    make: Make, norm: str, targeted: bool, inverted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if norm not in make().traits.norms:
        pytest.skip(f"not for {norm}")
    epsilon = {"linf": 0.15, "l2": 0.5, "l1": 1.2}[norm]
    problem = small_defense(8, norm=norm, epsilon=epsilon, bounds=(-1.0, 1.0), inverted=inverted)
    labels = (problem.labels + 1) % 4 if targeted else problem.labels
    calls = recorded(problem, monkeypatch)
    out = attack(make(), problem, labels=labels, targeted=targeted)
    monkeypatch.undo()
    assert bool(problem.threat_model.contains(out, problem.inputs).all())
    assert float(out.min()) >= -1
    assert float(out.max()) <= 1
    successes = 0
    for row in range(8):
        kept, ranking = problem.inputs[row], (-1, -float("inf"))
        for points, logits, excess in calls:
            own = float(logits[row, labels[row]])
            other = max(float(z) for k, z in enumerate(logits[row]) if k != int(labels[row]))
            gained = own - other if targeted else other - own
            score = float(excess[row])
            lets_pass = score < 0 if inverted else score <= 0
            level = 0 if gained <= 0 else 1 + lets_pass + (lets_pass and gained > 1e-5 * float(logits[row].abs().max()))
            merit = (level, -score if gained > 0 else gained)
            if merit > ranking:
                kept, ranking = points[row], merit
        assert torch.equal(out[row], kept)
        successes += ranking[0] >= 2
    predicted, rejected = problem.defended.decide(out)
    assert int((((predicted == labels) == targeted) & ~rejected).sum()) == successes


@pytest.mark.parametrize(
    ("name", "inverted"), [*((name, False) for name in MAKERS), *((name, True) for name in SCORED)]
)
def test_succeeds_where_an_attack_on_the_classifier_alone_does_not(name: str, inverted: bool) -> None:
    # To match points that are detected says little of what else is, so the inverted test is for the others.
    problem = small_defense(40, epsilon=0.2 if inverted else 0.3, inverted=inverted)
    blind = APGD(steps=60).search(
        problem.target,
        problem.inputs,
        problem.labels,
        threat_model=problem.threat_model,
        generator=torch.Generator().manual_seed(0),
    )
    assert int((problem.defended.classifier(blind).argmax(1) != problem.labels).sum()) >= 36
    aware, unaware = problem.successes(attack(MAKERS[name](), problem)), problem.successes(blind)
    assert int(aware.sum()) >= int(unaware.sum()) + 8


@every
def test_a_row_gets_the_same_alone_and_in_any_batch(make: Make) -> None:
    problem = small_defense(6)
    together = attack(make(), problem)
    assert torch.equal(attack(make(), problem, rows=slice(0, 1)), together[:1])
    assert torch.equal(attack(make(), problem, rows=slice(0, 4)), together[:4])
    assert torch.equal(attack(make(), problem), together)
    assert not torch.equal(attack(make(), problem, seed=1), together)
    # The last row, among others.
    mixed = replace(
        problem,
        inputs=torch.cat([problem.inputs[:5].flip(0), problem.inputs[5:]]),
        labels=torch.cat([problem.labels[:5].flip(0), problem.labels[5:]]),
        target=replace(
            problem.target,
            references=torch.cat([problem.target.references[:5].flip(0), problem.target.references[5:]]),
        ),
    )
    assert torch.equal(attack(make(), mixed)[5], together[5])


@every
def test_global_randomness_and_arguments_are_left_alone(make: Make) -> None:
    problem = small_defense(3)
    inputs, references = problem.inputs.clone(), problem.target.references.clone()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    attack(make(), problem)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    assert torch.equal(problem.inputs, inputs)
    assert torch.equal(problem.target.references, references)


@pytest.mark.parametrize(
    ("made", "forward", "backward"),
    [
        (OrthogonalPGD(steps=7, restarts=2, samples=3), 2 * 3 * 8, 2 * 3 * 7 * 2),
        (SelectivePGD(steps=7, restarts=2), 2 * 8, 2 * 7 * 2),
        (JointLoss(steps=7, restarts=2, samples=3), 2 * 3 * 8, 2 * 3 * 7 * 2),
        # Features: 7 steps, the input, 2 references. Classifier: 7 steps, the input. Judged: 8.
        (FeatureMatching(features="2", steps=7), (7 + 1 + 2) + (7 + 1) + 8, 2 * 7),
        (FeatureMatching(features="2", steps=7, weight=0, samples=3, check_every=4), 21 + 1 + 2 + 3 * 3, 21),
        # Judged: points 0, 5 and 7.
        (LogitMatching(steps=7, samples=3, check_every=5), 7 * 3 + 1 + 2 + 3, 7 * 3),
    ],
)
def test_passes_are_as_many_as_stated(
    made: DetectorAwareAttack, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = small_defense(5)
    counted: list[int] = []
    network = problem.defended.detector.classifier
    network.register_forward_hook(lambda _module, args, _out: counted.append(len(args[0])))
    gradients: list[int] = []
    real = torch.autograd.grad

    def grad(value: Tensor, x: Tensor, **settings: Any) -> Any:
        gradients.append(len(x))
        return real(value, x, **settings)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    attack(made, problem)
    assert counted == [5] * forward
    assert gradients == [5] * backward


@every
def test_every_query_is_the_batch_in_row_order(make: Make) -> None:
    problem = small_defense(5, epsilon=0.1)
    assert problem.target.references is not None
    known = torch.cat([problem.inputs[:, None], problem.target.references], 1)
    asked: list[Tensor] = []
    problem.defended.classifier.register_forward_pre_hook(lambda _module, args: asked.append(args[0].detach()))
    attack(make(), problem)
    assert len(asked) >= 30
    for batch in asked:
        assert batch.shape == problem.inputs.shape
        # Near its own input, or one of its own references: noise adds 0.05 at most, five standard deviations.
        assert bool(((batch[:, None] - known).flatten(2).abs().amax(2).amin(1) <= 0.15).all())
    assert (
        float((problem.inputs[:, None] - problem.inputs[None]).flatten(2).abs().amax(2).topk(4, 1).values.min()) > 0.2
    )


@every
def test_watched_steps_are_those_that_were_taken(make: Make) -> None:
    problem = small_defense(4)
    seen: list[Any] = []
    attack(make(), problem, watch=seen.append)
    assert [step.number for step in seen] == list(range(30))
    assert all(step.total == 30 and step.points.shape == problem.inputs.shape for step in seen)
    assert all(step.gradient.shape == problem.inputs.shape and step.loss.shape == (4,) for step in seen)
    assert all(bool(problem.threat_model.contains(step.points, problem.inputs).all()) for step in seen)


@every
def test_the_start(make: Make) -> None:
    problem = small_defense(4)
    for start in ("random", "input"):
        made = replace(make(), start=start)
        seen: list[Any] = []
        attack(made, problem, watch=seen.append)
        assert torch.equal(seen[0].points, problem.inputs) == (start == "input")
        assert not torch.equal(seen[15].points, problem.inputs)


@every
def test_what_is_missing_is_said(make: Make) -> None:
    problem, made = small_defense(2), make()
    bare = replace(problem, target=replace(problem.target, defended=None))
    assert made.refusal(threat_model=problem.threat_model) is not None
    with pytest.raises(AttackRefusedError, match="this target has none"):
        attack(made, bare)
    alone = replace(problem, target=replace(problem.target, references=None))
    if made.traits.references:
        with pytest.raises(AttackRefusedError, match="imitates reference points"):
            attack(made, alone)
        wrong = replace(problem, target=replace(problem.target, references=problem.inputs))
        with pytest.raises(InvalidArgumentError, match="groups of at least one point"):
            attack(made, wrong)
    else:
        attack(made, alone)
    with pytest.raises(InvalidArgumentError, match="labels"):
        attack(made, problem, labels=problem.labels + 4)
    with pytest.raises(InvalidArgumentError, match="bounds"):
        attack(made, replace(problem, inputs=problem.inputs + 1))


class Rounded(Detector):
    """A score without gradients, that says so or not, or with gradients of zeros."""

    def __init__(self, classifier: nn.Module, how: str) -> None:
        super().__init__(classifier)
        self.how, self.differentiable = how, how != "said"
        self.threshold = torch.tensor(-1.0)

    def score_of(self, seen: Observation) -> Tensor:
        total = seen.inputs.flatten(1).sum(1)
        return total * 0 if self.how == "zeros" else total.detach() * 0


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("how", "words"),
    [("said", "is declared useless"), ("unsaid", "is missing"), ("zeros", "is zero wherever it rejects")],
)
def test_detectors_without_gradients(name: str, how: str, words: str) -> None:
    problem = small_defense(3)
    defended = Defended(problem.defended.classifier, Rounded(problem.defended.classifier, how))
    changed = replace(problem, target=replace(problem.target, defended=defended))
    if name in SCORED:
        with pytest.raises(AttackRefusedError, match=rf"{name} follows .* {words}.*BPDA.*decisions only"):
            attack(MAKERS[name](), changed)
    else:
        assert attack(MAKERS[name](), changed).shape == problem.inputs.shape


@every
def test_classifiers_without_gradients(make: Make) -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :4].detach()

    problem = small_defense(3)
    defended = Defended(Steps(), problem.defended.detector)
    with pytest.raises(AttackRefusedError, match=r"classifier gives no gradients.*BPDA"):
        attack(make(), replace(problem, target=replace(problem.target, defended=defended)))


@every
def test_answers_of_nan_are_no_success(make: Make) -> None:
    problem = small_defense(3)

    class Mute(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return problem.defended.classifier(x) * torch.nan

    defended = Defended(Mute(), problem.defended.detector)
    changed = replace(problem, target=replace(problem.target, defended=defended))
    assert torch.equal(attack(make(), changed), problem.inputs)


@every
def test_no_rows(make: Make) -> None:
    problem = small_defense(2)
    assert attack(make(), problem, rows=slice(0, 0)).shape == (0, 1, 3, 4)


@every
def test_runs_as_other_attacks_do(make: Make) -> None:
    problem, made = small_defense(4), make()
    for parameter in problem.defended.parameters():
        parameter.requires_grad_(True)
    out = run_attack(
        made,
        problem.target,
        problem.inputs,
        problem.labels,
        threat_model=problem.threat_model,
        generator=torch.Generator().manual_seed(0),
    )
    assert torch.equal(out, attack(made, problem))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in problem.defended.parameters())
    again = as_attack(f"robust_ext:{type(made).__name__}(steps=3)")
    assert isinstance(again, type(made))
    assert again.steps == 3
    assert "steps=3" in again.description


class Noisy(Detector):
    """The first value, with noise of standard deviation 1."""

    random = True

    def score_of(self, seen: Observation) -> Tensor:
        first = seen.inputs.flatten(1)[:, 0]
        return first + torch.randn(len(first))


@pytest.mark.parametrize("name", [*SCORED, "FeatureMatching"])
def test_answers_of_random_detectors_are_averaged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_defense(3)
    detector = Noisy(problem.defended.classifier)
    detector.threshold = torch.tensor(0.5)
    defended = Defended(problem.defended.classifier, detector)
    changed = replace(problem, target=replace(problem.target, defended=defended), defended=defended)
    calls = recorded(changed, monkeypatch)
    made = replace(MAKERS[name](), samples=100, steps=2, restarts=1)
    out = attack(made, changed)
    assert len(calls) == 3 * 100
    # Each point is asked 100 times; the mean is off by 0.1 on average, where single answers are by 1.
    kept = torch.stack([points for points, _, _ in calls[::100]])
    means = torch.stack([excess for _, _, excess in calls]).view(3, 100, 3).mean(1)
    logits = torch.stack([logits for _, logits, _ in calls[::100]])
    wrong = logits.argmax(2) != problem.labels
    for row in range(3):
        among = [point for point in range(3) if bool(wrong[point, row])]
        if among:
            best = min(among, key=lambda point: float(means[point, row]))
            assert torch.equal(out[row], kept[best, row])
    assert torch.equal(attack(made, changed), out)


COMMON = [{"steps": 0}, {"steps": 1.5}, {"step_size": 0}, {"restarts": 0}, {"start": "middle"}, {"samples": 0}]


@pytest.mark.parametrize("attack_class", [FeatureMatching, LogitMatching, OrthogonalPGD, SelectivePGD, JointLoss])
@pytest.mark.parametrize("wrong", COMMON)
def test_wrong_settings_raise(attack_class: type[DetectorAwareAttack], wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        attack_class(**wrong)


@pytest.mark.parametrize("attack_class", [OrthogonalPGD, SelectivePGD, JointLoss])
def test_steps_of_signs_are_for_linf(attack_class: Any) -> None:
    assert attack_class(step="sign").traits.norms == ("linf",)
    with pytest.raises(AttackRefusedError, match="works for linf, not for l2"):
        attack(attack_class(step="sign"), small_defense(2, norm="l2"))
    with pytest.raises(InvalidArgumentError, match="decay"):
        attack_class(decay=1)
    with pytest.raises(InvalidArgumentError, match="step"):
        attack_class(step="l1")
