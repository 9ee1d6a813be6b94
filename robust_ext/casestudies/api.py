"""The case studies as one function: training, measuring, judging."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from robust_ext.casestudies.base import CASE_STUDIES, CaseStudy, M, Trained, load_case_study
from robust_ext.casestudies.recipes import RecipeRun, measured_accuracy, plan_recipe
from robust_ext.casestudies.result import CaseStudyResult, flagged_by, refused_entry, tested_entry
from robust_ext.core.cost import Spent
from robust_ext.core.devices import check_device
from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError
from robust_ext.core.files import make_folder
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.validation import check_choice, check_integer
from robust_ext.datasets import load_dataset
from robust_ext.detectors.base import Detector
from robust_ext.engine.code_digest import module_code
from robust_ext.engine.evaluation_file import as_folder, begin_evaluation
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import versions
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.progress import Progress, showing
from robust_ext.engine.run import Outcome
from robust_ext.engine.running import attack_worker, run_all
from robust_ext.engine.task import Worker, drive
from robust_ext.evaluations.binarization import binarization_test
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.caveats import Part, parts_of, time_table
from robust_ext.evaluations.detectors import calibrate_detector
from robust_ext.registry.attack import as_attack

# Clean false-positive rate of detectors, and clean test inputs to calibrate them on, in addition to the samples.
_RATE, _CALIBRATION = 0.05, 300


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
        names: Names in :data:`CASE_STUDIES`; all of them by default.
        data: ``"digits"``, ``"mnist"`` or ``"cifar10"``.
        data_root: Folder with the data's files.
        samples: Number of test images, for robust accuracy and for the binarization test.
        images: Greatest number of training images.
        seed: Seed of every draw.
        out: Run folder for trained weights and results, with a folder for each study; resumes a killed run.
        isolate: Run each attack in its own process, see docs/threats.md.
        attack_timeout: Greatest number of seconds for the attack on a batch, with ``isolate``; None for no limit.
        executor: Executor that runs the blocks, see docs/clusters.md; this process by default.
        devices: Devices of its workers; that of this process by default.
        device: Device to judge recipes on; by default the CPU, on which defenses are always trained.
        progress: Show a progress bar on stderr.
        callbacks: Callbacks for records and the result, see :class:`robust_ext.Callback`.

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
    folder, begun = as_folder(out), time.perf_counter()
    studies = {name: load_case_study(name) for name in chosen}
    for study in studies.values():
        study.threat_model(data)
    asked = {"data": data, "samples": samples, "images": images, "seed": seed}
    begin_evaluation(folder, "case studies", holds={name: name for name in chosen}, settings=asked)
    workers = attack_worker(isolate=isolate, attack_timeout=attack_timeout, executor=executor, devices=devices)
    isolation = {"isolate": isolate, "attack_timeout": attack_timeout}
    with workers as worker, listening(callbacks) as tell:
        with showing("case studies", shown=progress, total=4 * len(chosen)) as bar:
            judge = _Judge(data=given, device=where, seed=seed, worker=worker, isolation=isolation, bar=bar)
            entries = [judge.entry(name, study, folder and folder / name) for name, study in studies.items()]
        content = {
            "kind": "case_studies",
            "studies": entries,
            "flagged": sum(
                one["recipes"]["weak"]["flagged_by"] is not None and one["mechanism"]["present"] for one in entries
            ),
            "passed": sum(one["recipes"]["right"]["verdict"] == "passed" for one in entries),
            "samples": samples,
            "settings": {"data": data, "images": len(given.train_inputs)},
            "versions": versions(),
            "seed": seed,
            "time": time_table(judge.outcomes, begun=begun, others=judge.parts),
        }
        return tell(CaseStudyResult(content).saved(folder))


@dataclass(frozen=True, kw_only=True)
class CaseData:
    """Images and labels of a dataset, float32 ``(N, ...)`` in [0, 1] and int64 ``(N,)``."""

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    inputs: Tensor
    labels: Tensor
    ids: list[int]
    calibration: Tensor  # Clean inputs that are neither trained on nor attacked


def load_case_data(name: str, *, root: str | os.PathLike[str] | None, samples: int, images: int, seed: int) -> CaseData:
    """Load training images, test samples and others to calibrate on, the first ones in the seed's order.

    Raises InvalidArgumentError if the test images are too few for the samples.
    """
    train, test = (load_dataset(name, root=root, split=split) for split in ("train", "test"))
    count = min(samples + _CALIBRATION, len(test))
    if count <= samples:
        raise InvalidArgumentError("samples", samples, f"less than the {len(test)} test images of {name}")
    rows = test.choose(count, seed=seed)
    inputs, labels = test.take(rows)
    train_inputs, train_labels = train.take(train.choose(min(images, len(train)), seed=seed))
    return CaseData(
        name=name,
        train_inputs=train_inputs,
        train_labels=train_labels,
        inputs=inputs[:samples],
        labels=labels[:samples],
        ids=[int(row) for row in rows[:samples]],
        calibration=inputs[samples:],
    )


def trained_defense(study: CaseStudy[M], data: CaseData, *, seed: int, folder: Path | None) -> M:
    """Load the defense from ``weights.safetensors`` in a folder, or train it and save it there; return it in eval mode.

    Saved weights are used only if the same code trained them on the same images with the same seed.
    """
    if folder is None:
        return study.trained(data.train_inputs, data.train_labels, seed=seed)
    file = folder / "weights.safetensors"
    module = study.build(tuple(data.train_inputs.shape[1:]), int(data.train_labels.max()) + 1).eval()
    about = {
        "study": study.title,
        "data": data.name,
        "images": str(len(data.train_inputs)),
        "seed": str(seed),
        "code": json.dumps(module_code(module), sort_keys=True),
        "torch": torch.__version__,
    }
    if file.exists():
        with safe_open(str(file), framework="pt") as kept:
            if kept.metadata() == about:
                module.load_state_dict({name: kept.get_tensor(name) for name in kept.keys()})  # noqa: SIM118
                return module
    module = study.trained(data.train_inputs, data.train_labels, seed=seed)
    make_folder(folder)
    draft = file.with_suffix(".draft")
    save_file({name: tensor.contiguous().clone() for name, tensor in module.state_dict().items()}, draft, about)
    draft.replace(file)
    return module


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """The work on one case study after another, and the time that it took."""

    data: CaseData
    device: torch.device
    seed: int
    worker: Worker
    isolation: Mapping[str, Any]
    bar: Progress | None
    outcomes: list[Outcome[RecipeRun]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def entry(self, name: str, study: CaseStudy[Any], folder: Path | None) -> dict[str, Any]:
        """Train a defense, measure its mechanism, judge both recipes; return the entry of ``result.json``."""
        data, seed, begun, threat_model = self.data, self.seed, time.perf_counter(), study.threat_model(self.data.name)
        self._show(f"{study.title}: training")
        module = trained_defense(study, data, seed=seed, folder=folder)
        self.parts.append(Part("training", None, Spent(seconds=time.perf_counter() - begun)))
        self._show(f"{study.title}: mechanism", done=1)
        case = Trained(module=module, inputs=data.inputs, labels=data.labels, threat_model=threat_model, seed=seed)
        measurement = study.measure(case)
        detector, judged = self._detector(study, case), study.judged(module, seed=seed)
        for part in (module, judged, detector):
            if part is not None:
                part.to(self.device)
        inputs, labels = data.inputs.to(self.device), data.labels.to(self.device)
        with torch.no_grad():
            logits = judged(inputs)
        given = EvaluationInputs(
            module=judged, inputs=inputs, labels=labels, logits=logits, ids=data.ids, threat_model=threat_model
        )
        recipes = {}
        for kind, recipe in (("weak", study.weak), ("right", study.right)):
            self._show(f"{study.title}: {kind} recipe", done=1)
            attack = as_attack(recipe.attack, name=kind)
            run = plan_recipe(recipe, attack, given, module, detector, seed=seed)
            outcomes = drive(run_all([run], out=folder, progress=False, title=kind, whole=False), self.worker)
            self.outcomes.append(outcomes[run.key])
            model = module.train() if recipe.train_mode else study.parts(module)
            settings = {**study.settings, **self.isolation, "detector": detector, "sample_ids": data.ids, "seed": seed}
            try:
                out = folder and folder / kind
                result = binarization_test(model, {kind: attack}, data.inputs, threat_model, out=out, **settings)
                self.parts.extend(parts_of(result.content))
                entry = tested_entry(result.content)
            except InconsistentModelError as error:
                entry = refused_entry(str(error))
            module.eval()
            recipes[kind] = {
                "attack": attack.description,
                "words": recipe.words,
                "robust_accuracy": measured_accuracy(outcomes[run.key]),
                **entry,
                "flagged_by": flagged_by(entry, study.causes),
            }
        self._show(f"{study.title}: done", done=1)
        return {
            "name": name,
            "title": study.title,
            "source": study.source,
            "notes": study.notes,
            "epsilon": threat_model.epsilon,
            "clean_accuracy": float(given.correct.mean()),
            "mechanism": asdict(measurement),
            "published": {**asdict(study.published), "source": study.published_in},
            "causes": list(study.causes),
            "recipes": recipes,
            "seconds": time.perf_counter() - begun,
        }

    def _show(self, step: str, *, done: int = 0) -> None:
        if self.bar is not None:
            self.bar.advance(done)
            self.bar.phase(step)

    def _detector(self, study: CaseStudy[Any], case: Trained[Any]) -> Detector | None:
        """Return the detector, with a threshold at the clean false-positive rate of the paper."""
        data, seed, bounds = self.data, self.seed, case.threat_model.bounds
        with seeded_globals(derive_seed(seed, study.title, "detector")):
            found = study.detector(case.module, data.train_inputs, data.train_labels, seed=seed)
        if found is not None:
            calibrate_detector(found, data.calibration, false_positive_rate=_RATE, bounds=bounds, seed=seed)
        return found
