"""The conformance matrix: every attack of every library, run on a binarized target and on an ordinary classifier.

Each attack is built with small settings and run on four digits; its candidates and its queries are verified.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, MissingDependencyError, RobustExtError
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_choice
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.pool import Pool, value_of
from robust_ext.engine.remote import Packer
from robust_ext.engine.verify import verify
from robust_ext.evaluations.binarization.planting import Planted, plant
from robust_ext.registry.base import AttackListing, adapters
from robust_ext.testing.networks import margins

logger = logging.getLogger(__name__)

TARGETS = ("binarized", "classifier")
_SAMPLES = 4
_EPSILONS = {"linf": 0.15, "l2": 1.0, "l1": 2.0}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The outcome of one attack on one target.

    Args:
        library: The library's name.
        attack: The attack's name in it.
        target: ``"binarized"`` (two classes, one readout a sample) or ``"classifier"`` (ten).
        outcome: ``"ran"``, ``"refused"`` (before any work, with a reason) or ``"failed"``.
        reason: Why it was refused or failed.
        norm: Of the threat model.
        samples: Inputs attacked.
        verified: Candidates that are adversarial, in bounds and in the ball.
        one_by_one: Whether the first sample's candidate is the ``"same"`` without the other samples, or ``"other"``;
            empty if samples are attacked one at a time anyway.
        seconds: Of the attack.
        passes: Samples sent ``"forward"`` and ``"backward"`` through the network.
    """

    library: str
    attack: str
    target: str
    outcome: str
    reason: str = ""
    norm: str = ""
    samples: int = 0
    verified: int = 0
    one_by_one: str = ""
    seconds: float = 0.0
    passes: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)


def conformance(
    libraries: Sequence[str] | None = None,
    *,
    seed: int = 0,
    executor: ExecutorLike = None,
    progress: Callable[[Row | None, int], None] | None = None,
) -> list[Row]:
    """Run every attack of the installed libraries on both targets.

    Args:
        libraries: Names of adapters; all that are installed when left out.
        seed: Of every draw.
        executor: Runs the attacks, see docs/clusters.md; this process when left out. An attack that ends its worker is
            then a row that failed.
        progress: Called first with None, then with each row as it comes, and with the number of rows in all.

    Raises:
        InvalidArgumentError: No adapter has that name.
        MissingDependencyError: A named library is not installed.
    """
    known = adapters()
    calls: list[_Call] = []
    for name in known if libraries is None else libraries:
        check_choice("libraries", name, tuple(known))
        try:
            listings = known[name].list_attacks()
        except MissingDependencyError as error:
            if libraries is not None:
                raise
            logger.info("%s", error)
            continue
        calls += [partial(conformance_row, name, one, target, seed=seed) for one in listings for target in TARGETS]
    rows: dict[int, Row] = {}
    if progress is not None:
        progress(None, len(calls))
    for place, row in (
        _pooled(calls, executor) if executor is not None else ((i, call()) for i, call in enumerate(calls))
    ):
        rows[place] = row
        if progress is not None:
            progress(row, len(calls))
    return [rows[place] for place in range(len(calls))]


_Call = partial[Row]
"""Of :func:`conformance_row`."""


def _pooled(calls: Sequence[_Call], executor: ExecutorLike) -> Iterator[tuple[int, Row]]:
    """Yield rows with their places as workers finish them."""
    pool, packer = Pool(executor), Packer()
    try:
        packed = (packer.pack(call, origin="cpu") for call in calls)
        for place, reply in pool.run(enumerate(packed), packer.parts):
            library, listing, target = calls[place].args
            if "lost" in reply:
                reason = f"it ended its process ({reply['lost']})"
                yield place, Row(library=library, attack=listing.name, target=target, outcome="failed", reason=reason)
            else:
                yield place, value_of(reply, listing.name)
    finally:
        pool.close()


def conformance_row(library: str, listing: AttackListing, target: str, *, seed: int = 0) -> Row:
    """Run one attack on one target.

    Args:
        library: The library's name.
        listing: The attack, as the library's adapter lists it.
        target: One of :data:`TARGETS`.
        seed: Of every draw.
    """
    check_choice("target", target, TARGETS)
    common: dict[str, Any] = {"library": library, "attack": listing.name, "target": target}
    if listing.reason:
        return Row(**common, outcome="refused", reason=listing.reason)
    try:
        attack = adapters()[library].build_attack(listing.name, listing.trial, name=f"{library}:{listing.name}")
        norm = listing.trial_norm or next((norm for norm in NORMS if norm in attack.traits.norms), "linf")
        attack.check(threat_model=threat_model(norm, listing.channels))
    except (AttackRefusedError, MissingDependencyError) as error:
        return Row(**common, outcome="refused", reason=str(error))
    except InvalidArgumentError as error:
        return Row(**common, outcome="failed", reason=str(error))
    common |= {"norm": norm, "samples": _SAMPLES}
    trial = _Trial(attack, norm, listing.channels, target, seed)
    start = time.perf_counter()
    try:
        candidates = trial.run(range(_SAMPLES))
        seconds = time.perf_counter() - start
        passes = {"forward": trial.counter.forward, "backward": trial.counter.backward}
        verified, one_by_one = trial.verified(candidates), trial.one_by_one(candidates)
    except RobustExtError as error:
        return Row(**common, outcome="failed", reason=str(error))
    outcome = "failed" if trial.violation else "ran"
    common |= {"outcome": outcome, "reason": trial.violation, "verified": verified, "one_by_one": one_by_one}
    return Row(**common, seconds=seconds, passes=passes)


class _Trial:
    """One attack on one target, on all samples or on some."""

    def __init__(self, attack: Attack, norm: str, channels: int, target: str, seed: int) -> None:
        self.attack = attack
        self.threat_model = threat_model(norm, channels)
        self.network = network(channels)
        self.planted = planted(norm, channels) if target == "binarized" else None
        self.inputs, self.labels = (
            digits(channels) if self.planted is None else (self.planted.inputs, self.planted.labels)
        )
        self.counter = PassCounter()
        self.seed = seed
        self.violation = ""
        self.single = self.planted is not None and attack.traits.one_by_one

    def run(self, rows: Sequence[int]) -> Tensor:
        """Return candidates of some samples, attacked together or one at a time as target and attack need it."""
        return torch.cat([self._attack([row]) for row in rows]) if self.single else self._attack(rows)

    def verified(self, candidates: Tensor) -> int:
        """Count the candidates that are adversarial."""
        module = self.network if self.planted is None else self.planted.module
        name, model = self.attack.name, self.threat_model
        found = verify(candidates, self.inputs, self.labels, module=module, threat_model=model, attack=name)
        return found.outcomes.count("found")

    def one_by_one(self, candidates: Tensor) -> str:
        """Return whether the first sample has the same candidate without the others."""
        if self.single:
            return ""
        return "same" if torch.allclose(self._attack([0])[0], candidates[0], rtol=0, atol=1e-4) else "other"

    def _attack(self, rows: Sequence[int]) -> Tensor:
        index = list(rows)
        inputs, labels = self.inputs[index], self.labels[index]
        module: nn.Module = Counted(self.network, self.counter)
        if self.planted is not None:
            batching = "full" if self.attack.traits.batching == "full" else "any"
            settings, norm = self.planted.settings, self.threat_model.norm
            classifier = self.planted.problems.select(index).classifier(
                Counted(self.planted.features, self.counter),
                position=settings.boundary_position,
                logit_scale=settings.logit_scale,
                batching=batching,
                norm=norm,
            )
            module = BatchMonitor(classifier, inputs, batching=batching, norm=norm)
        target = Target(
            module=module,
            bounds=self.threat_model.bounds,
            classes=10 if self.planted is None else 2,
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
        )
        candidates = run_attack(
            self.attack,
            target,
            inputs,
            labels,
            threat_model=self.threat_model,
            generator=stream(self.seed, index[0], "conformance", self.attack.name),
        )
        if isinstance(module, BatchMonitor) and module.violation:
            self.violation = module.violation
        return candidates


class BatchMonitor(nn.Module):
    """A binarized classifier that checks to which of the inputs ``(N, ...)`` each queried point belongs.

    In a batch in order, a point that is far closer to another sample's input than to its own is out of order. In
    batches of any samples, a point about as close to two inputs cannot be attributed to either.
    """

    def __init__(self, module: nn.Module, inputs: Tensor, *, batching: str, norm: str) -> None:
        super().__init__()
        self.module = module
        self.batching = batching
        # The guard undoes changes of plain attributes, lists and dicts while an attack runs.
        self.violations = deque[str]()
        self._p = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}[norm]
        self._inputs = inputs.flatten(1).double()
        self.training = module.training

    @property
    def violation(self) -> str:
        """The first violation; empty if there was none."""
        return self.violations[0] if self.violations else ""

    def forward(self, x: Tensor) -> Tensor:
        """Return the classifier's logits."""
        if len(self._inputs) > 1 and len(x):
            self._check(x.detach().flatten(1).double())
        logits: Tensor = self.module(x)
        return logits

    def _check(self, x: Tensor) -> None:
        distances = torch.cdist(x, self._inputs, p=self._p)
        nearest = distances.min(1).values
        if self.batching == "full":
            if len(x) == len(self._inputs) and bool((nearest < 0.5 * distances.diagonal()).any()):
                self.violations.append(
                    "it queried a sample that belongs to another, in a batch that was to be in order"
                )
        elif bool((nearest > 0.9 * distances.topk(2, largest=False).values[:, 1]).any()):
            self.violations.append("it queried a point as close to two inputs, in a batch of any samples")


class _Grey(nn.Module):
    """A network of one channel for images of several, by their mean."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of ``(N, C, H, W)``."""
        logits: Tensor = self.network(x.mean(1, keepdim=True))
        return logits


@cache
def network(channels: int) -> nn.Module:
    """Return the embedded network for images of ``channels`` channels."""
    return digits_network() if channels == 1 else _Grey(digits_network())


@cache
def digits(channels: int) -> tuple[Tensor, Tensor]:
    """Return digits that the network just about classifies, ``(4, channels, 8, 8)`` in [0, 1], and their labels."""
    dataset = load_dataset("digits")
    inputs, labels = dataset.take(dataset.choose(16 * _SAMPLES, seed=0))
    with torch.no_grad():
        margin = margins(digits_network()(inputs), labels)
    chosen = margin.where(margin > 0, torch.inf).argsort()[:_SAMPLES]
    return inputs[chosen].expand(-1, channels, -1, -1).contiguous(), labels[chosen]


def threat_model(norm: str, channels: int) -> ThreatModel:
    """Return a threat model in which ordinary attacks succeed; epsilon in l2 and l1 grows with the channels."""
    growth = {"linf": 1.0, "l2": channels**0.5, "l1": float(channels)}[norm]
    return ThreatModel(norm=norm, epsilon=_EPSILONS[norm] * growth)


@cache
def planted(norm: str, channels: int) -> Planted:
    """Plant easy problems in the digits: an attack that works finds something in a few steps."""
    inputs, _ = digits(channels)
    return plant(network(channels), inputs, threat_model(norm, channels), inner_points=50, kappa=0.0)
