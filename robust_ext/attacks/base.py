"""The common interface of attacks, and how anything else becomes one.

An attack gets a target, inputs, labels, a threat model and a generator, and returns candidates of the inputs' shape.
It also declares its traits: its needs, and how it treats rows. Its own claims of success are not used.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from robust_ext.core.cost import Cost
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError, MissingDependencyError
from robust_ext.core.objects import qualified_name
from robust_ext.core.random import RowGenerator, seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_choice

BATCHING = ("full", "any", "single")
FAILURES = ("best", "last", "input", "start", "zeros", "raises")
# Modules that are installed under another name.
DISTRIBUTIONS = {"cv2": "opencv-python-headless"}
SEEDS = ("generator", "global", "own", "setting", "none")


@dataclass(frozen=True, kw_only=True)
class AttackTraits:
    """The needs of an attack, its treatment of rows and its behaviour on failure, as data.

    Args:
        batching: ``"full"``: every query is the full batch in row order. ``"any"``: it may query subsets, permutations
            or repeats of rows. ``"single"``: rows must be attacked one at a time.
        batch_dependent: Whether the rows of a batch influence one another's result, through a stopping rule or a
            noise draw they share.
        gradients: Whether it needs gradients of the target.
        starting_points: Whether it begins at points that are already adversarial; they are searched for it.
        references: Whether it needs points of other classes to imitate; they are searched for it.
        detector: Whether it needs a target that has a detector.
        minimum_norm: True: it looks for the smallest perturbation, is run once and judged at epsilon. False: it is
            given epsilon.
        norms: Norms it can be run for, the one it is made for first.
        minimum_classes: Fewest classes it works with; a target that has fewer is padded, see
            :class:`robust_ext.models.wrapping.PaddedClasses`.
        normless: Whether no norm measures what it changes and no epsilon limits it; it is judged as all others.
        leaves_ball: Whether it queries points outside the ball.
        failure: What it returns for a row where it fails: the ``"best"`` or ``"last"`` point it tried, the ``"input"``,
            its random ``"start"`` or all ``"zeros"`` (these two are replaced by the input); or it ``"raises"``.
        seeds: Where its randomness comes from: the ``"generator"`` it is given, the ``"global"`` generators, generators
            of its ``"own"``, a ``"setting"`` that is filled in, or it draws ``"none"``.
        packages: Names of modules it imports besides its library's own requirements.
    """

    batching: str = "any"
    batch_dependent: bool = False
    gradients: bool = True
    starting_points: bool = False
    references: bool = False
    detector: bool = False
    minimum_norm: bool = False
    norms: tuple[str, ...] = NORMS
    minimum_classes: int = 2
    normless: bool = False
    leaves_ball: bool = False
    failure: str = "last"
    seeds: str = "global"
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("batching", BATCHING), ("failure", FAILURES), ("seeds", SEEDS)):
            check_choice(name, getattr(self, name), known)

    @property
    def one_by_one(self) -> bool:
        """True if rows that must not be mistaken for one another are to be attacked one at a time.

        Far from its input a row cannot be recognised by where it is, only by its place in the batch.
        """
        return self.batching == "single" or (self.batching == "any" and self.leaves_ball)

    @property
    def kind(self) -> str:
        """``"fixed epsilon"`` or ``"minimum norm"``."""
        return "minimum norm" if self.minimum_norm else "fixed epsilon"


class Attack(ABC):
    """Base of every attack.

    Attributes:
        name: Its name in tables and files.
        traits: What it needs and how it treats rows.
        code_text: The text that names its code, where one does: it identifies the attack without loading it.
        unlisted: Whether it is of a user's own class of a library, which is attacked one row at a time out of caution.
        limits_entries: Whether its search takes limits of single entries itself, see ``limited.search_within``.
    """

    name: str
    traits: AttackTraits
    code_text: str | None = None
    unlisted: bool = False
    limits_entries: bool = False

    @property
    def description(self) -> str:
        """The attack with its settings, as text; a run resumes only with the same."""
        return self.name

    def named(self, name: str) -> Self:
        """A copy of this attack that tables and files call ``name``."""
        made = copy.copy(self)
        object.__setattr__(made, "name", name)  # Attacks may be frozen dataclasses.
        return made

    @abstractmethod
    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Return one candidate for each input.

        Args:
            target: What may be queried.
            inputs: float32 ``(N, *target.input_shape)`` in ``target.bounds``; not to be changed.
            labels: int64 ``(N,)``, the true labels: a candidate should be classified as anything else. With another
                ``target.criterion``, what that judges by, see :mod:`robust_ext.core.criteria`.
            threat_model: The norm, epsilon and bounds to respect.
            generator: CPU generator, the only source of randomness.

        Returns:
            Candidates ``(N, *target.input_shape)``, verified by the caller.
        """

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """Why this attack makes no sense here and what to use instead, or None.

        Args:
            threat_model: What candidates are judged by.
            detector: Whether the target has a detector.
        """
        if threat_model.norm not in self.traits.norms:
            return (
                f"{self.name} works for {' and '.join(self.traits.norms)}, not for {threat_model.norm}; choose an "
                f"attack for {threat_model.norm} or change the threat model's norm"
            )
        if self.traits.detector and not detector:
            return (
                f"{self.name} attacks a detector together with the classifier, and this target has none; choose an "
                "attack on classifiers"
            )
        return None

    def pursues(self, criterion: Criterion) -> bool:
        """Return whether it searches for what ``target.criterion`` asks; AttackRefusedError where it cannot be run."""
        if criterion.aims:
            raise AttackRefusedError(f"{self.name}: cannot aim at a class; choose another, such as robust_ext:APGD")
        if criterion.ranks and self.traits.minimum_norm:
            seldom = f"ends at the nearest misclassified point, which is seldom one where {criterion.words}"
            raise AttackRefusedError(f"{self.name}: {seldom}; choose robust_ext:BoundarySearch or robust_ext:APGD")
        return not criterion.ranks

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """Rows that are sent through the target for each input, at most; None where the settings do not state it.

        Args:
            threat_model: What it is given.
            classes: Number of the target's classes.
        """
        return None

    def check(self, *, threat_model: ThreatModel, detector: bool = False) -> None:
        """Raise where this attack cannot be run here.

        Raises:
            AttackRefusedError: :meth:`refusal` gives a reason.
            MissingDependencyError: It imports a package that is not installed, or cannot be imported.
        """
        reason = self.refusal(threat_model=threat_model, detector=detector)
        if reason is not None:
            raise AttackRefusedError(reason)
        missing = [package for package in self.traits.packages if importlib.util.find_spec(package) is None]
        if missing:
            names = " ".join(DISTRIBUTIONS.get(package, package) for package in missing)
            raise MissingDependencyError(f"{self.name} needs {' and '.join(missing)}; pip install {names}")
        for package in self.traits.packages:
            try:
                importlib.import_module(package)
            except Exception as error:
                raise broken_package(
                    f"{self.name} needs {package}, which", DISTRIBUTIONS.get(package, package), error
                ) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class CallableAttack(Attack):
    """A plain callable ``(model, x, y) -> x_adv`` as an attack.

    The model it gets is the target's ``nn.Module``. Where the callable has parameters named ``threat_model``,
    ``epsilon`` or ``generator``, it is given those too, and with a parameter ``targeted`` whether y are classes to aim
    at. Its global randomness is seeded from the generator.

    Args:
        function: The callable.
        name: How tables call it; the callable's own name when left out.
        batching: How it treats rows, see :class:`AttackTraits`.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, batching: str = "any") -> None:
        if not callable(function):
            raise InvalidArgumentError("function", type(function).__name__, "a callable (model, x, y) -> x_adv")
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.traits = AttackTraits(batching=batching)
        self._extras = _accepted(function, ("threat_model", "epsilon", "generator", "targeted"))

    @property
    def description(self) -> str:
        """The place of the function's definition, with the keywords of a partial."""
        function, keywords = self.function, dict[str, Any]()
        while isinstance(function, functools.partial):
            keywords = {**function.keywords, **keywords}
            function = function.func
        shown = ", ".join(f"{key}={value!r}" for key, value in sorted(keywords.items()))
        return qualified_name(function) + (f"({shown})" if shown else "")

    def pursues(self, criterion: Criterion) -> bool:
        """See :meth:`Attack.pursues`; a function with a parameter ``targeted`` aims."""
        return not criterion.ranks if criterion.aims and "targeted" in self._extras else super().pursues(criterion)

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Call the function on copies of the inputs and labels, see :meth:`Attack.search`."""
        offered = {"threat_model": threat_model, "epsilon": threat_model.epsilon, "generator": generator}
        offered["targeted"] = target.criterion.aims
        extras = {key: offered[key] for key in self._extras}
        with seeded_globals(draw_seed(generator)):
            out = self.function(target.module, inputs.clone(), labels.clone(), **extras)
        if not isinstance(out, Tensor):
            raise AttackError(f"{self.name}: returned {type(out).__name__}, expected a tensor of candidates")
        return out


def check_attack(attack: object, *, argument: str = "attack") -> Attack:
    """Return ``attack`` when it is an :class:`Attack`."""
    if not isinstance(attack, Attack):
        raise InvalidArgumentError(
            argument, repr(attack), "an attack; robust_ext.as_attack converts most objects to one"
        )
    return attack


def broken_package(title: str, install: str, error: Exception) -> MissingDependencyError:
    """The error for a package that is installed and cannot be imported, ``install`` being what pip is given."""
    if "torchvision::" in str(error) and torch.version.cuda is None:
        # PyPI's torchvision is built for CUDA, and so would be the next one from there.
        install = "torchvision --index-url https://download.pytorch.org/whl/cpu"
    return MissingDependencyError(
        f"{title} is installed but cannot be imported ({type(error).__name__}: {error}); install it in a release that "
        f"fits torch {torch.__version__} and the others: pip install --force-reinstall {install}"
    )


def draw_seed(generator: torch.Generator) -> int:
    """A 32-bit seed for a library that takes only integers, drawn from ``generator``.

    From a :class:`robust_ext.core.random.RowGenerator` the seeds of the rows that are left out are skipped.
    """
    if isinstance(generator, RowGenerator) and generator.gaps:
        torch.randint(0, 2**32, (generator.gaps.pop(0),), generator=generator, dtype=torch.int64)
    return int(torch.randint(0, 2**32, (), generator=generator, dtype=torch.int64))


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a callable, for its signature: an ``nn.Module`` shows only its forward's."""
    return function.forward if isinstance(function, nn.Module) else function


def _accepted(function: Callable[..., Any], names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(called(function)).parameters
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY,)
    # What a partial sets already is the user's choice.
    chosen = function.keywords if isinstance(function, functools.partial) else {}
    return tuple(
        name for name in names if name in parameters and parameters[name].kind not in positional and name not in chosen
    )
