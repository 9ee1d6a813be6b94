"""What tests read of run folders and results, and an attack that draws."""

import torch

from robust_ext.engine.run_folder import RECORDS, SavedRun


def runs_of(folder):
    """The runs in a folder and in those in it, by place."""
    return {str(file.parent.relative_to(folder)): SavedRun(file.parent) for file in sorted(folder.rglob(RECORDS))}


def records_of(folder):
    """The records of each of them."""
    return {place: saved.records() for place, saved in runs_of(folder).items()}


def timeless(value):
    """What a part of a result holds beside times and where attacks ran."""
    if isinstance(value, dict):
        measured = ("isolated", "time")
        return {key: timeless(one) for key, one in value.items() if "seconds" not in key and key not in measured}
    return [timeless(one) for one in value] if isinstance(value, (list, tuple)) else value


def noise(model, x, y, generator):
    """An attack that draws from its generator, and asks the model once."""
    model(x)
    return (x + 0.1 * torch.rand(x.shape, generator=generator).sub(0.5)).clamp(0, 1)
