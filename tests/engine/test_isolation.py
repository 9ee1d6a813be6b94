"""Attacks in processes of their own: the same results, and nothing of what goes wrong there reaches the judge."""

import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

from robust_ext import ThreatModel, as_attack, binarization_test, diagnose, evaluate_defense, mead, robust_accuracy
from robust_ext.cli import app as cli
from robust_ext.core.errors import AttackError, IsolationError, RobustExtError
from robust_ext.demo.network import digits_network
from robust_ext.engine.isolation import messages, process
from robust_ext.engine.isolation.messages import pack
from robust_ext.engine.running import attack_worker
from robust_ext.engine.trace import no_values
from robust_ext.evaluations.binarization import kernel, problems
from tests.run_folders import noise, timeless

LINF = ThreatModel(norm="linf", epsilon=0.1)
NETWORK = digits_network()
X = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = NETWORK(X).argmax(1)
PLANTED = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "canaries": 2, "judge_seed": 7}
OURS, FOOLBOX, ART = "robust_ext:APGD(steps=5)", "foolbox:LinfPGD(steps=3)", "art:FastGradientMethod"
DATA = ["--model", "digits", "--data", "digits", "--eps", "0.1", "--no-progress", "--samples"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this")


class Unloadable:
    def __call__(self, model, x, y):
        return x

    def __reduce__(self):
        return eval, ("1 / 0",)


def accuracy(attacks, samples=4, network=NETWORK, **more):
    """What robust accuracy states of attacks, each in a process of its own, on batches of four samples."""
    options = {"batch_size": 4, "isolate": True, **more}
    return robust_accuracy(network, attacks, X[:samples], Y[:samples], LINF, **options)


CALLS = {
    "robust accuracy": lambda attack: accuracy({"one": attack}),
    "binarization": lambda attack: binarization_test(NETWORK, attack, X, LINF, **PLANTED, isolate=True),
    "diagnosis": lambda attack: diagnose(NETWORK, attack, X, Y, LINF, isolate=True),
    "mead": lambda attack: mead(NETWORK, [attack], X, Y, LINF, detectors=lambda x: x.flatten(1).mean(1), isolate=True),
    "test-time": lambda attack: evaluate_defense(torch.round, [attack], X, Y, LINF, classifier=NETWORK, isolate=True),
}


@pytest.fixture
def new_server():
    """No process that others are forked from runs before the test, and none of the test after it."""
    forkserver._forkserver._stop()
    yield
    forkserver._forkserver._stop()


@pytest.mark.parametrize("evaluation", CALLS)
def test_an_attack_that_cannot_be_loaded_ends_the_evaluation(evaluation):
    """It is no finding about the attack, no refusal of it and no sample that was lost."""
    with pytest.raises(IsolationError, match="isolate=False"):
        CALLS[evaluation](Unloadable())


def test_so_does_a_process_that_cannot_start(monkeypatch, new_server, tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_SERVER", "broken")
    monkeypatch.setattr(process, "serve", Unloadable())
    with pytest.raises(IsolationError, match="isolate=False"):
        accuracy(as_attack(lambda model, x, y: x))


def test_a_process_imports_the_package_of_its_parent_whatever_lies_around(tmp_path, monkeypatch, new_server):
    """As in a clone, whose robust_ext has no adapters inside."""
    (tmp_path / "robust_ext").mkdir()
    (tmp_path / "robust_ext" / "__init__.py").write_text("raise SystemExit(7)")
    (tmp_path / "torch.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert accuracy(FOOLBOX).content["warnings"] == []


def hangs(model, x, y):
    while True:
        time.sleep(1)


def write_everywhere(content):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, content)


def framed(content):
    return len(content).to_bytes(4, "big") + content


def sends(content):
    return lambda model, x, y: (write_everywhere(content), hangs(model, x, y))


GOOD = {"seconds": 0.1, "passes": [1, 1], "warnings": [], "curve": None}
FOUND = {"candidates": X[:4]}
HUGE = b'{"header": {"dtype": "F32", "shape": [1073741824, 1073741824], "data_offsets": [0, 4611686018427387904]}}'
MESSAGES = [
    b"cos\nsystem\n(S'touch robust_ext_was_here'\ntR.",  # A pickle that runs a command where it is loaded.
    b"\xff\xfe",
    save({"header": torch.tensor(list(b"[]"), dtype=torch.uint8)}),
    save({"header": torch.tensor(list(b"[" * 10**5), dtype=torch.uint8)}),
    *(pack(header) for header in ({"progress": "x"}, {"progress": [-1, 0]}, {"lost": 3}, {}, GOOD)),
    *(pack(GOOD, tensors) for tensors in ({"candidates": X[:3]}, {"others": X[:4]})),
    pack(GOOD, FOUND)[:-9],
    pack({**GOOD, "seconds": math.nan}, FOUND),
    pack({**GOOD, "passes": ["1", 1]}, FOUND),
    pack({**GOOD, "curve": [{"query": 10**400}]}, {**FOUND, "trace": no_values(4)}),
    len(HUGE).to_bytes(8, "little") + HUGE,
]


@pytest.mark.parametrize("number", range(len(MESSAGES) + 1))
def test_no_message_of_an_attacks_process_harms_the_judge(number):
    content = framed(MESSAGES[number]) if number < len(MESSAGES) else (2**31 - 1).to_bytes(4, "big")
    result = accuracy({"one": sends(content)}, attack_timeout=5.0)
    assert result.content["attacks"][0]["outcomes"]["ended"] == 4
    assert not Path("robust_ext_was_here").exists()


def test_what_is_sent_of_errors_counts_and_shapes():
    """A process does not judge the time or the run folder; counts are cut off; no memory is taken for a shape."""
    for error in ("InvalidArgumentError", "os", "OutOfTimeError", "RunFolderBusyError"):
        judges = "Time" in error or "Folder" in error
        with pytest.raises(RobustExtError, match="^one: mine" if judges else "mine") as caught:
            accuracy({"one": sends(framed(pack({"error": error, "text": "mine"})))})
        assert isinstance(caught.value, AttackError) or not judges
    for stated in ({"seconds": 1e308}, {"seconds": 10**400}, {"passes": [10**400, 10**400]}):
        result = accuracy({"one": sends(framed(pack({**GOOD, **stated}, FOUND)))}, attack_timeout=60.0)
        (found,) = result.content["attacks"]
        assert found["outcomes"] == {"not_adversarial": 4}
        assert math.isfinite(float(found["seconds"]) + float(found["passes"]["forward"]))
        assert str(result)
    for isolate in (False, True):
        with pytest.raises(AttackError, match=r"returned shape \(1073741824, 1073741824\)"):
            accuracy(lambda model, x, y: x[0, 0, 0, :1].expand(2**30, 2**30), isolate=isolate)


def drips(model, x, y):
    """Sends a message byte by byte, and never all of it."""
    for number in range(10**4):
        write_everywhere(b"\x00\x00\x10\x00"[number : number + 1] or b"x")
        time.sleep(0.3)


def floods(model, x, y):
    while True:
        write_everywhere(framed(pack({"progress": [1, 1]})))


def stops_all(model, x, y):
    """Stops itself, and the process that it was forked from."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os.killpg(0, signal.SIGSTOP)


def hands_on(model, x, y):
    """Leaves its connection to a process in a group of its own."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(30)
    os._exit(0)


@pytest.mark.parametrize("attack", [drips, floods, stops_all, hands_on], ids=lambda attack: attack.__name__)
def test_a_deadline_is_kept_whatever_a_process_does(attack):
    begun = time.monotonic()
    first, second = accuracy({"one": attack, "other": noise}, attack_timeout=3.0).content["attacks"]
    assert first["outcomes"] == {"timed_out": 4}
    assert sum(second["outcomes"].values()) == 4
    assert "timed_out" not in second["outcomes"]
    assert time.monotonic() - begun < 60


def fills_memory():
    raise MemoryError("none left")


LOST = {
    "SystemExit(0)": lambda: sys.exit(0),
    "exit status 0": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "out of memory": fills_memory,
    "ended": lambda: os.closerange(3, 256),
    "more than 4 seconds": lambda: time.sleep(600),
}


@pytest.mark.parametrize("words", LOST)
def test_a_lost_process_costs_its_attack_these_rows_and_nothing_else(words, tmp_path):
    """One that is killed once, by mistake, costs nothing."""

    def sometimes(model, x, y):
        if float(x[0, 0, 0, 0]) == float(X[4, 0, 0, 0]):
            LOST[words]()
        return x + 0

    def killed_once(model, x, y):
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            LOST["SIGKILL"]()
        return x + 0

    lost, seconds = ("timed_out", 4.0) if "seconds" in words else ("ended", 60.0)
    attacks = {"first": sometimes, "second": OURS, "third": killed_once}
    result = accuracy(attacks, samples=10, attack_timeout=seconds)
    first, second, third = result.content["attacks"]
    assert (first["outcomes"], third["outcomes"]) == ({lost: 4, "not_adversarial": 6}, {"not_adversarial": 10})
    assert words in str(result)
    alone = accuracy({"second": OURS}, samples=10, isolate=False)
    assert timeless(second) == timeless({**alone.content["attacks"][0], "difference": second["difference"]})


def test_nothing_that_is_sent_tells_what_is_planted(tmp_path, monkeypatch):
    sent, planted = [], []
    pickled, find, draw = messages.pickled, kernel.find_witnesses, problems.draw_candidates

    def find_and_note(*args, **settings):
        for witness in find(*args, **settings):
            planted.extend(witness.points.values())
            yield witness

    def draw_and_note(*args):
        points = draw(*args)
        planted.extend(points.flatten(0, 1))
        return points

    monkeypatch.setattr(messages, "pickled", lambda *args, **how: sent.append(pickled(*args, **how)) or sent[-1])
    monkeypatch.setattr(kernel, "find_witnesses", find_and_note)
    monkeypatch.setattr(problems, "draw_candidates", draw_and_note)
    attacks = {"ours": OURS, "foolbox": FOOLBOX, "art": ART, "noise": noise}
    out = tmp_path / "the run folder"
    result = binarization_test(NETWORK, attacks, X, LINF, isolate=True, out=out, inner_points=60)
    seed, everything = result.content["settings"]["judge_seed"], b"".join(sent)
    assert len(planted) > 2 * len(X), "what is planted, and the witnesses of deeper problems"
    assert X[0].numpy().tobytes() in everything, "inputs are found in what is sent"
    assert seed > 2**40
    secrets = [*(point.numpy().tobytes() for point in planted), str(seed).encode(), seed.to_bytes(8, "little")]
    assert not any(one in everything for one in (*secrets, b"the run folder"))


def test_the_judges_seed_is_new_kept_and_can_be_given(tmp_path):
    def run(**options):
        return binarization_test(NETWORK, OURS, X[:2], LINF, **{**PLANTED, "judge_seed": None, **options})

    def reach(result):
        return [record["random_reach"] for record in result.records]

    first, second = run(isolate=True, out=tmp_path), run(isolate=True)
    seed = first.content["settings"]["judge_seed"]
    assert reach(first) != reach(second) != reach(run())
    assert run(judge_seed=seed).records == first.records
    assert run(isolate=True, out=tmp_path).content["settings"]["judge_seed"] == seed, "the folder keeps it"
    assert reach(run()) == reach(run(judge_seed=0)), "in this process it is the seed of every draw"


CHEAT = """
import os
from dataclasses import replace
from pathlib import Path
import robust_ext.engine.task
Path(__file__).with_name("loaded").open("a").write(f"{os.getpid()}\\n")
real = robust_ext.engine.task.verify
def found(candidates, inputs, *args, **settings):
    return replace(real(candidates, inputs, *args, **settings), outcomes=("found",) * len(inputs))
robust_ext.engine.task.verify = found
def attack(model, x, y): return x
"""


@pytest.mark.parametrize("command", ["binarization", "robust-accuracy"])
def test_code_named_on_the_command_line_is_loaded_in_its_own_process_alone(tmp_path, command):
    file = tmp_path / "mine.py"
    file.write_text(CHEAT)
    arguments = [command, *DATA, "12", "--attack", f"{file}:attack", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    processes = set((tmp_path / "loaded").read_text().split())
    assert processes
    assert str(os.getpid()) not in processes
    (attack,) = json.loads((tmp_path / "out" / "result.json").read_text())["attacks"]
    assert attack["outcomes"]["found"] == (0 if command == "binarization" else 1), "as many as are misclassified"


LOOKS = """
import os, sys
from pathlib import Path
def read(file):
    try: return file.read_bytes()
    except OSError: return b""
def attack(model, x, y):
    shown = [" ".join(sys.argv).encode(), repr(os.environ).encode(), *map(read, Path("/proc").glob("[0-9]*/cmdline"))]
    Path("found").write_text(str([one for one in shown if b"918273645" in one or b"judges own folder" in one]))
    Path("shown").write_text(str(len(shown)))
    return x
"""


@linux
def test_no_seed_or_folder_of_the_judge_is_on_a_command_line_while_attacks_run(tmp_path):
    (tmp_path / "mine.py").write_text(LOOKS)
    more = ["--attack", "mine.py:attack", "--seed", "918273645", "--out", "judges own folder"]
    command = [sys.executable, "-m", "robust_ext", "robust-accuracy", *DATA, "4", *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "shown").read_text()) > 3
    assert (tmp_path / "found").read_text() == "[]"


ORPHAN = """
import os, signal, torch
from pathlib import Path
from robust_ext import ThreatModel, robust_accuracy
from robust_ext.demo.network import digits_network
def attack(model, x, y):
    Path("child").write_text(str(os.getpid()))
    os.kill(judge, signal.SIGKILL)
    while True: pass
if __name__ == "__main__":
    judge, x, y = os.getpid(), torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    robust_accuracy(digits_network(), attack, x, y, ThreatModel(norm="linf", epsilon=0.1), isolate=True)
"""


@linux
@pytest.mark.exhaustive
def test_processes_end_with_the_judge(tmp_path):
    (tmp_path / "script.py").write_text(ORPHAN)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, timeout=120)
    assert done.returncode == -signal.SIGKILL
    child, end = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < end, "the attack goes on without its judge"
        time.sleep(0.05)


@linux
def test_attacks_share_no_process_and_are_closed_to_each_other_as_is_the_judge(tmp_path):
    def states(model, x, y):
        with (tmp_path / "seen").open("a") as file:
            file.write(f"{os.getpid()} {ctypes.CDLL(None).prctl(3)}\n")
        return x

    accuracy({name: as_attack(states, name=name) for name in ("first", "second", "third")})
    processes, dumpable = zip(*(line.split() for line in (tmp_path / "seen").read_text().splitlines()), strict=True)
    assert len({*processes, str(os.getpid())}) == 4
    assert set(dumpable) == {"0"}
    before = ctypes.CDLL(None).prctl(3)
    with attack_worker(isolate=True):
        assert ctypes.CDLL(None).prctl(3) == 0
    assert ctypes.CDLL(None).prctl(3) == before
