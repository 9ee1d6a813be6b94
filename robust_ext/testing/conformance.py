"""The conformance matrix: every attack of every library, run on a binarized target and on an ordinary classifier.

Each attack is built with small settings and run on four digits; its candidates and its queries are verified.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, MissingDependencyError, RobustExtError
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_choice
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.isolation.messages import Packer
from robust_ext.engine.pool import Pool, value_of
from robust_ext.engine.remote import make_call
from robust_ext.engine.verify import verify
from robust_ext.registry.base import AttackListing, adapters
from robust_ext.testing.networks import SAMPLES, digits, network, planted, threat_model

logger = logging.getLogger(__name__)

TARGETS = ("binarized", "classifier")


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
    calls: list[partial[Row]] = []
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
    for place, row in _pooled(calls, executor) if executor is not None else enumerate(call() for call in calls):
        rows[place] = row
        if progress is not None:
            progress(row, len(calls))
    return [rows[place] for place in range(len(calls))]


def _pooled(calls: Sequence[partial[Row]], executor: ExecutorLike) -> Iterator[tuple[int, Row]]:
    """Yield rows with their places as workers finish them."""
    pool, packer = Pool(executor), Packer("a worker")
    try:
        packed = (make_call(packer, call) for call in calls)
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
    """Run one attack, as the library's adapter lists it, on one of :data:`TARGETS`; ``seed`` is that of every draw."""
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
    common |= {"norm": norm, "samples": SAMPLES}
    limits, counter, violations = threat_model(norm, listing.channels), PassCounter(), list[str]()
    problems = planted(norm, listing.channels) if target == "binarized" else None
    inputs, labels = digits(listing.channels) if problems is None else (problems.inputs, problems.labels)
    whole = Counted(network(listing.channels), counter)

    def attacked(index: list[int]) -> Tensor:
        module: nn.Module = whole
        if problems is not None:
            batching = "full" if attack.traits.batching == "full" else "any"
            features = Counted(problems.features, counter)
            classifier = problems.problems.select(index).classifier(features, problems.settings, batching=batching)
            module = BatchMonitor(classifier, inputs[index], batching=batching, norm=norm)
        run = Target(
            module=module,
            bounds=limits.bounds,
            classes=10 if problems is None else 2,
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
        )
        generator = stream(seed, index[0], "conformance", attack.name)
        found = run_attack(attack, run, inputs[index], labels[index], threat_model=limits, generator=generator)
        violations.extend(module.violations if isinstance(module, BatchMonitor) else ())
        return found

    # Attacks of single samples are posed them one at a time on a binarized target.
    single, rows, one_by_one = problems is not None and attack.traits.one_by_one, list(range(SAMPLES)), ""
    start = time.perf_counter()
    try:
        candidates = torch.cat([attacked([row]) for row in rows]) if single else attacked(rows)
        seconds = time.perf_counter() - start
        passes = {"forward": counter.forward, "backward": counter.backward}
        judge = network(listing.channels) if problems is None else problems.module
        found = verify(candidates, inputs, labels, module=judge, threat_model=limits, attack=attack.name)
        if not single:
            alone = torch.allclose(attacked([0])[0], candidates[0], rtol=0, atol=1e-4)
            one_by_one = "same" if alone else "other"
    except RobustExtError as error:
        return Row(**common, outcome="failed", reason=str(error))
    common |= {"outcome": "failed" if violations else "ran", "reason": "".join(violations[:1])}
    verified = found.outcomes.count("found")
    return Row(**common, verified=verified, one_by_one=one_by_one, seconds=seconds, passes=passes)


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
