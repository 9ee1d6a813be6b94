"""The protocol: groups of samples are measured, fitted and attacked, until all are done or every verdict is decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.cost import Costs
from robust_ext.core.random import derive_seed
from robust_ext.core.target import Counted, count_calls
from robust_ext.engine.code_digest import attack_code, module_code, object_code
from robust_ext.engine.context import current_context
from robust_ext.engine.copies import behaviour
from robust_ext.engine.identity import model_digest
from robust_ext.engine.progress import Phases, phase, watching
from robust_ext.engine.run import RECORD, Block, Probe, Run
from robust_ext.engine.store import Record, Store
from robust_ext.engine.task import Work
from robust_ext.engine.trace import mean_curve
from robust_ext.engine.verify import LOST
from robust_ext.evaluations.binarization.attacking import Attacked, ProblemAttack, example_arrays
from robust_ext.evaluations.binarization.batches import compare_batches
from robust_ext.evaluations.binarization.calibration import Calibration
from robust_ext.evaluations.binarization.defense import Defense, Drawn, draw_accepted
from robust_ext.evaluations.binarization.forward import Forward, choose_forward
from robust_ext.evaluations.binarization.head import Head, whole
from robust_ext.evaluations.binarization.posing import pose, sample_costs
from robust_ext.evaluations.binarization.problems import Problems
from robust_ext.evaluations.binarization.rules import Rules
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.summary import Plan, Sequential, until_decided
from robust_ext.evaluations.binarization.witnesses import Deepest, Witness, find_witnesses, pose_deeper

# Samples that are planted at the logits as well, where the head is more than a sound linear layer.
_AT_LOGITS = 16


@dataclass(frozen=True, kw_only=True)
class BinarizationRun(Run):
    """One binarization test."""

    kind: ClassVar[str] = "binarization"
    partial: ClassVar[bool] = True

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
        return replace(
            self.given, kappa=chosen["kappa"], inner_points=chosen["inner_points"], least_depth=chosen["depth"]
        )

    @cached_property
    def forward(self) -> Forward:
        """The forward passes of points."""
        rows, fold = self.given.forward_batch, self.given.fold
        inputs = self.inputs[:2].to(self.device)
        return choose_forward(self.features, inputs, rows=rows, fold=fold, drawn=self.drawn("measured"))

    def digests(self) -> dict[str, Any]:
        """Return the digests of network, readouts, attacks, samples and detector."""
        few, bounds = self.inputs[:1].to(self.device), self.given.threat_model.bounds
        found = {
            "attack_code": {name: attack_code(one) for name, one in self.attacks.items()},
            "model": model_digest(self.features.module, self.readout),
            "model_code": module_code(self.features.module, self.readout),
            "readout_code": object_code(self.given.fitting),
            "model_behaviour": behaviour(nn.Sequential(self.features.module, self.readout), few, bounds),
        }
        if self.defense is None:
            return found
        detector = self.defense.detector
        return {
            **found,
            "detector_digest": model_digest(detector),
            "detector_code": module_code(detector),
            "detector_behaviour": behaviour(detector, few, bounds),
        }

    def drawn(self, purpose: str, features: Counted | None = None) -> nn.Module:
        """The features that the readout reads: of a random model, over draws for a purpose."""
        seed = derive_seed(self.given.seed_of_judge, purpose)
        return self.given.fitting.measured(self.features if features is None else features, seed=seed)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count what the detector sends through the network too, and show the count."""
        counter = self.features.counter
        with ExitStack() as stack:
            if self.defense is not None:
                stack.enter_context(count_calls(self.defense.detector.classifier, counter))
            stack.enter_context(watching(counter))
            stack.enter_context(counter.until(current_context().deadline))
            yield

    def costs(self) -> Costs:
        """Return the cost of a sample, see :func:`sample_costs`."""
        images, count = self.inputs.dim() == 4, len(self.ids)
        return sample_costs(self.attacks, self.given, samples=count, images=images, detector=self.defense is not None)

    def kept(self) -> int:
        """A record with an entry of each attack."""
        return RECORD * (1 + len(self.attacks)) // 2

    def probe(self) -> Probe:
        """The features with the readout, at the first inputs."""
        network = nn.Sequential(self.features.module, self.readout).eval()
        return network, self.inputs[:4].to(self.device), self.given.group_size

    def prepare(self, store: Store) -> Work[None]:
        """Calibrate the hardness once."""
        if not self.given.calibrate_on:
            return
        with store.once("calibration") as slot:
            if slot.empty:
                some, ids = self.inputs[: self.given.calibrate_on].to(self.device), self.ids[: self.given.calibrate_on]
                phase("calibration")
                found = Calibration(
                    features=self.features,
                    readout=self.readout,
                    attacks=self.attacks,
                    inputs=some,
                    samples=ids,
                    given=self.given,
                    forward=self.forward,
                )
                slot.fill((yield from found.run()))
        self.calibrations.append(slot.value)

    @property
    def rules(self) -> Rules:
        """The rules for counts of solved problems."""
        return Rules(self.settings, len(self.attacks))

    @cached_property
    def sequence(self) -> Sequential:
        """The state of the sequential rule for each attack."""
        return Sequential(list(self.attacks), self.rules)

    def decided(self, store: Store) -> bool:
        """Return whether the sequential rule has decided every attack."""
        return not self._plan(store).attacks

    def finish(self, store: Store) -> tuple[Sequence[Record], Sequence[Record]]:
        """Records and timings up to where the last attack was decided; all without the sequential rule."""
        groups = (store.block(rows) for rows in takewhile(store.holds, self.blocks))
        records = [record for group in until_decided(list(self.attacks), groups, self.rules) for record in group]
        timings = {entry["block"]: entry for entry in store.timings() if entry["block"] < len(records)}
        store.finish(records)
        return records, list(timings.values())

    def complete_groups(self, records: Sequence[Record]) -> list[list[Record]]:
        """Records by group, up to the first group that is not complete."""
        by_index = {record["index"]: record for record in records}
        complete: list[list[Record]] = []
        for indices in self.blocks:
            if not all(index in by_index for index in indices):
                break
            complete.append([by_index[index] for index in indices])
        return complete

    def _plan(self, store: Store) -> Plan:
        """Return the remaining use of samples, by the complete groups from the first on."""
        if self.given.sequential:
            for rows in takewhile(store.holds, self.blocks[self.sequence.groups :]):
                self.sequence.add(store.block(rows))
        plan = self.sequence.plan
        return plan if len(self.given.depths) > 1 else replace(plan, deeper=False)

    @property
    def ordered(self) -> bool:
        """With the sequential rule."""
        return self.given.sequential

    def place(self) -> torch.device:
        """The features' device."""
        return self.device

    def common(self) -> Sequence[object]:
        """The network, the detector and the attacks."""
        detector = () if self.defense is None else (self.defense.detector,)
        return (self.features.counter, self.features, self.readout, *detector, *self.attacks.values())

    def samples(self) -> Sequence[Tensor]:
        """The clean samples."""
        return (self.inputs,)

    def needs(self, rows: range, store: Store) -> Mapping[str, Any]:
        """The clean samples of a group, and what they are still needed for."""
        return {"inputs": self.inputs[rows.start : rows.stop], "plan": self._plan(store)}

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """Plant something for each of these samples, and run every undecided attack on it."""
        plan, settings = needs["plan"], self.settings
        phases = Phases(self.features.counter)
        samples, defense = [self.ids[index] for index in rows], self.defense
        inputs = needs["inputs"].to(self.device)
        drawn = None
        if defense is not None:
            phase("points the detector lets pass")
            drawn = [draw_accepted(x, id_, settings, defense) for x, id_ in zip(inputs, samples, strict=True)]
            phases.stop("accepted")
        parts = self.forward, self.readout, inputs, samples, drawn, settings, phases
        posed = pose(*parts, defense=defense, random=plan.random)
        problems, results = posed.problems, dict[str, Attacked]()
        timing: dict[str, Any] = {"block": rows[0], "phases": phases.spent, "attacks": {}}
        # Where nothing can be planted in any sample of the group, there is nothing to attack.
        if problems is not None:
            results = yield from self._attack(problems, plan, batches=not rows[0])
        phases.skip()
        # Depth changes nothing about an attack that fails already.
        deeper = {name: self._posed(name) for name, one in results.items() if plan.deeper and self._may_pass(one)}
        witnesses = self._witnesses(problems, phases) if deeper else []
        if problems is not None and deeper:
            known = Deepest()
            for one in witnesses:
                known.take(one.reach, one.points)
            yield from pose_deeper(problems, deeper, results, known, self.given.depths[1:])
            phases.skip()
        for name, done in results.items():
            timing["attacks"][name] = {"phases": done.spent, "curve": mean_curve(done.curves)}
        arrays = {}
        if problems is not None and rows[0] == 0:
            arrays["examples"] = example_arrays(problems, results, settings.threat_model.bounds)
        records: list[dict[str, Any]] = []
        plantings: Sequence[Drawn | None] = drawn or [None] * len(samples)
        for index, sample, planting in zip(rows, samples, plantings, strict=True):
            good = problems is not None and sample in problems.samples
            record: dict[str, Any] = {
                "index": index,
                "sample": sample,
                "separable": good,
                "random_reach": posed.reach.get(sample) if good else None,
                "random_draws": posed.draws.get(sample, 0),
                "attacks": {name: of.records[sample] for name, of in results.items() if sample in of.records},
            }
            if deeper:
                record["witnesses"] = {one.name: one.reach.get(sample) for one in witnesses}
            if planting is not None:
                found = planting.candidates is not None
                record["planting"] = {"found": found, "source": planting.source, "tries": planting.tries}
            records.append(record)
        if rows[0] < _AT_LOGITS and (behind := self.behind) is not None:
            some = slice(_AT_LOGITS - rows[0])
            given = inputs[some], None if drawn is None else drawn[some]
            yield from self._attack_behind(behind, *given, records[some], results, phases)
        return Block(records=records, timing=timing, arrays=arrays)

    @property
    def behind(self) -> Counted | None:
        """The network as features of a second problem; None with a sound linear head."""
        if self.head.linear and not self.head.fault:
            return None
        parts = self.features
        return Counted(whole(parts.module, self.readout), parts.counter, counts=parts.counts)

    def _attack_behind(
        self,
        behind: Counted,
        inputs: Tensor,
        drawn: Sequence[Drawn] | None,
        made: Sequence[Record],
        results: Mapping[str, Attacked],
        phases: Phases,
    ) -> Work[None]:
        """Plant at the logits, where attacks go through the head too, and add what becomes of it to records."""
        forward = Forward(self.drawn("measured", behind), self.forward.rows)
        parts = forward, nn.Identity().eval(), inputs, [record["sample"] for record in made], drawn
        posed = pose(*parts, self.settings, phases, defense=self.defense)
        if posed.problems is None or not posed.problems.samples:
            return
        for name, result in results.items():
            attack = replace(self._posed(name), features=behind, canaries=frozenset())
            again = yield from attack.run(posed.problems)
            result.add(again.spent)
            for record in made:
                found, reach = again.records.get(record["sample"]), posed.reach.get(record["sample"])
                if found is not None and name in record["attacks"]:
                    record["attacks"][name]["behind"] = {"outcome": found["outcome"], "random_reach": reach}

    def _witnesses(self, problems: Problems | None, phases: Phases) -> list[Witness]:
        """Run the project's own attacks on the problems of a group."""
        if problems is None or not problems.samples:
            return []
        phase("witnesses")
        found = list(find_witnesses(self.drawn("witness"), problems, self.settings, defense=self.defense))
        phases.stop("witnesses")
        return found

    def _attack(self, problems: Problems, plan: Plan, *, batches: bool) -> Work[dict[str, Attacked]]:
        """Run the undecided attacks on the problems of a group, and then in other ``batches``."""
        results = {}
        for name in plan.attacks:
            attack = self._posed(name)
            results[name] = yield from attack.run(problems)
            if batches and (compared := (yield from compare_batches(attack, problems, results[name]))) is not None:
                results[name].records[problems.samples[0]]["batches"] = compared
        return results

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
