"""The kernel of the test: plant adversarial examples in a group of samples, attack them, and record what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.random import derive_seed
from robust_ext.core.target import Counted
from robust_ext.engine.progress import Phases, phase
from robust_ext.engine.run import Block
from robust_ext.engine.store import Record
from robust_ext.engine.task import Work
from robust_ext.engine.trace import mean_curve
from robust_ext.engine.verify import LOST
from robust_ext.evaluations.binarization.attacking import Attacked, ProblemAttack, example_arrays
from robust_ext.evaluations.binarization.batches import compare_batches
from robust_ext.evaluations.binarization.defense import Defense, Drawn, draw_accepted
from robust_ext.evaluations.binarization.forward import Forward, choose_forward
from robust_ext.evaluations.binarization.head import Head, whole
from robust_ext.evaluations.binarization.posing import Posed, pose, search
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.rules import LOOKS, Rules
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.summary import Plan, random_ends, rows_until
from robust_ext.evaluations.binarization.witnesses import Deepest, find_witnesses, pose_deeper

# Samples that are planted at the logits as well, where the head is more than a sound linear layer.
_AT_LOGITS = 16


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A network, its attacks and the settings of a test; clean samples come in groups."""

    features: Counted
    readout: nn.Module
    device: torch.device
    attacks: Mapping[str, Attack]
    inputs: Tensor  # Clean samples (N, ...), on the CPU or on the device.
    ids: Sequence[int]
    given: BinarizationSettings  # Before a calibration chooses others.
    defense: Defense | None = None
    head: Head = field(default_factory=Head)
    calibrations: list[dict[str, Any]] = field(default_factory=list)  # Empty before, and without one.

    @property
    def calibration(self) -> dict[str, Any] | None:
        """The result of the calibration; None without one."""
        return self.calibrations[-1] if self.calibrations else None

    @property
    def settings(self) -> BinarizationSettings:
        """The settings of the test, with the hardness that the calibration chose."""
        chosen = None if self.calibration is None else self.calibration["chosen"]
        if chosen is None:
            return self.given
        points = {name: value for name, value in chosen.items() if name != "depth"}
        return replace(self.given, least_depth=chosen["depth"], **points)

    @property
    def rules(self) -> Rules:
        """The rules for counts of solved problems."""
        return Rules(self.settings, len(self.attacks))

    @cached_property
    def forward(self) -> Forward:
        """The forward passes of points."""
        rows, fold = self.given.forward_batch, self.given.fold
        inputs = self.inputs[:2].to(self.device)
        return choose_forward(self.features, inputs, rows=rows, fold=fold, drawn=self.drawn("measured"))

    @property
    def behind(self) -> Counted | None:
        """The network as features of a second problem; None with a sound linear head."""
        if self.head.linear and not self.head.fault:
            return None
        parts = self.features
        return Counted(whole(parts.module, self.readout), parts.counter, counts=parts.counts)

    def drawn(self, purpose: str, features: Counted | None = None) -> nn.Module:
        """The features that the readout reads: of a random model, over draws for a purpose."""
        seed = derive_seed(self.given.seed_of_judge, purpose)
        return self.given.fitting.measured(self.features if features is None else features, seed=seed)

    def test(self, rows: range, inputs: Tensor, plan: Plan) -> Work[Block]:
        """Plant something in each of these samples ``(B, ...)``, and run every undecided attack on it."""
        samples, phases = [self.ids[index] for index in rows], Phases(self.features.counter)
        drawn = self._draw(inputs, samples, phases)
        posed = pose(self.forward, self.readout, inputs, samples, drawn, self.settings, phases)
        # Where nothing can be planted in any sample of the group, there is nothing to attack.
        problems, results = posed.problems, dict[str, Attacked]()
        if problems is not None:
            results = yield from self._attack(problems, plan, batches=not rows[0])
        phases.skip()
        if plan.random:
            self._search(posed, results, phases, looks=not rows[0])
        # Depth changes nothing about an attack that fails already.
        deeper = {name: self._posed(name) for name, one in results.items() if plan.deeper and self._may_pass(one)}
        witnesses = self._witnesses(problems, phases) if deeper else []
        if problems is not None and deeper:
            known = Deepest()
            for one in witnesses:
                known.take(one)
            yield from pose_deeper(problems, deeper, results, known, self.given.depths[1:])
            phases.skip()
        attacked = {name: {"phases": done.spent, "curve": mean_curve(done.curves)} for name, done in results.items()}
        arrays = {}
        if problems is not None and rows[0] == 0:
            arrays["examples"] = example_arrays(problems, results, self.settings.threat_model.bounds)
        found = witnesses if deeper else None
        plantings: Sequence[Drawn | None] = drawn or [None] * len(samples)
        records = [
            _record(index, sample, planting, posed, results, found)
            for index, sample, planting in zip(rows, samples, plantings, strict=True)
        ]
        if rows[0] < _AT_LOGITS and (behind := self.behind) is not None:
            some = slice(_AT_LOGITS - rows[0])
            given = inputs[some], None if drawn is None else drawn[some]
            yield from self._attack_behind(behind, *given, records[some], results, phases)
        timing = {"block": rows[0], "phases": phases.spent, "attacks": attacked}
        return Block(records=records, timing=timing, arrays=arrays)

    def _draw(self, inputs: Tensor, samples: Sequence[int], phases: Phases) -> list[Drawn] | None:
        """Draw points that the detector accepts; None without a detector."""
        if self.defense is None:
            return None
        phase("points the detector lets pass")
        pairs = zip(inputs, samples, strict=True)
        drawn = [draw_accepted(x, sample, self.settings, self.defense) for x, sample in pairs]
        phases.stop("accepted")
        return drawn

    def _attack(self, problems: Problems, plan: Plan, *, batches: bool) -> Work[dict[str, Attacked]]:
        """Run the undecided attacks on the problems of a group, and then in other ``batches``."""
        results = {}
        for name in plan.attacks:
            attack = self._posed(name)
            results[name] = yield from attack.run(problems)
            if batches and (compared := (yield from compare_batches(attack, problems, results[name]))) is not None:
                results[name].records[problems.samples[0]]["batches"] = compared
        return results

    def _search(self, posed: Posed, results: Mapping[str, Attacked], phases: Phases, *, looks: bool) -> None:
        """Search a group's problems at random; in the first group no further than a look that settles R-ASR."""
        samples = () if posed.problems is None else posed.problems.samples
        records = [_counted(sample, posed, results) for sample in samples]
        steps = LOOKS if looks and not self.given.sequential else ()
        edges = [0, *(rows_until(records, problems) for problems in steps), len(samples)]
        for start, end in pairwise(edges):
            rows = range(start, end)
            search(posed, self.forward, self.settings, phases, rows=rows, defense=self.defense)
            records[start:end] = [_counted(sample, posed, results) for sample in samples[start:end]]
            if random_ends(list(results), records[:end], self.rules) is not None:
                return

    def _attack_behind(
        self,
        behind: Counted,
        inputs: Tensor,
        drawn: Sequence[Drawn] | None,
        records: Sequence[Record],
        results: Mapping[str, Attacked],
        phases: Phases,
    ) -> Work[None]:
        """Plant at the logits, where attacks go through the head too, and add the outcomes to the records."""
        forward = Forward(self.drawn("measured", behind), self.forward.rows)
        parts = forward, nn.Identity().eval(), inputs, [record["sample"] for record in records], drawn
        posed = pose(*parts, self.settings, phases)
        if posed.problems is None or not posed.problems.samples:
            return
        every = range(len(posed.problems.samples))
        search(posed, forward, self.settings, phases, rows=every, defense=self.defense)
        for name, result in results.items():
            attack = replace(self._posed(name), features=behind, canaries=frozenset())
            again = yield from attack.run(posed.problems)
            result.add(again.spent)
            for record in records:
                found, reach = again.records.get(record["sample"]), posed.reach.get(record["sample"])
                if found is not None and name in record["attacks"]:
                    record["attacks"][name]["behind"] = {"outcome": found["outcome"], "random_reach": reach}

    def _witnesses(self, problems: Problems | None, phases: Phases) -> list[Deepest]:
        """Run the project's own attacks on the problems of a group."""
        if problems is None or not problems.samples:
            return []
        phase("witnesses")
        # Gradients through the folded copy take two thirds of the time.
        searched = self.forward.module if self.forward.channels_last else None
        features = self.drawn("witness")
        found = list(find_witnesses(features, problems, self.settings, defense=self.defense, searched=searched))
        phases.stop("witnesses")
        return found

    def _may_pass(self, result: Attacked) -> bool:
        """Return whether an attack may still pass by the score, after its misses in one group."""
        outcomes = [record["outcome"] for record in result.records.values()]
        missed = sum(outcome not in ("found", "not_planted", "non_finite_logits", *LOST) for outcome in outcomes)
        return not self.rules.fails(len(self.ids) - missed, len(self.ids))

    def _posed(self, name: str) -> ProblemAttack:
        return ProblemAttack(
            attack=self.attacks[name],
            features=self.features,
            settings=self.settings,
            canaries=frozenset(self.ids[: self.given.canaries]),
            defense=self.defense,
        )


def _counted(sample: int, posed: Posed, results: Mapping[str, Attacked]) -> dict[str, Any]:
    """Return what the rules count of a sample."""
    attacks = {name: of.records[sample] for name, of in results.items() if sample in of.records}
    return {"random_reach": posed.reach.get(sample), "attacks": attacks}


def _record(
    index: int,
    sample: int,
    planting: Drawn | None,
    posed: Posed,
    results: Mapping[str, Attacked],
    witnesses: Sequence[Deepest] | None,
) -> dict[str, Any]:
    """Return the stored record of a sample."""
    good = posed.problems is not None and sample in posed.problems.samples
    record: dict[str, Any] = {
        "index": index,
        "sample": sample,
        "separable": good,
        "random_draws": posed.draws.get(sample, 0),
        **_counted(sample, posed, results),
    }
    if witnesses is not None:
        record["witnesses"] = {one.name: one.reach.get(sample) for one in witnesses}
    if planting is not None:
        found = planting.candidates is not None
        record["planting"] = {"found": found, "source": planting.source, "tries": planting.tries}
    return record
