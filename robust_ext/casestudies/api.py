"""The case studies as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from robust_ext.casestudies.base import CASE_STUDIES, load_case_study
from robust_ext.casestudies.judging import Judge
from robust_ext.casestudies.result import CaseStudyResult
from robust_ext.casestudies.training import load_case_data
from robust_ext.core.devices import check_device
from robust_ext.core.validation import check_choice, check_integer
from robust_ext.engine.evaluation_file import as_folder, begin_evaluation
from robust_ext.engine.executors import ExecutorLike
from robust_ext.engine.identity import versions
from robust_ext.engine.progress import showing
from robust_ext.engine.running import attack_worker
from robust_ext.evaluations.callbacks import Callback, listening
from robust_ext.evaluations.caveats import time_table


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
    chosen, begun = list(dict.fromkeys(names)) or list(CASE_STUDIES), time.perf_counter()
    for name in chosen:
        check_choice("names", name, tuple(CASE_STUDIES))
    check_integer("samples", samples, minimum=1)
    check_integer("images", images, minimum=100)
    where = torch.device("cpu") if device is None else check_device(device)
    given = load_case_data(data, root=data_root, samples=samples, images=images, seed=seed)
    studies, folder = {name: load_case_study(name) for name in chosen}, as_folder(out)
    for study in studies.values():
        study.threat_model(data)
    asked = {"data": data, "samples": samples, "images": images, "seed": seed}
    begin_evaluation(folder, "case studies", holds={name: name for name in chosen}, settings=asked)
    isolation = {"isolate": isolate, "attack_timeout": attack_timeout}
    workers = attack_worker(isolate=isolate, attack_timeout=attack_timeout, executor=executor, devices=devices)
    bars = showing("case studies", shown=progress, total=4 * len(chosen))
    with workers as worker, listening(callbacks) as tell, bars as bar:
        judge = Judge(data=given, device=where, seed=seed, worker=worker, isolation=isolation, bar=bar)
        entries = [judge.entry(name, study, folder and folder / name) for name, study in studies.items()]
        return tell(CaseStudyResult(_content(entries, judge, begun=begun)).saved(folder))


def _content(entries: Sequence[dict[str, Any]], judge: Judge, *, begun: float) -> dict[str, Any]:
    """Return what ``result.json`` holds; a flag counts where the mechanism is present."""
    seen = [one["recipes"]["weak"]["flagged_by"] is not None and one["mechanism"]["present"] for one in entries]
    return {
        "kind": "case_studies",
        "studies": entries,
        "flagged": sum(seen),
        "passed": sum(one["recipes"]["right"]["verdict"] == "passed" for one in entries),
        "samples": len(judge.data.ids),
        "settings": {"data": judge.data.name, "images": len(judge.data.train_inputs)},
        "versions": versions(),
        "seed": judge.seed,
        "time": time_table(judge.outcomes, begun=begun, others=judge.parts),
    }
