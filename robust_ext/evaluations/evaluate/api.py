"""A whole evaluation as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from typing_extensions import Unpack

from robust_ext.attacks.adapted import AdaptedAttack, adaptation_words
from robust_ext.attacks.base import Attack
from robust_ext.core.criteria import Criterion
from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array
from robust_ext.engine.context import current_context, limited
from robust_ext.engine.estimate import Estimate, EstimatedError, estimate
from robust_ext.engine.evaluation_file import as_folder, begin_evaluation
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.inputs import Batches, EvaluationInputs
from robust_ext.engine.progress import Progress, paced, showing
from robust_ext.engine.run import Outcome
from robust_ext.engine.running import run_all
from robust_ext.engine.task import drive
from robust_ext.evaluations.callbacks import Callback
from robust_ext.evaluations.causes.attaching import PROBED
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MISLEADING
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.evaluations.causes.setup import ACCURACY, find_setup
from robust_ext.evaluations.caveats import Part, parts_of
from robust_ext.evaluations.detectors import NamedDetector
from robust_ext.evaluations.evaluate.cascade import MemberRun, next_member, plan_members
from robust_ext.evaluations.evaluate.certificate import (
    NO_SEARCH,
    certificate_of,
    certify,
    doubtful,
    estimate_certificate,
    strongest,
    uncertified,
    warn_if_uncertifiable,
)
from robust_ext.evaluations.evaluate.content import make_content, measure, not_tried
from robust_ext.evaluations.evaluate.defended import evaluate_subject
from robust_ext.evaluations.evaluate.detected import (
    aware_members,
    describe_detector,
    prepare_detector,
    strongest_aware,
)
from robust_ext.evaluations.evaluate.search import Search, search_recipe
from robust_ext.evaluations.evaluate.settings import EvaluateResult, EvaluateSettings
from robust_ext.evaluations.evaluate.subject import Subject, prepare
from robust_ext.evaluations.evaluate.suite import Member, standard_suite
from robust_ext.evaluations.options import EvaluateOptions
from robust_ext.evaluations.run_keywords import RunKeywords
from robust_ext.models.black_box import black_box_in

_KIND = "evaluation"


def evaluate(  # noqa: D417
    model: object,
    inputs: Array | Batches,
    labels: Array | None,
    threat_model: ThreatModel,
    *,
    criterion: Criterion | None = None,
    defense: object = None,
    defense_weights: str | os.PathLike[str] | None = None,
    detector: object = None,
    detector_data: Array | None = None,
    device: str | torch.device | None = None,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    isolate: bool = False,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    settings: EvaluateSettings | None = None,
    **options: Unpack[EvaluateOptions],
) -> EvaluateResult:
    """Robust accuracy of a model under a standard suite, with a certificate of the attack behind the number.

    The setup is checked, and an evaluation that cannot mean anything stops with the reason. The suite attacks in order,
    each member the samples that still stand, and every candidate is verified. The strongest white-box attack then has
    to find adversarial examples that are planted in this model (the binarization test, with depth). Where it fails, an
    attack that passes is searched for, and run on the samples too.

    Args:
        model, inputs, labels, threat_model, criterion: As of :func:`robust_ext.robust_accuracy`.
        defense, defense_weights: A test-time defense of the model, as of :func:`robust_ext.evaluate_defense`, whose
            cascade attacks it, and models that are one or draw random numbers; fresh draws judge what is random.
        detector, detector_data: A detector, as of :func:`robust_ext.binarization_test`, of what any defense is given;
            what it flags breaks no sample.
        device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks: How it is run, see
            :class:`robust_ext.evaluations.run_keywords.RunKeywords`.
        settings, **options: All settings at once, or single ones, see :class:`EvaluateSettings`.

    Raises:
        RobustExtError: An argument, the model or the run folder is not as described; see its subclasses.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
        >>> x, threat_model = torch.rand(48, 1, 4, 4), ThreatModel(norm="linf", epsilon=0.3)
        >>> y = network(x).argmax(1)
        >>> result = evaluate(network, x, y, threat_model, budget="quick")
        >>> result.verdict, result.robust_accuracy < 1
        ('passed', True)
    """
    run = RunKeywords(device, sample_ids, out, isolate, attack_timeout, executor, devices, progress, callbacks)
    with run.begun() as finish:
        begun, chosen = time.perf_counter(), run.judged(make_settings(EvaluateSettings, options, base=settings))
        named = defense, defense_weights, detector
        given, subject = prepare(run, model, inputs, labels, threat_model, chosen, *named, criterion)
        warn_if_uncertifiable(given, chosen)
        detectors = prepare_detector(detector, detector_data, given, chosen, digests=run.out is not None)
        whole = _Evaluation(given=given, settings=chosen, run=run, subject=subject, detectors=detectors)
        return finish(EvaluateResult(whole.limited_content(begun)))


@dataclass(kw_only=True)
class _Evaluation:
    """The checked arguments of an evaluation, and what its parts came to."""

    given: EvaluationInputs
    settings: EvaluateSettings
    run: RunKeywords
    outcomes: list[Outcome[MemberRun]] = field(default_factory=list)
    others: list[Part] = field(default_factory=list)  # The costs of evaluations inside this one
    detectors: Sequence[NamedDetector] = ()  # At most one, whose flags save a sample
    bar: Progress | None = None
    subject: Subject | None = None  # A test-time defense or random model, which has a cascade of its own

    def limited_content(self, begun: float) -> dict[str, Any]:
        """Claim the run folder, and evaluate within the time that was given."""
        asked = {**self.settings.to_dict(), "minutes": None, "claim": None, "accept_setup": None}
        begin_evaluation(as_folder(self.run.out), _KIND, holds={"evaluation": "the evaluation"}, settings=asked)
        with limited(self.settings.minutes), showing(_KIND, shown=self.run.progress) as self.bar:
            return self.content(begun)

    def content(self, begun: float) -> dict[str, Any]:
        """Check, attack, certify, and search where there is no certificate."""
        if self.subject is not None:
            given = self.given, self.settings, self.run
            return evaluate_subject(self.subject, *given, detectors=self.detectors, begun=begun)
        found = self._findings()
        stop = next((one for one in found if one.code in ACCURACY), None)
        if stop is not None and not self.settings.accept_setup and not current_context().dry_run:
            return self._content(found, begun, stopped=stop.cause)
        members = self._members()
        if current_context().dry_run:
            raise EstimatedError(self._estimate(members))
        self._attack(members)
        detector = self.detectors[0].detector if self.detectors else None
        attack = strongest(self.outcomes) if detector is None else strongest_aware(self.outcomes, members)
        if attack is None:
            certificate, tested = uncertified(None, "no attack that can be tested ran on this model"), None
        else:
            _step(self.bar, f"certificate of {attack.name}")
            certificate, tested = certify(attack, self.given, self.settings, out=self.run.out, detector=detector)
        self.others += [] if tested is None else parts_of(tested.content)
        search = None
        wanted = self.settings.search and self.settings.planted and detector is None and not _blind(self.given)
        if wanted and _doubtful(certificate, found):
            search = self._search([*found, *map(Finding.from_dict, certificate["findings"])])
            recipe = search.winner or search.nearest
            if search.winner is not None and search.judged is not None:
                attack = search.winner.attack
                certificate = certificate_of(attack, search.judged)
            elif attack is None:
                certificate = uncertified(None, search.reason)
            if recipe is not None:
                # The suite again, as the recipe sees the model: it follows gradients that lead somewhere.
                view = recipe.view
                again = [as_member(recipe.attack), *(_viewed(one, view) for one in members if view and one.white_box)]
                self._attack(again)
                members += again
        return self._content(
            found,
            begun,
            attack=attack,
            certificate=certificate,
            search=None if search is None else {"tried": list(search.tried), "reason": search.reason},
            not_tried=[
                *([NO_SEARCH] if (self.detectors or _blind(self.given)) and self.settings.search else []),
                *not_tried(self.given, self.outcomes, members),
            ],
        )

    def _estimate(self, members: Sequence[Member]) -> Estimate:
        """Estimate the suite, the certificate of its dearest attack, and the search and the suite that may follow."""
        given, detector = self.given, self.detectors[0].detector if self.detectors else None
        suite = estimate(lambda: self._attack(members))
        certificate = estimate_certificate(members, given, self.settings, out=self.run.out, detector=detector)
        if certificate is None:
            return suite
        whole = suite + certificate
        if self.settings.search and detector is None:
            whole += estimate(lambda: self._search([])) + suite.as_phase("search")
        return whole

    def _search(self, findings: Sequence[Finding]) -> Search:
        """Search for an attack that passes the test."""
        given, folder = self.given, as_folder(self.run.out)
        search = search_recipe(
            module=given.module,
            inputs=given.inputs,
            ids=given.ids,
            threat_model=given.threat_model,
            findings=findings,
            seed=self.settings.seed,
            judge_seed=self.settings.seed_of_judge,
            out=folder,
            watch=lambda words: _step(self.bar, words),
            layer=self.settings.layer,
        )
        self.others += search.parts
        return search

    def _content(self, found: Sequence[Finding], begun: float, **parts: Any) -> dict[str, Any]:
        if self.detectors:
            named = describe_detector(self.detectors[0], self.given, self.settings, self.given.correct.tolist())
            parts["measured"] = {**measure(self.given, self.outcomes), "detector": named}
        parts |= {"findings": [one.to_dict() for one in found], "others": self.others, "begun": begun}
        return make_content(self.given, self.outcomes, self.settings, **parts)

    def _findings(self) -> list[Finding]:
        """Find faults of the setup, or else of the model."""
        given, seed = self.given, self.settings.seed
        with paced(given.module, "checks of the setup"):
            setup = find_setup(given, seed=seed)
            few = given.inputs[:PROBED], given.labels[:PROBED]
            probed = probe_model(given.module, *few, threat_model=given.threat_model, seed=seed).findings
        known = {one.code for one in setup}
        found = [*setup, *(one for one in probed if one.code not in known)]
        return Caller(module=given.module, attacks={}, images=given.inputs.dim() == 4).addressed(found)

    def _members(self) -> list[Member]:
        given, budget = self.given, self.settings.budget
        classes, square = given.logits.shape[1], given.inputs.dim() <= 4
        aware = aware_members(given.threat_model, budget=budget) if self.detectors else []
        suite = standard_suite(given.threat_model, budget=budget, classes=classes, square=square, blind=_blind(given))
        return [*suite, *aware]

    def _attack(self, members: Sequence[Member]) -> None:
        """Run members on the samples that stand, after those that were run before."""
        settings, earlier = self.settings, list(self.outcomes)
        runs = plan_members(
            members,
            self.given,
            batch_size=settings.batch_size,
            seed=settings.seed,
            judge_seed=settings.seed_of_judge,
            detectors=self.detectors,
        )

        def choose(left: Sequence[MemberRun], outcomes: Mapping[str, Outcome[MemberRun]]) -> MemberRun | None:
            run = next_member(left, [*earlier, *outcomes.values()])
            if run is not None and run.standing is not None:
                stand, more = f"{sum(run.standing)} of {len(run.standing)} samples stand", len(left) - 1
                _step(self.bar, f"{run.attack.name}, {stand}, {more} attacks to follow")
            return run

        tasks = run_all(runs, out=self.run.out, progress=self.run.progress, title="suite", choose=choose, whole=False)
        self.outcomes += drive(tasks, self.run.worker).values()


def _doubtful(certificate: Mapping[str, Any], found: Sequence[Finding]) -> bool:
    """Return whether another attack may do better: this one misses planted examples, or gradients mislead it.

    One that was tested on too few samples to tell is not doubted.
    """
    return doubtful(certificate) or any(one.code in MISLEADING and one.weight == "high" for one in found)


def _blind(given: EvaluationInputs) -> bool:
    return black_box_in(given.module) is not None


def _step(bar: Progress | None, words: str) -> None:
    if bar is not None:
        bar.advance()
        bar.phase(words)


def _viewed(member: Member, view: Mapping[str, Any]) -> Member:
    """Return a member that sees the model through another view."""
    words = f"{member.attack.name}, {adaptation_words(**view)}"
    return replace(member, attack=AdaptedAttack(attack=member.attack, **view).named(words))


def as_member(attack: Attack) -> Member:
    """Return an attack from elsewhere as a member of the suite."""
    return Member(attack=attack, white_box=attack.traits.gradients)
