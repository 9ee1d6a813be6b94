"""Attacks that cheat or break things: none passes the binarization test, and nothing they change reaches the judge."""

import copy
import gc
import inspect
import random
import signal
import sys
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robust_ext import ThreatModel, binarization_test, robust_accuracy
from robust_ext.core.errors import (
    AttackError,
    AttackRefusedError,
    DisturbedError,
    OutOfTimeError,
    RobustExtWarning,
    RunFolderBusyError,
)
from robust_ext.core.random import derive_seed
from robust_ext.engine import task, verify
from robust_ext.engine.context import RunContext, run_context
from robust_ext.models.binarized import BinarizedClassifier


def tried(model, x, points, threat_model):
    """For each input the first of some points ``(n, ...)`` in its ball that the model puts into class 1."""
    out = x.clone()
    for row in range(len(x)):
        for point in points[threat_model.contains(points, x[row].expand_as(points))]:
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
        ours = type(one).__module__.startswith("robust_ext") and hasattr(one, "__dict__")
        for value in (one, *(vars(one).values() if ours else ())):
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
    kept = [value for part in model.modules() for name, value in vars(part).items() if name in ("last", "seen")]
    points = [one for value in kept for one in (value if isinstance(value, list) else [value])]
    return tried(model, x, shaped(points, x.shape[1:]), threat_model)


def regeneration(model, x, y, threat_model):
    keys = [derive_seed(seed, sample, "boundary") for seed in range(3) for sample in range(len(x))]
    points = [threat_model.sample_corners(one, 1, key=key) for one in x for key in keys]
    return tried(model, x, torch.cat(points), threat_model)


def flipped(logits):
    return torch.stack([torch.zeros(len(logits)), torch.ones(len(logits))], 1)


def planted(model):
    return next(part for part in model.modules() if isinstance(part, BinarizedClassifier))


def hook_on_the_target(model, x, y):
    model.register_forward_hook(lambda _module, _args, out: flipped(out))
    return x


def patched_forward(model, x, y):
    planted(model).forward = flipped
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
    kind = planted(model)
    return tried(model, x, shaped([kind, *kind.buffers()], x.shape[1:]), threat_model)


def anchor_inversion(model, x, y, threat_model):
    """Solves for the input whose features are the readout's origin."""
    kind = planted(model)
    linear = next(part for part in kind.features.modules() if isinstance(part, nn.Linear))
    flat = torch.linalg.pinv(linear.weight.double()) @ (kind.anchor.double() - linear.bias.double()).T
    return tried(model, x, flat.T.float().view_as(x), threat_model)


def data_attribute(model, x, y):
    for part in model.parameters():
        part.data.mul_(-50).sub_(3)
    return x


def replaced_parameter(model, x, y):
    for part in model.modules():
        for name, value in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(-50 * value.detach() - 3))
    return x


def weights_in_place(model, x, y):
    with torch.no_grad():
        for part in model.parameters():
            part.mul_(-50).sub_(3)
    return x


def buffer_swap(model, x, y):
    planted(model).threshold = planted(model).threshold - 1e6
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
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.hidden, self.head = nn.Linear(36, 80), nn.Linear(80, 3)

    def forward(self, x):
        return self.head(self.hidden((x.flatten(1) * 50).round() / 50))


class Keeping(Rounded):
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
    return binarization_test(model().eval(), attack, x, LINF, **{**few, **options})


@pytest.mark.exhaustive
def test_no_cheat_passes_at_arms_length_and_an_attack_after_them_is_judged_as_it_is_alone():
    options, name = {"model": Keeping, "isolate": True, "judge_seed": 3}, "robust_ext:Square(queries=200)"
    alone, after = (judged(attacks, **options) for attacks in (name, [*ALL, name]))
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


CLOSE = ThreatModel(norm="linf", epsilon=0.02)
PGD = "robust_ext:APGD(steps=5)"
X = torch.rand(24, 1, 4, 4, generator=torch.Generator().manual_seed(0))
SIGN = {"of all": 1}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))
        self.strength, self.config = 1.0, {"scale": 1}
        self.eval()

    def forward(self, x):
        return SIGN["of all"] * self.config["scale"] * self.body(self.strength * x)


class Unique(Network):
    def __deepcopy__(self, memo):
        raise TypeError("there is one")


Y = Network()(X).argmax(1)


def accuracy(network, attacks, batch_size=8):
    return robust_accuracy(network, attacks, X, Y, CLOSE, batch_size=batch_size)


def changing(change, *, fails=False):
    def attack(model, x, y):
        with torch.no_grad():
            change(model)
        if fails:
            raise ValueError("nothing to see here")
        return x

    return attack


# What is done to weights, and how it is found, is in tests/core/test_guard.py.
SEEN = {
    "in_place": lambda model: model.body[4].weight.neg_(),
    "hook": lambda model: model.register_forward_hook(lambda module, args, out: -out),
    "forward": lambda model: setattr(model, "forward", lambda x: -Network.forward(model, x)),
    "strength": lambda model: setattr(model, "strength", 0),
    "config": lambda model: model.config.update(scale=-1),
}
ENDS = [*((name, kind) for name in SEEN for kind in ("copy", "user's own", "without a copy")), ("in_place", "an error")]


@pytest.mark.parametrize(("name", "kind"), ENDS)
@pytest.mark.filterwarnings("ignore:.*Unique cannot be copied")
def test_a_disturbed_network_ends_the_evaluation_and_is_put_back(name, kind):
    network = Unique() if kind == "without a copy" else Network()
    before, alone = copy.deepcopy(network.state_dict()), accuracy(network, PGD).robust_accuracy(0.02)
    attack = changing(SEEN[name], fails=kind == "an error")
    if kind == "user's own":
        attack = changing(lambda model: SEEN[name](network))
    with pytest.raises(AttackError if kind == "an error" else DisturbedError, match=r"^one: "):
        accuracy(network, {"one": attack, "pgd": PGD})
    assert accuracy(network, lambda model, x, y: x).robust_accuracy(0.02) == 1
    assert 0 < accuracy(network, PGD).robust_accuracy(0.02) == alone < 1
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])


def test_what_an_attack_leaves_changed_is_not_met_by_the_next():
    def changes(model):
        model.body[2].running_mean = torch.full((24,), 9.0)
        model.body[2]._buffers["running_var"] = torch.full((24,), 1e-6)
        model.train()(torch.rand(24, 1, 4, 4) * 5)
        random.seed(1)
        np.random.seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)

    def state():
        drawn = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        return *drawn, torch.get_default_dtype(), torch.get_num_threads()

    network, begun = Network(), state()
    before, alone = copy.deepcopy(network.state_dict()), accuracy(network, {"pgd": PGD})
    with pytest.warns(RobustExtWarning, match="^first left the default dtype, the number of threads changed, which"):
        both = accuracy(network, {"first": changing(changes), "pgd": PGD})
    assert both.robust_accuracy(0.02, attack="first") == 1
    assert 0 < both.robust_accuracy(0.02, attack="pgd") == alone.robust_accuracy(0.02) < 1
    assert state() == begun
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_global_that_the_model_reads_ends_the_evaluation():
    def flips(model, x, y):
        SIGN["of all"] = -1
        return x

    try:
        with pytest.raises(DisturbedError, match=r"^flips: .*Network behaves differently on 4 of 4 probe inputs"):
            accuracy(Network(), [flips, PGD])
    finally:
        SIGN["of all"] = 1


def test_the_planted_problem_is_attacked_on_a_copy_and_the_user_is_told_where_there_is_none():
    network, met = Network(), []

    def weakens(model, x, y):
        met.extend(part for part in model.modules() if isinstance(part, Network))
        met[0].strength = 0
        return x

    with pytest.raises(DisturbedError, match=r"^weakens: .* behaves differently on 4 of 4"):
        binarization_test(network, weakens, X, CLOSE, inner_points=20)
    assert network.strength == 1
    assert met
    assert network not in met
    with pytest.warns(RobustExtWarning, match=r"Unique cannot be copied \(TypeError: there is one\)") as warned:
        accuracy(Unique(), [PGD, "robust_ext:Square(queries=3)"])
    assert len(warned) == 1


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError


RAISED = {
    "tried to exit the process with status 0": SystemExit(0),
    "raised GeneratorExit": GeneratorExit(),
    "raised KeyboardInterrupt": KeyboardInterrupt(),
    "raised UnreadableError: its text cannot be read": UnreadableError(),
    # That the time is over is no attack's to say, nor that a folder is in use or that it is refused.
    "raised OutOfTimeError: the time is over": OutOfTimeError("the time is over"),
    "raised RunFolderBusyError: in use": RunFolderBusyError("in use"),
    "raised AttackRefusedError: not here": AttackRefusedError("not here"),
}


@pytest.mark.parametrize("words", RAISED)
def test_whatever_an_attack_raises_is_its_own_error(words):
    def raises(model, x, y):
        raise RAISED[words]

    for given in ({"raises": raises, "pgd": PGD}, [PGD, raises]):
        with pytest.raises(AttackError, match=f"^raises: {words}") as caught, run_context(RunContext(deadline=1e12)):
            accuracy(Network(), given)
        assert type(caught.value) is AttackError


@pytest.mark.parametrize("catches", [False, True])
def test_ctrl_c_of_the_user_ends_the_evaluation_also_where_the_attack_catches_it(catches):
    def interrupted(model, x, y):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not catches:
                raise
        return x

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        accuracy(Network(), interrupted)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_changed_threat_model_is_the_attack_s_own():
    def widens(model, x, y, threat_model):
        object.__setattr__(threat_model, "epsilon", 10.0)
        return torch.rand_like(x)

    assert accuracy(Network(), widens).robust_accuracy(0.02) == 1
