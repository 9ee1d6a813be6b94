"""The classes of this project's attacks keep to what every attack of their library keeps to."""

from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.guard import frozen
from robust_ext.models.defended import Defended
from robust_ext.testing import art_invariants, foolbox_invariants
from robust_ext.testing.networks import margins, small_batch, small_network
from tests.adapters.hosts import art_attacks, class_of, foolbox, foolbox_attacks, in_words_of
from tests.attacks.defenses import FarHidden
from tests.attacks.problems import affine_network

ArtBase = art_invariants.ArtAttackInvariants
FoolboxBase = foolbox_invariants.FoolboxAttackInvariants
with_objective = foolbox_attacks.with_objective
ORDERS = {"Linf": np.inf, "L2": 2, "L1": 1}


def rise(name, logits, natural):
    """By how much an objective rose from the inputs, row by row, in double precision."""
    p, q = natural.double().softmax(1), logits.double().softmax(1)
    if name == "kl":
        return (p * (p / q).log()).sum(1)
    if name == "gini":
        return p.norm(dim=1) - q.norm(dim=1)
    return 2 * (p * q).sqrt().sum(1).clamp(max=1).arccos()


class RaysInFoolbox(FoolboxBase):
    can_aim = False


class BlindInFoolbox(FoolboxBase):
    """Objectives that look at no label may as well make the classifier surer of it; they rise either way."""

    can_aim = False
    objective: str

    @foolbox_invariants.EachBounds
    def test_untargeted_points_lower_the_margin_of_the_label(self, bounds):
        model, x, y = self._problem(bounds)
        _, clipped, success = self._attack(model, x, y, self._epsilon(bounds))
        with torch.no_grad():
            rises = rise(self.objective, model(clipped), model(x))
        assert bool((rises > 0).all())
        assert bool(success.any())

    @foolbox_invariants.EachBounds
    def test_models_may_be_wrapped(self, bounds):
        inner, x, y = self._problem(bounds)
        model = inner.transform_bounds((0, 2), wrapper=True)
        stretched = ((x - bounds[0]) / (bounds[1] - bounds[0]) * 2).clamp(0, 2)
        _, clipped, success = self._attack(model, stretched, y, self._epsilon((0.0, 2.0)))
        with torch.no_grad():
            after, before = model(clipped), model(stretched)
        assert torch.equal(success, after.argmax(1) != y)
        assert bool((rise(self.objective, after, before) > 0).all())


class CannotAimInArt(ArtBase):
    """Attacks that cannot aim refuse to."""

    words: str

    @pytest.mark.parametrize("bounds", [(0.0, 1.0)])
    def test_targeted_points_go_to_their_targets(self, bounds):
        """They are refused."""
        estimator, _, _ = self._problem(bounds)
        with pytest.raises(InvalidArgumentError, match=rf"targeted: got True.*{self.words}"):
            self._make(estimator, targeted=True)
        with pytest.raises(InvalidArgumentError, match="targeted"):
            self._make(estimator).set_params(targeted=True)


class BlindInArt(CannotAimInArt):
    """See :class:`BlindInFoolbox`."""

    objective: str
    words = "'ace'"

    @art_invariants.EachBounds
    def test_points_lower_the_margin_of_the_label(self, bounds):
        self._check_rise(*self._problem(bounds), bounds)

    def test_two_classes_are_enough(self):
        self._check_rise(*self._problem(classes=2), (0.0, 1.0))

    def _check_rise(self, estimator, x, y, bounds):
        logits = estimator.predict(self._make(estimator, bounds, seed=0).generate(x, y))
        tensors = (torch.from_numpy(values) for values in (logits, estimator.predict(x)))
        assert bool((rise(self.objective, *tensors) > 0).all())
        assert (logits.argmax(1) != y).any()


class RegionInFoolbox(FoolboxBase):
    """On a small network that the attack takes little time on."""

    shape = (1, 2, 3)
    epsilon = 0.5

    def make_network(self, bounds):
        return affine_network(self.shape, self.classes, bounds=bounds)


class RegionInArt(ArtBase):
    """See :class:`RegionInFoolbox`."""

    shape = (1, 2, 3)
    epsilon = 0.9

    def make_network(self, bounds, classes):
        return affine_network(self.shape, classes, bounds=bounds)


def defend(network, shape, bounds):
    """A network whose hidden units are watched, by a detector that lets most points pass."""
    points = small_batch(64, shape, bounds=bounds)
    detector = FarHidden(network)
    with torch.no_grad():
        detector.middle = network[:3](points).mean(0)
    detector.calibrate(points, false_positive_rate=0.05)
    return Defended(network, detector)


class DefendedInFoolbox(FoolboxBase):
    """On models whose detector is watched, with logits of the classifier alone."""

    epsilon = 0.25

    def make_network(self, bounds):
        return defend(super().make_network(bounds), self.shape, bounds)

    @pytest.mark.parametrize("dtype", [torch.float64])
    @pytest.mark.parametrize("device", foolbox_invariants.DEVICES)
    def test_type_and_device_are_kept(self, dtype, device):
        """float32 is kept; other types are refused."""
        super().test_type_and_device_are_kept(torch.float32, device)
        with pytest.raises(InvalidArgumentError, match="float64, expected float32"):
            super().test_type_and_device_are_kept(dtype, device)

    @foolbox_invariants.EachBounds
    def test_models_may_be_wrapped(self, bounds):
        """A wrapper that changes nothing may be there; one with other bounds is refused."""
        model, x, y = self._problem(bounds)
        plain = self._attack(model, x, y, self._epsilon(bounds))
        same = self._attack(model.transform_bounds(bounds, wrapper=True), x, y, self._epsilon(bounds))
        assert torch.equal(plain[1], same[1])
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits"):
            super().test_models_may_be_wrapped(bounds)


class DefendedInArt(ArtBase):
    """See :class:`DefendedInFoolbox`."""

    epsilon = 0.25
    # All rows of a batch draw after the detector's.
    repeatable: ClassVar[dict[str, Any]] = {"start": "input", "num_random_init": 1}

    def make_network(self, bounds, classes):
        return defend(super().make_network(bounds, classes), self.shape, bounds)

    def test_preprocessing_of_the_estimator_is_attacked_through(self):
        """It is refused: the detector could not see what it does."""
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits"):
            super().test_preprocessing_of_the_estimator_is_attacked_through()


def likest(network, shape, bounds, wanted, *, aimed):
    """Three points for each label: of that class, or of any other."""
    pool = small_batch(64, shape, bounds=bounds)
    with frozen(network), torch.no_grad():
        logits = network.eval()(pool)
    gained = [margins(logits, label.expand(64)) * (1 if aimed else -1) for label in wanted.long()]
    return torch.stack([pool[row.topk(3).indices] for row in gained])


def guided(kind):
    """A Foolbox attack that finds its references itself, as the invariants give none."""

    class Guided(kind):
        def run(self, model, inputs, criterion, *, epsilon, **kwargs):
            judged = foolbox.attacks.base.get_criterion(criterion)
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


def guided_in_art(kind):
    """The same for ART."""

    class Guided(kind):
        def generate(self, x, y=None, **kwargs):
            network = self.estimator.model.classifier
            bounds = tuple(float(end) for end in self.estimator.clip_values)
            labels = torch.from_numpy(self.estimator.predict(x) if y is None else np.asarray(y))
            labels = labels.argmax(1) if labels.dim() == 2 else labels
            points = likest(network, x.shape[1:], bounds, labels, aimed=self.targeted)
            return super().generate(x, y, references=points.numpy(), **kwargs)

    Guided.__init__ = kind.__init__
    return Guided


WRONG = (*ArtBase.wrong_settings, {"seed": -1}, {"eps": float("inf")})
BASES = {
    "RayS": (RaysInFoolbox, CannotAimInArt),
    "LinearRegion": (RegionInFoolbox, RegionInArt),
    "BoundarySearch": (RegionInFoolbox, RegionInArt),
    **{attack.__name__: (DefendedInFoolbox, DefendedInArt) for attack in ATTACKS if attack.traits.detector},
}
TINY = {"draws": 2, "target_classes": 1, "start_steps": 3, "hops": 1, "regions": 1}
LOGITS = {"steps": 12, "rel_step_size": 0.1, "samples": 2, "level": 0.02, "check_every": 2}
# An attack, a norm and settings in the words of its declaration; the first of each attack is among the quick tests, in
# the one host and the other in turns.
ROWS = [
    ("APGD", "Linf", {"steps": 8}),
    ("APGD", "L2", {"steps": 8, "loss": "dlr", "restarts": 2}),
    ("APGD", "L1", {"steps": 8, "loss": "margin"}),
    ("RandomSearch", "Linf", {"points": 60}),
    ("RandomSearch", "L2", {"points": 60, "outer": "surface"}),
    ("RandomSearch", "L1", {"points": 60}),
    *(("Square", norm, {"queries": 40}) for norm in ORDERS),
    ("RayS", "Linf", {"queries": 400}),
    ("CarliniWagnerLinf", "Linf", {"steps": 20, "learning_rate": 0.05, "initial_const": 0.1, "const_factor": 8.0}),
    ("ObjectivePGD", "Linf", {"steps": 10, "step_size": 0.04}),
    ("ObjectivePGD", "L2", {"objective": "kl", "algorithm": "bim", "steps": 10, "rel_step_size": 0.2}),
    ("ObjectivePGD", "L1", {"objective": "gini", "steps": 10, "rel_step_size": 0.2, "best": True}),
    ("ObjectivePGD", "Linf", {"objective": "fisher-rao", "steps": 10, "step_size": 0.04}),
    *(("LinearRegion", norm, TINY) for norm in ("L2", "Linf", "L1")),
    ("BoundarySearch", "L2", {"draws": 2, "target_classes": 1, "start_steps": 3, "hops": 1}),
    ("OrthogonalPGD", "Linf", {"steps": 12, "rel_step_size": 0.2}),
    ("SelectivePGD", "L2", {"steps": 12, "rel_step_size": 0.2}),
    ("JointLoss", "L1", {"steps": 8, "restarts": 2}),
    ("FeatureMatching", "L2", {"features": "2", "steps": 12, "rel_step_size": 0.1}),
    ("LogitMatching", "Linf", LOGITS),
]
LIBRARYS_OWN = [
    (foolbox.attacks.LinfPGD, "ace", {"steps": 10}),
    (foolbox.attacks.LinfBasicIterativeAttack, "kl", {}),
    (foolbox.attacks.L2PGD, "gini", {"steps": 10, "rel_stepsize": 0.2}),
    (foolbox.attacks.L1BasicIterativeAttack, "fisher-rao", {}),
]


def add(name, base, make_attack, *, quick, **parts):
    made = type(f"Test{name}", (base,), {"make_attack": make_attack, "__module__": __name__, **parts})
    globals()[f"Test{name}"] = made if quick else pytest.mark.exhaustive(made)


def in_foolbox(kind, settings):
    return lambda self: kind(**settings)


def in_art(kind, norm, settings):
    def make_attack(self, estimator, **chosen):
        known = {key: value for key, value in chosen.items() if key != "eps" or "eps" in kind.attack_params}
        return kind(estimator, **{"norm": ORDERS[norm], **settings, **known})

    return make_attack


def add_both(name, norm, settings, *, number, quick):
    """The tests of an attack in both hosts; ``quick`` names the one whose are quick."""
    objective = settings.get("objective")
    foolbox_base, art_base = (BlindInFoolbox, BlindInArt) if objective else BASES.get(name, (FoolboxBase, ArtBase))
    kind = class_of("foolbox", name, norm.lower())
    twin = getattr(art_attacks, name)
    shared = {"objective": objective} if objective else {}
    if norm == "L1" and name in ("RandomSearch", "Square"):
        shared["epsilon"] = 0.4
    own = {"norm": ORDERS[norm], "wrong_settings": WRONG}
    if name == "RayS":
        own |= {"words": "cannot aim", "wrong_settings": (*WRONG[:-2], {"norm": 2}, {"eps": 0.0}, {"stop": 1})}
    if name in ("LinearRegion", "BoundarySearch", "CarliniWagnerLinf"):
        own["wrong_settings"] = ArtBase.wrong_settings[1:]
    if name == "LinearRegion" and norm != "L2":
        # Where points of a region are nearly as near, rounding chooses between them.
        own["repeatable"] = {"max_iter": 0}
    if name == "OrthogonalPGD":
        own["wrong_settings"] = (*WRONG, {"norm": 1}, {"norm": 2, "step": "sign"})
    if name == "LogitMatching":
        own["repeatable"] = {**DefendedInArt.repeatable, "level": 0}
    chosen = in_words_of(kind, settings), in_words_of(twin, settings)
    if name.endswith("Matching"):
        kind, twin = guided(kind), guided_in_art(twin)
    add(f"Foolbox{name}{number}", foolbox_base, in_foolbox(kind, chosen[0]), quick=quick == "foolbox", **shared)
    # Points of an attack of smallest perturbation lie where they are found, but for those of RayS, which stop at eps.
    if name != "CarliniWagnerLinf":
        add(f"Art{name}{number}", art_base, in_art(twin, norm, chosen[1]), quick=quick == "art", **shared, **own)


seen = set()
for position, (attack, its_norm, ways) in enumerate(ROWS):
    # One has no class for ART that these tests are for.
    turn = "foolbox" if attack == "CarliniWagnerLinf" else ("foolbox", "art")[len(seen) % 2]
    add_both(attack, its_norm, ways, number=position, quick="" if attack in seen else turn)
    seen.add(attack)
for host, objective, ways in LIBRARYS_OWN:
    base = FoolboxBase if objective == "ace" else BlindInFoolbox
    parts = {"objective": objective} if objective != "ace" else {}
    made = in_foolbox(with_objective(host, objective), ways)
    add(f"{host.__name__}With{objective}", base, made, quick=objective == "kl", **parts)
