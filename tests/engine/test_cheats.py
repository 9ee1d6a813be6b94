"""No attack passes the binarization test by reading, making up or changing what decides about it.

Each of these does not search but cheats.
"""

import gc
import inspect
import sys
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from robust_ext import ThreatModel, binarization_test
from robust_ext.core.errors import DisturbedError
from robust_ext.core.random import derive_seed
from robust_ext.engine import task, verify
from robust_ext.models.binarized import BinarizedClassifier


def tried(model, x, points, threat_model):
    """For each input the first of some points ``(n, ...)`` in its ball that the model puts into class 1."""
    out = x.clone()
    with torch.no_grad():
        for row in range(len(x)):
            inside = points[threat_model.contains(points, x[row].expand_as(points))]
            for point in inside:
                batch = out.clone()
                batch[row] = point
                if model(batch)[row].argmax() == 1:
                    out = batch
                    break
    return out


def shaped(objects, shape):
    """All points ``(n, ...)`` in tensors among objects and their attributes, one level deep."""
    found = []
    for one in objects:
        inside = (
            vars(one).values() if type(one).__module__.startswith("robust_ext") and hasattr(one, "__dict__") else ()
        )
        for value in (one, *inside):
            if issubclass(type(value), Tensor) and value.shape[-len(shape) :] == shape and value.is_floating_point():
                found.append(value.detach().float().reshape(-1, *shape))
    return torch.cat(found) if found else torch.empty(0, *shape)


def stack_frames(model, x, y, threat_model):
    """Looks through every function that is being run, generators that wait included."""
    frame, waiting = sys._getframe(), []
    while frame is not None:
        waiting += frame.f_locals.values()
        frame = frame.f_back
    seen = []
    while waiting:
        one = waiting.pop()
        seen.append(one)
        if inspect.isgenerator(one) and one.gi_frame is not None:
            waiting += [one.gi_yieldfrom, *one.gi_frame.f_locals.values()]
    return tried(model, x, shaped(seen, x.shape[1:]), threat_model)


def garbage_collector(model, x, y, threat_model):
    kinds = [(one, type(one)) for one in gc.get_objects()]
    objects = [one for one, kind in kinds if issubclass(kind, Tensor) or "robust_ext" in str(kind.__module__)]
    return tried(model, x, shaped(objects, x.shape[1:]), threat_model)


def kept_inputs(model, x, y, threat_model):
    """Looks through what a model has kept of the inputs that it was shown."""
    kept = [value for part in model.modules() for name, value in vars(part).items() if name in ("last", "seen")]
    points = [one for value in kept for one in (value if isinstance(value, list) else [value])]
    return tried(model, x, shaped(points, x.shape[1:]), threat_model)


def regeneration(model, x, y, threat_model):
    keys = [derive_seed(seed, sample, "boundary") for seed in range(3) for sample in range(len(x))]
    points = [threat_model.sample_corners(one, 1, key=key) for one in x for key in keys]
    return tried(model, x, torch.cat(points), threat_model)


def flipped(logits):
    return torch.stack([torch.zeros(len(logits)), torch.ones(len(logits))], 1)


def hook_on_the_target(model, x, y):
    model.register_forward_hook(lambda _module, _args, out: flipped(out))
    return x


def patched_forward(model, x, y):
    for part in [model, *model.modules()]:
        if isinstance(part, BinarizedClassifier):
            part.forward = lambda x: flipped(x)
    return x


def patched_class(model, x, y):
    BinarizedClassifier.forward = lambda self, x: flipped(x)
    return x


def patched_verify(model, x, y):
    real = verify.verify

    def all_found(candidates, inputs, *args, **settings):
        found = real(candidates, inputs, *args, **settings)
        return verify.Verification(("found",) * len(inputs), found.distances * 0, found.candidates, found.logits)

    task.verify = verify.verify = all_found
    return x


def class_detected(model, x, y, threat_model):
    """Reads all that the readouts of the test hold, as points and as features."""
    kind = next(part for part in model.modules() if isinstance(part, BinarizedClassifier))
    points = shaped([kind, *kind.buffers()], x.shape[1:])
    return tried(model, x, points, threat_model)


def anchor_inversion(model, x, y, threat_model):
    """Solves for the input whose features are the readout's origin."""
    kind = next(part for part in model.modules() if isinstance(part, BinarizedClassifier))
    linear = next(part for part in kind.features.modules() if isinstance(part, nn.Linear))
    flat = torch.linalg.pinv(linear.weight.double()) @ (kind.anchor.double() - linear.bias.double()).T
    return tried(model, x, flat.T.float().view_as(x), threat_model)


def data_attribute(model, x, y):
    for part in model.parameters():
        part.data.mul_(-50).sub_(3)
    return x


def replaced_parameter(model, x, y):
    for part in model.modules():
        for name, value in list(part._parameters.items()):
            if value is not None:
                setattr(part, name, nn.Parameter(-50 * value.detach() - 3))
    return x


def weights_in_place(model, x, y):
    with torch.no_grad():
        for part in model.parameters():
            part.mul_(-50).sub_(3)
    return x


def buffer_swap(model, x, y):
    for part in model.modules():
        if isinstance(part, BinarizedClassifier):
            part.threshold = part.threshold - 1e6
    return x


class Lies(Tensor):
    """A tensor that is near everything and equal to nothing."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("ne", "__ne__", "le", "__le__", "isfinite", "all"):
            return torch.ones_like(out, dtype=torch.bool).as_subclass(Tensor)
        return out


def tensor_subclass(model, x, y):
    return (1 - x).as_subclass(Lies)


READING = [stack_frames, garbage_collector, kept_inputs, regeneration]
TAMPERING = [
    *(hook_on_the_target, patched_forward, data_attribute, replaced_parameter),
    *(weights_in_place, buffer_swap, tensor_subclass),
]
ALL = [*READING, *TAMPERING, patched_class, patched_verify, class_detected, anchor_inversion]
LINF = ThreatModel(norm="linf", epsilon=0.1)


class Rounded(nn.Module):
    """Features without a gradient, linear in the rounded input."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.hidden, self.head = nn.Linear(36, 80), nn.Linear(80, 3)

    def forward(self, x):
        return self.head(self.hidden((x.flatten(1) * 50).round() / 50))


class Keeping(Rounded):
    """The same, with all inputs kept."""

    def __init__(self):
        super().__init__()
        self.last, self.seen = None, []

    def forward(self, x):
        self.last = x.detach()
        self.seen.append(self.last)
        return super().forward(x)


def judged(attack, *, model=Rounded, **options):
    x = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    few = {"inner_points": 50, "planted_candidates": 1, "random_inner": 20, "random_corners": 20, "canaries": 0}
    options = {**few, **options}
    return binarization_test(model().eval(), attack, x, LINF, **options)


@pytest.mark.exhaustive
def test_no_cheat_passes_at_arms_length_and_an_attack_after_them_is_judged_as_it_is_alone():
    options = {"model": Keeping, "isolate": True, "judge_seed": 3}
    alone = judged("robust_ext:Square(queries=200)", **options)
    after = judged([*ALL, "robust_ext:Square(queries=200)"], **options)
    name = "robust_ext:Square(queries=200)"
    assert [r["attacks"][name] for r in after.records] == [r["attacks"][name] for r in alone.records]
    *cheating, _ = after.content["attacks"]
    assert [one["name"] for one in cheating] == [cheat.__name__ for cheat in ALL]
    for one in cheating:
        assert (one["verdict"], one["samples"], one["score"]) == ("failed", 12, 0), one["name"]


def test_the_same_cheats_work_where_nothing_keeps_them_away():
    """So the test above fails where an attack's process has what it should not have."""
    for one in judged(READING, model=Keeping).content["attacks"]:
        assert one["score"] == 1, one["name"]


def test_what_a_model_keeps_of_its_inputs_stays_with_the_judge():
    result = judged(kept_inputs, model=Keeping, isolate=True, judge_seed=3)
    assert result.content["attacks"][0]["score"] == 0


@cache
def untouched():
    """Records of an attack before any tampering."""
    return judged("robust_ext:APGD(steps=3)").records


@pytest.mark.parametrize("cheat", TAMPERING, ids=lambda cheat: cheat.__name__)
def test_tampering_with_the_model_in_this_process_does_not_reach_the_judge(cheat):
    """Tampering with classes and functions of the judge needs a process of its own."""
    before = untouched()
    if cheat in (patched_forward, buffer_swap, tensor_subclass):
        assert judged(cheat).content["attacks"][0]["score"] == 0
    else:
        with pytest.raises(DisturbedError, match=cheat.__name__):
            judged(cheat)
    assert judged("robust_ext:APGD(steps=3)").records == before, "nothing of it is left"
