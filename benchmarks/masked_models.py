"""Models that hide their adversarial examples from attacks: masks on plain networks, six published defenses.

A mask sits on a network that a sound attack breaks at the threat model; in its twin the same weights stand without it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from masks import EPSILON, HELD_OUT, MASKS, Ensemble, Mask
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from robust_ext import ThreatModel
from robust_ext.casestudies.base import load_case_study
from robust_ext.casestudies.networks import Training
from robust_ext.casestudies.training import CaseData, load_case_data, trained_defense
from robust_ext.core.random import seeded_globals

DEFENSES = ("feature_scattering", "pcl", "mixup_inference", "empir", "ecoc", "mmc")
_TRAINING = Training(epochs=(15, 6))


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A model with test samples, and the way around what hides its adversarial examples.

    Args:
        module: The model to evaluate, from inputs ``(N, C, H, W)`` in [0, 1] to logits ``(N, 10)``.
        twin: A module whose gradients lead to the adversarial examples of ``module``.
        inputs: Test images.
        labels: Their classes.
        threat_model: Norm and budget.
        random: Whether ``module`` draws at each call.
        draws: Gradients of the twin to average for each step, each with its own draws and its own blur.
        blur: Width of the noise in front of the twin, as a share of epsilon.
        right: An attack that is known to work, as :func:`robust_ext.as_attack` takes it.
    """

    module: nn.Module
    twin: nn.Module
    inputs: Tensor
    labels: Tensor
    threat_model: ThreatModel
    random: bool = False
    draws: int = 1
    blur: float = 0.0
    right: object = None


def _trained(name: str, mask: Mask, data: CaseData, cache: Path | None) -> dict[str, Tensor]:
    """Return the weights of a mask's network, from the cache where they are there."""
    file = None if cache is None else cache / f"{data.name}-{name.replace(' ', '-')}.safetensors"
    if file is not None and file.exists():
        return load_file(file)
    with seeded_globals(0), torch.enable_grad():
        network = mask.build(tuple(data.inputs.shape[1:]), mask.trains)
        parts = [network.first, network.second] if isinstance(network, Ensemble) else [network]
        for seed, part in enumerate(parts):
            # Each member by itself: weights of a joint loss lean on one of them.
            def loss(x: Tensor, y: Tensor, part: nn.Module = part) -> Tensor:
                return F.cross_entropy(part(x), y)

            _TRAINING.run(part, data.train_inputs, data.train_labels, loss, seed=seed)
    weights = {key: value.contiguous() for key, value in network.state_dict().items()}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, file)
    return weights


def _masked(name: str, data: CaseData, cache: Path | None) -> Masked:
    mask, shape = {**MASKS, **HELD_OUT}[name], tuple(data.inputs.shape[1:])
    weights, made = _trained(name, mask, data, cache), []
    for faulty in (True, False):
        network = mask.build(shape, faulty).eval().requires_grad_(False)
        network.load_state_dict(weights)
        made.append(network)
    module, twin = made
    if mask.convert is not None:
        module, twin = mask.convert(twin, data.train_inputs, data.train_labels)
    return Masked(
        module=module,
        twin=module if mask.own else twin,
        inputs=data.inputs,
        labels=data.labels,
        threat_model=ThreatModel(norm="linf", epsilon=EPSILON),
        random=mask.random,
        draws=mask.draws,
        blur=mask.blur,
    )


def _defense(name: str, data: CaseData, cache: Path | None) -> Masked:
    study = load_case_study(name)
    module = trained_defense(study, data, seed=0, folder=cache and cache / f"{data.name}-{name}")
    module.requires_grad_(False)
    random = study.judged(module, seed=0) is not module
    return Masked(
        module=module,
        twin=module,
        inputs=data.inputs,
        labels=data.labels,
        threat_model=study.threat_model(data.name),
        random=random,
        draws=2 if random else 1,
        right=study.right.attack,
    )


def masked_models(
    data: str = "digits",
    *,
    root: str | None = None,
    samples: int = 64,
    cache: Path | None = None,
    only: str = "",
    held_out: bool = False,
) -> dict[str, Masked]:
    """Return the masked models and the published defenses by name, trained by a fixed seed.

    Args:
        data: ``"digits"`` or ``"mnist"``.
        root: Folder with the files of MNIST.
        samples: Number of test images.
        cache: Folder to keep weights in.
        only: A regular expression that the names of the models to make match.
        held_out: Whether to return the masks that nothing was developed on, alone.
    """
    given = load_case_data(data, root=root, samples=samples, images=5000, seed=0)
    if held_out:
        return {name: _masked(name, given, cache) for name in HELD_OUT if re.search(only, name)}
    made = {name: _masked(name, given, cache) for name in MASKS if re.search(only, name)}
    return {**made, **{name: _defense(name, given, cache) for name in DEFENSES if re.search(only, name)}}
