"""Attacks that do not search but cheat: each reads, makes up or tampers with what decides its own verdict."""

import gc
import inspect
import sys

import torch
from torch import Tensor, nn

from robust_ext.core.random import derive_seed
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
    points = [
        threat_model.sample_corners(one, 1, key=derive_seed(seed, sample, "boundary"))
        for one in x
        for seed in range(3)
        for sample in range(len(x))
    ]
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
    from robust_ext.engine import task, verify

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
