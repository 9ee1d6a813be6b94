"""The case studies as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from robust_ext.attacks.base import Attack
from robust_ext.casestudies.accuracy import RecipeRun, measured_accuracy, plan_recipe
from robust_ext.casestudies.base import CaseStudy, Recipe
from robust_ext.casestudies.catalogue import CASE_STUDIES, load_case_study
from robust_ext.casestudies.content import binarization_entry, make_content, study_entry
from robust_ext.casestudies.preparation import CaseData, case_threat_model, load_case_data, trained_defense
from robust_ext.casestudies.result import CaseStudyResult
from robust_ext.core.cost import Spent
from robust_ext.core.devices import check_device
from robust_ext.core.errors import InconsistentModelError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_integer
from robust_ext.detectors.base import Detector
from robust_ext.engine.evaluation_file import as_folder, begin_evaluation
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.progress import Progress, showing
from robust_ext.engine.run import Outcome
from robust_ext.engine.running import run_all
from robust_ext.engine.task import Worker, drive
from robust_ext.engine.workers import attack_worker
from robust_ext.evaluations.binarization import binarization_test
from robust_ext.evaluations.binarization.defense import Defense
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.detectors import calibrate_detector
from robust_ext.evaluations.timing import Part, parts_of, time_table
from robust_ext.registry.attack import as_attack

_FALSE_POSITIVES = 0.05


def run_case_studies(
    names: Sequence[str] = (),
    *,
    data: str = "digits",
    data_root: str | os.PathLike[str] | None = None,
    samples: int = 64,
    images: int = 5000,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    isolate: bool = False,
    attack_timeout: float | None = None,
    executor: ExecutorLike = None,
    devices: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
) -> CaseStudyResult:
    """Train small versions of published defenses, and judge the recipe of their authors and a right one.

    For each recipe the robust accuracy is measured, and the recipe goes through the binarization test.

    Args:
        names: Of :data:`CASE_STUDIES`; all of them when left out.
        data: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        data_root: Folder with the data's files.
        samples: Test images, for robust accuracy and for the binarization test.
        images: Training images at most.
        seed: Of every draw.
        out: Run folder, one folder a study in it: trained weights and results; a killed run goes on there.
        isolate: Run each attack in a process of its own, see docs/threats.md.
        attack_timeout: Seconds an attack may then take for a batch; None for any time.
        executor: What runs the blocks, see docs/clusters.md; this process when left out.
        devices: The devices that its workers use; that of this process when left out.
        device: Where recipes are judged; the CPU, where defenses are trained, when left out.
        progress: Show a progress bar on stderr.
        callbacks: Told of the result, and of records as they come, see :class:`robust_ext.Callback`.

    Raises:
        RobustExtError: An argument, the data or the run folder is not as described; see its subclasses.
    """
    chosen = list(dict.fromkeys(names)) or list(CASE_STUDIES)
    for name in chosen:
        check_choice("names", name, tuple(CASE_STUDIES))
    check_integer("samples", samples, minimum=1)
    check_integer("images", images, minimum=100)
    where = torch.device("cpu") if device is None else check_device(device)
    given = load_case_data(data, root=data_root, samples=samples, images=images, seed=seed)
    folder, begun, studies = as_folder(out), time.perf_counter(), []
    outcomes, parts = list[Outcome[RecipeRun]](), list[Part]()
    asked = {"data": data, "samples": samples, "images": images, "seed": seed}
    begin_evaluation(folder, "case studies", holds={name: name for name in chosen}, settings=asked)
    models = {name: case_threat_model(load_case_study(name), data) for name in chosen}
    workers = attack_worker(isolate=isolate, attack_timeout=attack_timeout, executor=executor, devices=devices)
    with workers as worker, listening(callbacks) as tell:
        isolation = {"isolate": isolate, "attack_timeout": attack_timeout}
        with showing("case studies", shown=progress, total=4 * len(chosen)) as bar:
            for name in chosen:
                place = None if folder is None else folder / name
                one = _Running(
                    study=load_case_study(name),
                    data=given,
                    device=where,
                    threat_model=models[name],
                    seed=seed,
                    folder=place,
                    worker=worker,
                    isolation=isolation,
                    bar=bar,
                    outcomes=outcomes,
                    parts=parts,
                )
                studies.append({"name": name, **one.run()})
        settings = {"data": data, "images": len(given.train_inputs)}
        taken = time_table(outcomes, begun=begun, others=parts)
        content = make_content(studies, samples=samples, settings=settings, seed=seed, time=taken)
        return tell(CaseStudyResult(content).saved(folder))


@dataclass(frozen=True, kw_only=True)
class _Running:
    """One case study."""

    study: CaseStudy
    data: CaseData
    device: torch.device
    threat_model: ThreatModel
    seed: int
    folder: Path | None
    worker: Worker
    isolation: Mapping[str, Any]
    bar: Progress | None
    outcomes: list[Outcome[RecipeRun]]  # Of all studies, for what they took
    parts: list[Part]  # Likewise, of their binarization tests and training

    def run(self) -> dict[str, Any]:
        """Train, measure, and judge both recipes."""
        study, data, begun = self.study, self.data, time.perf_counter()
        self._show("training")
        module = trained_defense(study, data, seed=self.seed, folder=self.folder)
        self.parts.append(Part("training", None, Spent(seconds=time.perf_counter() - begun)))
        self._show("mechanism", done=1)
        measurement = study.measure(module, data.inputs, data.labels, self.threat_model, seed=self.seed)
        detector = self._detector(module)
        judged = study.judged(module, seed=self.seed)
        for part in (module, judged, *(() if detector is None else (detector,))):
            part.to(self.device)
        inputs, labels = data.inputs.to(self.device), data.labels.to(self.device)
        with torch.no_grad():
            logits = judged(inputs)
        given = EvaluationInputs(
            module=judged,
            inputs=inputs,
            labels=labels,
            logits=logits,
            ids=data.ids,
            threat_model=self.threat_model,
        )
        recipes = {}
        for kind, recipe in (("weak", study.weak(self.threat_model)), ("right", study.right(self.threat_model))):
            attack = as_attack(recipe.attack, name=kind)
            self._show(f"{kind} recipe", done=1)
            accuracy = self._accuracy(kind, recipe, attack, given, module, detector)
            entry = self._binarization(kind, recipe, attack, module, detector)
            recipes[kind] = {"attack": attack.description, "words": recipe.words, "robust_accuracy": accuracy, **entry}
        self._show("done", done=1)
        return study_entry(
            study,
            measurement=measurement,
            recipes=recipes,
            epsilon=self.threat_model.epsilon,
            clean=float(given.correct.mean()),
            seconds=time.perf_counter() - begun,
        )

    def _show(self, words: str, *, done: int = 0) -> None:
        if self.bar is not None:
            self.bar.advance(done)
            self.bar.phase(f"{self.study.title}: {words}")

    def _detector(self, module: nn.Module) -> Detector | None:
        """The detector, with a threshold at the clean false-positive rate of the paper."""
        data = self.data
        with seeded_globals(derive_seed(self.seed, self.study.title, "detector")):
            found = self.study.detector(module, data.train_inputs, data.train_labels, seed=self.seed)
        if found is not None:
            bounds = self.threat_model.bounds
            rate = {"false_positive_rate": _FALSE_POSITIVES}
            calibrate_detector(found, data.calibration, **rate, bounds=bounds, seed=self.seed)
        return found

    def _accuracy(
        self,
        kind: str,
        recipe: Recipe,
        attack: Attack,
        given: EvaluationInputs,
        module: nn.Module,
        detector: Detector | None,
    ) -> dict[str, float]:
        exposure = recipe.settings.get("exposure", "classifier")
        defense = None if detector is None else Defense(detector=detector, inverted=False, exposure=exposure, draws=5)
        run = plan_recipe(
            recipe,
            attack,
            given,
            module=module,
            defense=defense,
            identity={**given.described, "exposure": exposure},
            key=f"{kind}-accuracy",
            seed=self.seed,
        )
        outcomes = drive(run_all([run], out=self.folder, progress=False, title=kind, whole=False), self.worker)
        self.outcomes.append(outcomes[run.key])
        return measured_accuracy(outcomes[run.key])

    def _binarization(
        self, kind: str, recipe: Recipe, attack: Attack, module: nn.Module, detector: Detector | None
    ) -> dict[str, Any]:
        """What the binarization test makes of a recipe; why not, where it refuses the model as the authors ran it."""
        model: Any = self.study.parts(module)
        if recipe.train_mode:
            model = module.train()
        try:
            result = binarization_test(
                model,
                {kind: attack},
                self.data.inputs,
                self.threat_model,
                detector=detector,
                sample_ids=self.data.ids,
                out=None if self.folder is None else self.folder / kind,
                seed=self.seed,
                **{**self.study.settings, **recipe.settings},
                **self.isolation,
            )
        except InconsistentModelError as error:
            return {"refused": str(error)}
        finally:
            module.eval()
        self.parts.extend(parts_of(result.content))
        return {"refused": None, **binarization_entry(result.content)}
