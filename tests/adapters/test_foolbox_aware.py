from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks.orthogonal import OrthogonalPGD
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError
from robust_ext.detectors import Observation
from robust_ext.models.defended import Defended
from robust_ext.registry import as_attack
from robust_ext.testing.defenses import FarHidden, Problem, small_defense
from robust_ext.testing.networks import margins, small_batch, small_network

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
attacks = pytest.importorskip("robust_ext.adapters.foolbox.attacks", reason="Foolbox is not installed")
invariants = pytest.importorskip("robust_ext.testing.foolbox_invariants", reason="Foolbox is not installed")
estimators = pytest.importorskip("robust_ext.estimators", reason="Foolbox is not installed")
foolbox = invariants.foolbox
Base: Any = invariants.FoolboxAttackInvariants
Bounds = tuple[float, float]

RENAMED = {"step_size": "rel_step_size"}
QUICK: dict[str, dict[str, Any]] = {
    "OrthogonalPGD": {"steps": 12, "step_size": 0.2},
    "SelectivePGD": {"steps": 12, "step_size": 0.2},
    "JointLoss": {"steps": 8, "restarts": 2},
    "FeatureMatching": {"features": "2", "steps": 12, "step_size": 0.1},
    "LogitMatching": {"steps": 12, "step_size": 0.1, "samples": 2, "level": 0.02, "check_every": 2},
}
SHORT = {"linf": "Linf", "l2": "L2", "l1": "L1"}
CLASSES = [
    (norm, name, getattr(attacks, f"{SHORT[norm]}{name}Attack"))
    for name in QUICK
    for norm in SHORT
    if (norm, name) != ("l1", "OrthogonalPGD")
]
EachClass = pytest.mark.parametrize(("norm", "name", "kind"), CLASSES, ids=[kind.__name__ for _, _, kind in CLASSES])
MATCHING = ("FeatureMatching", "LogitMatching")
EPSILON = {"linf": 0.3, "l2": 0.8, "l1": 2.4}


def defend(network: nn.Module, points: Tensor) -> Defended:
    """A network whose hidden units are watched, by a detector that lets most points pass."""
    detector = FarHidden(network)
    with torch.no_grad():
        detector.middle = network[:3](points).mean(0)  # type: ignore[index]
    detector.calibrate(points, false_positive_rate=0.05)
    return Defended(network, detector)


class Aware(Base):
    """The invariants on models whose detector is watched, with logits of the classifier alone."""

    epsilon = 0.25

    def make_network(self, bounds: Bounds) -> nn.Module:
        return defend(super().make_network(bounds), small_batch(64, self.shape, bounds=bounds))

    @pytest.mark.parametrize("dtype", [torch.float64])
    @pytest.mark.parametrize("device", invariants.DEVICES)
    def test_type_and_device_are_kept(self, dtype: torch.dtype, device: str) -> None:
        """float32 is kept; other types are refused."""
        super().test_type_and_device_are_kept(torch.float32, device)
        with pytest.raises(InvalidArgumentError, match="float64, expected float32"):
            super().test_type_and_device_are_kept(dtype, device)

    @invariants.EachBounds
    def test_models_may_be_wrapped(self, bounds: Bounds) -> None:
        """A wrapper that changes nothing may be there; one with other bounds is refused."""
        model, x, y = self._problem(bounds)
        plain = self._attack(model, x, y, self._epsilon(bounds))
        same = self._attack(model.transform_bounds(bounds, wrapper=True), x, y, self._epsilon(bounds))
        assert torch.equal(plain[1], same[1])
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits"):
            super().test_models_may_be_wrapped(bounds)


def likest(network: nn.Module, shape: tuple[int, ...], bounds: Bounds, wanted: Tensor, *, aimed: bool) -> Tensor:
    """Three points for each label: of that class, or of any other."""
    pool = small_batch(64, shape, bounds=bounds)
    with torch.no_grad():
        logits = network(pool)
    found = []
    for label in wanted.tolist():
        gained = margins(logits, torch.full((64,), label))
        found.append(pool[(gained if aimed else -gained).topk(3).indices])
    return torch.stack(found)


def guided(kind: Any) -> Any:
    """An attack that finds its references itself, as the invariants give none."""

    class Guided(kind):  # type: ignore[misc]
        def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
            judged = invariants.foolbox.attacks.base.get_criterion(criterion)
            aimed = hasattr(judged, "target_classes")
            if not aimed and not hasattr(judged, "labels"):
                return super().run(model, inputs, criterion, epsilon=epsilon, **kwargs)
            labels = getattr(judged, "target_classes" if aimed else "labels").raw
            bounds = (float(model.bounds.lower), float(model.bounds.upper))
            raw = getattr(inputs, "raw", inputs)
            if labels.shape == (len(raw),):
                shape = tuple(raw.shape[1:])
                network = small_network(shape, 4, bounds=bounds)
                kwargs["references"] = likest(network, shape, bounds, labels, aimed=aimed)
            return super().run(model, inputs, criterion, epsilon=epsilon, **kwargs)

    Guided.__init__ = kind.__init__
    return Guided


class TestLinfOrthogonalPGD(Aware):
    def make_attack(self) -> Any:
        return attacks.LinfOrthogonalPGDAttack(**QUICK["OrthogonalPGD"])


class TestL2SelectivePGD(Aware):
    def make_attack(self) -> Any:
        return attacks.L2SelectivePGDAttack(**QUICK["SelectivePGD"])


class TestL1JointLoss(Aware):
    def make_attack(self) -> Any:
        return attacks.L1JointLossAttack(**QUICK["JointLoss"])


class TestL2FeatureMatching(Aware):
    def make_attack(self) -> Any:
        return guided(attacks.L2FeatureMatchingAttack)(**QUICK["FeatureMatching"])


class TestLinfLogitMatching(Aware):
    def make_attack(self) -> Any:
        return guided(attacks.LinfLogitMatchingAttack)(**QUICK["LogitMatching"])


def model_of(problem: Problem, *, view: str = "reject") -> Any:
    defended = problem.defended
    shown = Defended(defended.classifier, defended.detector, inverted=defended.inverted, exposure=view)
    return estimators.DefendedPyTorchModel(shown, bounds=problem.threat_model.bounds)


def keywords(name: str, problem: Problem) -> dict[str, Any]:
    return {"references": problem.target.references} if name in MATCHING else {}


@EachClass
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 2.0)])
@pytest.mark.parametrize("targeted", [False, True])
def test_points_are_those_of_the_attack_itself(norm: str, name: str, kind: Any, bounds: Bounds, targeted: bool) -> None:
    problem = small_defense(6, norm=norm, epsilon=EPSILON[norm], bounds=bounds)
    labels = (problem.labels + 1) % 4 if targeted else problem.labels
    attack = kind(**QUICK[name], seed=5)
    wanted = foolbox.criteria.TargetedMisclassification if targeted else estimators.Undetected
    epsilon = problem.threat_model.epsilon
    raw, _, _ = attack(model_of(problem), problem.inputs, wanted(labels), epsilons=epsilon, **keywords(name, problem))
    expected = attack.native().search(
        problem.target,
        problem.inputs,
        labels,
        threat_model=problem.threat_model,
        generator=torch.Generator().manual_seed(5),
        targeted=targeted,
    )
    assert torch.equal(raw, expected)
    assert not torch.equal(raw, problem.inputs)


@EachClass
@pytest.mark.parametrize("inverted", [False, True])
def test_success_is_what_the_defended_classifier_decides(norm: str, name: str, kind: Any, inverted: bool) -> None:
    problem = small_defense(12, norm=norm, epsilon=EPSILON[norm], inverted=inverted)
    _, clipped, success = kind(**QUICK[name], seed=0)(
        model_of(problem),
        problem.inputs,
        estimators.Undetected(problem.labels),
        epsilons=problem.threat_model.epsilon,
        **keywords(name, problem),
    )
    assert torch.equal(success, problem.successes(clipped))
    assert bool(success.any())


@pytest.mark.parametrize("name", ["OrthogonalPGD", "JointLoss"])
def test_more_is_found_than_by_attacks_on_the_labels_alone(name: str) -> None:
    problem = small_defense(40, epsilon=0.3)
    model, criterion = model_of(problem), estimators.Undetected(problem.labels)
    kind = getattr(attacks, f"Linf{name}Attack")
    found = kind(steps=50, seed=0)(model, problem.inputs, criterion, epsilons=0.3)[2]
    blind = attacks.LinfAPGD(steps=50, seed=0)(model, problem.inputs, criterion, epsilons=0.3)[2]
    assert int(found.sum()) > int(blind.sum())


@EachClass
def test_settings_are_those_of_the_core_attack(norm: str, name: str, kind: Any) -> None:
    attack = kind(seed=3)
    assert isinstance(attack, foolbox.attacks.base.FixedEpsilonAttack)
    assert attack.distance is getattr(foolbox.distances, norm)
    own = {key: value.default for key, value in signature(kind).parameters.items()}
    names = {"rel_step_size": "step_size", "step_size": "", **kind.names}
    core = {names.get(key, key): value.default for key, value in signature(kind.core).parameters.items()}
    core.pop("")
    assert own == {**core, "seed": None}
    assert kind.core.__name__ == name
    changed = kind(**QUICK[name]).native()
    assert {key: getattr(changed, RENAMED.get(key, key)) for key in QUICK[name]} == QUICK[name]
    with pytest.raises(TypeError, match="positional"):
        kind(1)
    with pytest.raises(InvalidArgumentError, match="steps"):
        kind(steps=0)
    with pytest.raises(InvalidArgumentError, match="seed"):
        kind(seed=-1)


@pytest.mark.parametrize(
    "kind", [attacks.L2OrthogonalPGDAttack, attacks.L1SelectivePGDAttack, attacks.L2JointLossAttack]
)
def test_steps_of_signs_are_for_linf(kind: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{kind.__name__}: got settings that work for linf only"):
        kind(step="sign")


@pytest.mark.parametrize("kind", [attacks.LinfOrthogonalPGDAttack, attacks.L2LogitMatchingAttack])
def test_models_without_a_detector_are_refused(kind: Any) -> None:
    problem = small_defense(2)
    model = foolbox.PyTorchModel(problem.defended.classifier, bounds=(0, 1), device="cpu")
    with pytest.raises(InvalidArgumentError, match=r"without a detector, expected .*DefendedPyTorchModel"):
        kind()(model, problem.inputs, problem.labels, epsilons=0.1)


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 255).round() / 255


@pytest.mark.parametrize("around", ["mean", "rounding", "after", "twice"])
def test_what_lies_around_the_detector_is_refused(around: str) -> None:
    problem = small_defense(3)
    defended = problem.defended

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.defended = defended

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.defended(x) + 0 * self.defended(x)
            return out

    modules: dict[str, nn.Module] = {
        "mean": defended,
        "rounding": nn.Sequential(Rounded(), defended),
        "after": nn.Sequential(defended, nn.Tanh()),
        "twice": Twice(),
    }
    ways = {"preprocessing": {"mean": 0.1}} if around == "mean" else {}
    model = foolbox.PyTorchModel(modules[around].eval(), bounds=(0, 1), device="cpu", **ways)
    # These inputs are what rounding leaves as they are.
    x = Rounded()(problem.inputs)
    with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits around its detector"):
        attacks.LinfSelectivePGDAttack(steps=2)(model, x, problem.labels, epsilons=0.1)


def test_modules_around_that_change_nothing_are_passed_by() -> None:
    problem = small_defense(3)
    held = foolbox.PyTorchModel(nn.Sequential(nn.Identity(), problem.defended).eval(), bounds=(0, 1), device="cpu")
    attack = attacks.LinfSelectivePGDAttack(steps=5, seed=1)
    points = [attack(model, problem.inputs, problem.labels, epsilons=0.2)[0] for model in (held, model_of(problem))]
    assert torch.equal(*points)


def test_references_for_all_rows_are_those_for_each() -> None:
    problem = small_defense(4)
    assert problem.target.references is not None
    shared = problem.target.references[0]
    attack = attacks.LinfFeatureMatchingAttack(features="2", steps=5, seed=2)
    model, x, y = model_of(problem), problem.inputs, problem.labels
    each = attack(model, x, y, epsilons=0.2, references=shared.expand(4, *shared.shape))[0]
    assert torch.equal(attack(model, x, y, epsilons=0.2, references=shared)[0], each)
    wrapped = invariants.ep.astensor(shared)
    assert torch.equal(attack(model, x, y, epsilons=0.2, references=wrapped)[0], each)
    other = attack(model, x, y, epsilons=0.2, references=problem.inputs[:2])[0]
    assert not torch.equal(other, each)


@pytest.mark.parametrize(
    ("references", "shown"),
    [
        (None, "references: got None, expected points of other classes"),
        (torch.zeros(3, 2, 1, 3, 4), r"references: got shape \(3, 2, 1, 3, 4\)"),
        (torch.zeros(4, 0, 1, 3, 4), r"references: got shape \(4, 0, 1, 3, 4\)"),
        (torch.zeros(0, 1, 3, 4), r"references: got shape \(0, 1, 3, 4\)"),
        (torch.zeros(2, 1, 3, 5), r"references: got shape \(2, 1, 3, 5\)"),
        (torch.zeros(3, 4), r"references: got shape \(3, 4\)"),
        (torch.full((2, 1, 3, 4), 2.0), "references: got values"),
        (torch.full((2, 1, 3, 4), torch.nan), "references: got NaN"),
    ],
)
def test_wrong_references_are_refused(references: Any, shown: str) -> None:
    problem = small_defense(4)
    ways = {} if references is None else {"references": references}
    with pytest.raises(InvalidArgumentError, match=shown):
        attacks.L2FeatureMatchingAttack(steps=2)(
            model_of(problem), problem.inputs, problem.labels, epsilons=1.0, **ways
        )


def test_attacks_that_imitate_nothing_take_no_references() -> None:
    problem = small_defense(4)
    with pytest.raises(TypeError, match="references"):
        attacks.L2OrthogonalPGDAttack(steps=2)(
            model_of(problem), problem.inputs, problem.labels, epsilons=1.0, references=problem.target.references
        )


def test_being_rejected_is_no_class_to_aim_at() -> None:
    problem = small_defense(4)
    criterion = foolbox.criteria.TargetedMisclassification(torch.full((4,), 4))
    with pytest.raises(InvalidArgumentError, match=r"labels in 4\.\.4"):
        attacks.LinfJointLossAttack(steps=2)(model_of(problem), problem.inputs, criterion, epsilons=0.1)


def test_scores_without_gradients_are_refused() -> None:
    problem = small_defense(4)
    problem.defended.detector.differentiable = False
    with pytest.raises(AttackRefusedError, match="differentiable=False"):
        attacks.LinfOrthogonalPGDAttack(steps=2)(model_of(problem), problem.inputs, problem.labels, epsilons=0.1)


class Noisy(FarHidden):
    random = True

    def score_of(self, seen: Observation) -> Tensor:
        return super().score_of(seen) + 0.1 * torch.randn(len(seen.inputs))


def test_random_detectors_draw_what_the_seed_decides() -> None:
    problem = small_defense(6)
    detector = Noisy(problem.defended.classifier)
    detector.middle = problem.defended.detector.get_buffer("middle")
    detector.threshold = problem.defended.detector.threshold
    model = estimators.DefendedPyTorchModel(
        Defended(problem.defended.classifier, detector, exposure="reject"), bounds=(0.0, 1.0)
    )
    attack = attacks.LinfSelectivePGDAttack(steps=10, seed=4)
    points = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        points.append(attack.run(model, problem.inputs, problem.labels, epsilon=0.3))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*points)
    other = attacks.LinfSelectivePGDAttack(steps=10, seed=5).run(model, problem.inputs, problem.labels, epsilon=0.3)
    assert not torch.equal(points[0], other)


def test_the_detector_is_left_as_it_was() -> None:
    problem = small_defense(4)
    scale = nn.Parameter(torch.ones(()))
    problem.defended.detector.register_parameter("scale", scale)
    scale.grad = torch.tensor(3.0)
    before = {key: value.clone() for key, value in problem.defended.state_dict().items()}
    attacks.LinfOrthogonalPGDAttack(steps=5)(model_of(problem), problem.inputs, problem.labels, epsilons=0.2)
    assert all(torch.equal(value, before[key]) for key, value in problem.defended.state_dict().items())
    assert scale.requires_grad
    assert torch.equal(scale.grad, torch.tensor(3.0))
    assert not problem.defended._forward_hooks


def test_as_an_attack_of_this_project_it_is_the_core_attack() -> None:
    attack = as_attack(attacks.LinfOrthogonalPGDAttack(steps=7, confidence=0.5), name="mine")
    assert isinstance(attack, OrthogonalPGD)
    assert (attack.name, attack.traits.detector) == ("mine", True)
    assert (attack.steps, attack.confidence) == (7, 0.5)
