"""Robust accuracy as one function."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from robust_ext.core.settings import make_settings
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.inputs import as_attacks, prepare_inputs
from robust_ext.engine.run import run_all
from robust_ext.engine.task import drive
from robust_ext.evaluations.arm_runs import plan_clean, plan_runs
from robust_ext.evaluations.arms import Arm, check_arms
from robust_ext.evaluations.robust_accuracy.content import make_content
from robust_ext.evaluations.robust_accuracy.options import RobustAccuracyOptions
from robust_ext.evaluations.robust_accuracy.result import RobustAccuracyResult
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings


def robust_accuracy(
    model: object,
    attacks: object,
    inputs: Tensor,
    labels: Tensor,
    threat_model: ThreatModel,
    *,
    sample_ids: Sequence[int] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
    settings: RobustAccuracySettings | None = None,
    **options: Unpack[RobustAccuracyOptions],
) -> RobustAccuracyResult:
    """Robust accuracy of a model at one or several budgets, under each attack and under all of them.

    Attacks that look for the smallest perturbation are run once, the others once for each budget. Every candidate is
    verified. What an attack found with a smaller budget counts for larger ones too, and samples that are misclassified
    as they are count as not robust at any budget.

    Args:
        model: A torch module from inputs in bounds to logits, in eval mode; a Foolbox model; an ART
            ``PyTorchClassifier``.
        attacks: Anything :func:`robust_ext.as_attack` takes, a list of such, or a dict of them by name.
        inputs: Clean samples, float ``(N, ...)`` in bounds.
        labels: Their classes, int64 ``(N,)``.
        threat_model: The norm, epsilon and bounds.
        sample_ids: Ids of the samples, which with the seed decide every draw; ``0 .. N-1`` when left out.
        out: Run folder. With one, attacks survive a kill and the same call goes on; further attacks and budgets add to
            what is there. ``result.json`` and ``report.html`` are written there.
        progress: Show a progress bar on stderr.
        settings: All settings at once; the defaults when left out.
        **options: Single settings, see :class:`RobustAccuracySettings`.

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
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
        >>> x = torch.rand(8, 1, 4, 4)
        >>> threat_model = ThreatModel(norm="linf", epsilon=1e-6)
        >>> y = network(x).argmax(1)
        >>> result = robust_accuracy(network, "robust_ext:APGD(steps=10)", x, y, threat_model, epsilons=[1.0])
        >>> result.robust_accuracy(1e-6), result.content["clean_accuracy"]
        (1.0, 1.0)
    """
    begun = time.perf_counter()
    checked = make_settings(RobustAccuracySettings, options, base=settings)
    batch_size, seed = checked.batch_size, checked.seed
    given = prepare_inputs(
        model, inputs, labels, threat_model=threat_model, sample_ids=sample_ids, batch_size=batch_size
    )
    budgets = sorted({threat_model.epsilon, *(checked.epsilons or ())})
    named = as_attacks(attacks)
    arms = check_arms(
        Arm(attack=attack, norm=threat_model.norm, epsilon=epsilon, label=name)
        for name, attack in named.items()
        for epsilon in budgets
    )
    runs = plan_runs(arms, plan_clean(given, batch_size=batch_size, seed=seed))
    for run in runs:
        run.attack.check(threat_model=run.threat_model)
    outcomes = drive(run_all(runs, out=out, progress=progress, title="robust accuracy"))
    if outcomes is None:
        return RobustAccuracyResult({})
    content = make_content(list(outcomes.values()), list(named), budgets, total=time.perf_counter() - begun)
    result = RobustAccuracyResult(content)
    if out is not None:
        result.save(out)
    return result
