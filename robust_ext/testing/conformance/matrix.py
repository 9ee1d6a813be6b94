"""Each attack is built with small settings, run, and verified by what it returned and what it queried."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, MissingDependencyError, RobustExtError
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_choice
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.pool import Pool, value_of
from robust_ext.engine.remote import Packer
from robust_ext.engine.verify import verify
from robust_ext.registry.base import AttackListing, adapters
from robust_ext.testing.conformance.monitor import BatchMonitor
from robust_ext.testing.conformance.problems import SAMPLES, digits, network, planted, threat_model

logger = logging.getLogger(__name__)

TARGETS = ("binarized", "classifier")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one attack on one target.

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
            empty where samples are attacked one at a time anyway.
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
        """All of it as plain values."""
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
        executor: What runs the attacks, see docs/clusters.md; this process when left out. An attack that ends its
            process is then a row that failed.
        progress: Called with each row, as it comes, and the number of rows in all; first with None.

    Raises:
        InvalidArgumentError: No adapter of that name.
        MissingDependencyError: A library that was named is not installed.
    """
    known = adapters()
    listings: list[tuple[str, AttackListing]] = []
    for name in known if libraries is None else libraries:
        check_choice("libraries", name, tuple(known))
        try:
            listings += [(name, listing) for listing in known[name].list_attacks()]
        except MissingDependencyError as error:
            if libraries is not None:
                raise
            logger.info("%s", error)
    calls = [_Call(library, listing, target, seed) for library, listing in listings for target in TARGETS]
    rows: dict[int, Row] = {}
    if progress is not None:
        progress(None, len(calls))
    done = enumerate(map(_Call.row, calls)) if executor is None else _pooled(calls, executor)
    for place, row in done:
        rows[place] = row
        if progress is not None:
            progress(row, len(calls))
    return [rows[place] for place in range(len(calls))]


@dataclass(frozen=True)
class _Call:
    """One row to be found."""

    library: str
    listing: AttackListing
    target: str
    seed: int

    def row(self) -> Row:
        """What becomes of it in this process."""
        return conformance_row(self.library, self.listing, self.target, seed=self.seed)


def _pooled(calls: Sequence[_Call], executor: ExecutorLike) -> Iterator[tuple[int, Row]]:
    """Rows as workers find them, with their places."""
    pool, packer = Pool(executor), Packer()
    try:
        packed = (packer.pack(call.row, origin="cpu") for call in calls)
        for place, reply in pool.run(enumerate(packed), packer.parts):
            call = calls[place]
            common: dict[str, Any] = {"library": call.library, "attack": call.listing.name, "target": call.target}
            if "lost" in reply:
                yield place, Row(**common, outcome="failed", reason=f"it ended its process ({reply['lost']})")
            else:
                yield place, value_of(reply, call.listing.name)
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
    trial = _Trial(attack, norm, listing.channels, target, seed)
    start = time.perf_counter()
    try:
        candidates = trial.run(range(SAMPLES))
        seconds = time.perf_counter() - start
        passes = {"forward": trial.counter.forward, "backward": trial.counter.backward}
        verified = trial.verified(candidates)
        one_by_one = trial.one_by_one(candidates)
    except RobustExtError as error:
        return Row(**common, outcome="failed", reason=str(error), norm=norm, samples=SAMPLES)
    return Row(
        **common,
        outcome="failed" if trial.violation else "ran",
        reason=trial.violation,
        norm=norm,
        samples=SAMPLES,
        verified=verified,
        one_by_one=one_by_one,
        seconds=seconds,
        passes=passes,
    )


class _Trial:
    """One attack on one target, on all samples or on some."""

    def __init__(self, attack: Attack, norm: str, channels: int, target: str, seed: int) -> None:
        self.attack = attack
        self.threat_model = threat_model(norm, channels)
        self.inputs, self.labels = digits(channels)
        self.network = network(channels)
        self.planted = planted(norm, channels) if target == "binarized" else None
        if self.planted is not None:
            self.inputs, self.labels = self.planted.inputs, self.planted.labels
        self.counter = PassCounter()
        self.seed = seed
        self.violation = ""

    def run(self, rows: Sequence[int]) -> Tensor:
        """Candidates of some samples: together, or one at a time where the target and the attack need that."""
        if self.planted is not None and self.attack.traits.one_by_one:
            return torch.cat([self._attack([row]) for row in rows])
        return self._attack(rows)

    def verified(self, candidates: Tensor) -> int:
        """How many candidates are adversarial."""
        module = self.network if self.planted is None else self.planted.module
        found = verify(
            candidates, self.inputs, self.labels, module=module, threat_model=self.threat_model, attack=self.attack.name
        )
        return found.outcomes.count("found")

    def one_by_one(self, candidates: Tensor) -> str:
        """Whether the first sample has the same candidate without the others."""
        if self.planted is not None and self.attack.traits.one_by_one:
            return ""
        same = torch.allclose(self._attack([0])[0], candidates[0], rtol=0, atol=1e-4)
        return "same" if same else "other"

    def _attack(self, rows: Sequence[int]) -> Tensor:
        index = list(rows)
        inputs, labels = self.inputs[index], self.labels[index]
        monitor: BatchMonitor | None = None
        if self.planted is None:
            module: nn.Module = Counted(self.network, self.counter)
            classes = 10
        else:
            batching = "full" if self.attack.traits.batching == "full" else "any"
            problems = self.planted.problems.select(index)
            settings = self.planted.settings
            monitor = BatchMonitor(
                problems.classifier(
                    Counted(self.planted.features, self.counter),
                    position=settings.boundary_position,
                    logit_scale=settings.logit_scale,
                    batching=batching,
                    norm=self.threat_model.norm,
                ),
                inputs,
                batching=batching,
                norm=self.threat_model.norm,
            )
            module, classes = monitor, 2
        target = Target(
            module=module,
            bounds=self.threat_model.bounds,
            classes=classes,
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
        if monitor is not None and monitor.violation:
            self.violation = monitor.violation
        return candidates
