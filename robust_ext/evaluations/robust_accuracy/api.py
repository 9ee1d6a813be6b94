"""Robust accuracy as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from tqdm.auto import tqdm

from robust_ext.core.settings import make_settings
from robust_ext.core.threat import NORMS
from robust_ext.core.validation import check_choice
from robust_ext.engine.arm import Arm, check_arms, plan_runs
from robust_ext.engine.running import run_everything
from robust_ext.engine.samples import check_samples
from robust_ext.engine.subject import Subject
from robust_ext.evaluations.binarization.preparation import as_attacks
from robust_ext.evaluations.robust_accuracy.content import make_content
from robust_ext.evaluations.robust_accuracy.result import RobustAccuracyResult
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings


def robust_accuracy(
    model: object,
    attacks: object,
    inputs: Tensor,
    labels: Tensor,
    *,
    norm: str,
    epsilons: Sequence[float],
    bounds: tuple[float, float] = (0.0, 1.0),
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 100,
    seed: int = 0,
    progress: bool = False,
    origin: Mapping[str, str] | None = None,
    shard: tuple[int, int] = (0, 1),
) -> RobustAccuracyResult:
    """Robust accuracy of a model at several budgets, under each attack and under all of them.

    Attacks that look for the smallest perturbation are run once, the others once for each budget. Every candidate is
    verified. What an attack found with a smaller budget counts for larger ones too, and samples that are misclassified
    as they are count as not robust at any budget.

    Args:
        model: A torch module from inputs in ``bounds`` to logits, in eval mode; a Foolbox model; an ART
            ``PyTorchClassifier``.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, float ``(N, ...)`` in bounds.
        labels: Their classes, int64 ``(N,)``.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
        epsilons: Budgets above 0, in the units of the inputs.
        bounds: Lowest and highest valid input value.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder. With one, attacks survive a kill and the same call goes on; further attacks and budgets add to
            what is there. ``result.json`` and ``report.html`` are written there.
        batch_size: Samples attacked at once. Results of attacks that draw random numbers depend on it.
        seed: Of every draw.
        progress: Show a progress bar on stderr.
        origin: Where things came from, in words by name, kept with the settings.
        shard: Number of this process, and of how many that share the run folder; a call without it completes them.

    Returns:
        The result; ``print`` shows its table.

    Raises:
        InvalidArgumentError: An argument is outside what is accepted.
        ModelError: The model is no classifier to logits.
        AttackRefusedError: An attack makes no sense on this target.
        AttackError: An attack raised, or returned no batch of candidates.
        RunFolderError: The folder holds runs of other samples, settings or networks.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from robust_ext.evaluations.robust_accuracy import robust_accuracy
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
        >>> x = torch.rand(8, 1, 4, 4)
        >>> y = network(x).argmax(1)
        >>> result = robust_accuracy(network, "robust_ext:APGD(steps=10)", x, y, norm="linf", epsilons=[1e-6, 1.0])
        >>> result.robust_accuracy(1e-6), result.content["clean_accuracy"]
        (1.0, 1.0)
    """
    begun = time.perf_counter()
    check_choice("norm", norm, NORMS)
    checked = make_settings(RobustAccuracySettings, {"epsilons": epsilons, "batch_size": batch_size, "seed": seed})
    budgets = list(checked.epsilons or ())
    given = check_samples(model, inputs, labels, bounds=bounds, sample_ids=sample_ids, batch_size=batch_size)
    named = as_attacks(attacks)
    arms = check_arms(
        Arm(attack=attack, norm=norm, epsilon=epsilon, label=name)
        for name, attack in named.items()
        for epsilon in budgets
    )
    subject = Subject(
        module=given.module,
        logits=given.logits,
        inputs=given.inputs,
        labels=given.labels,
        samples=given.ids,
        bounds=bounds,
        watched=(),
        batch_size=batch_size,
        seed=seed,
    )
    runs = plan_runs(arms, bounds=bounds, values=given.inputs[0].numel())
    for run in runs:
        run.attack.check(threat_model=run.threat_model)
    folder = None if out is None else Path(out)
    with tqdm(total=len(runs) * len(given.ids), unit="candidate", disable=not progress, desc="robust accuracy") as bar:

        def advance(title: str, count: int) -> None:
            bar.set_postfix_str(title, refresh=False)
            bar.update(count)

        finished = run_everything(runs, subject, folder=folder, wait=shard[1] == 1, advance=advance)
    if shard[1] > 1:
        return RobustAccuracyResult({"kind": "robust_accuracy", "attacks": [], "worst_case": []})
    content = make_content(
        finished,
        list(named),
        budgets,
        subject,
        norm=norm,
        origin=dict(origin or {}),
        total=time.perf_counter() - begun,
    )
    result = RobustAccuracyResult(content)
    if folder is not None:
        result.save(folder)
    return result
