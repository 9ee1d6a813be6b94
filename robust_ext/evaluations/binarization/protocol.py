"""The protocol: groups of samples are measured, fitted and attacked, until all are done or every verdict is decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robust_ext.core.cost import Costs
from robust_ext.core.target import count_calls
from robust_ext.engine.code_digest import attack_code, module_code, object_code
from robust_ext.engine.context import current_context
from robust_ext.engine.copies import behaviour
from robust_ext.engine.identity import model_digest
from robust_ext.engine.progress import phase, watching
from robust_ext.engine.run import RECORD, Block, Probe, Run
from robust_ext.engine.store import Record, Store
from robust_ext.engine.task import Work
from robust_ext.evaluations.binarization.calibration import Calibration
from robust_ext.evaluations.binarization.kernel import Kernel
from robust_ext.evaluations.binarization.posing import sample_costs
from robust_ext.evaluations.binarization.summary import Plan, Sequential, until_decided


@dataclass(frozen=True, kw_only=True)
class BinarizationRun(Kernel, Run):
    """One binarization test."""

    kind: ClassVar[str] = "binarization"
    partial: ClassVar[bool] = True

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
        if "calibration" not in store.values:
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
            store.set_value("calibration", (yield from found.run()))
        self.calibrations.append(store.values["calibration"])

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
        return self.test(rows, needs["inputs"].to(self.device), needs["plan"])
