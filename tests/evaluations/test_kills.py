"""Runs survive SIGKILL at any moment: of the command, of the process an attack runs in, of either."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from robust_ext.cli import app as cli
from tests.evaluations.small import NETWORK, sign_step, timeless
from tests.run_folders import records_of

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]
# Each process is forked from this one, which has imported what they need: the imports take longer than the runs.
PROCESSES = multiprocessing.get_context("fork")
STEP, SUBJECTS, NET = f"{__file__}:step", Path(__file__).with_name("subjects.py"), Path(__file__).with_name("small.py")
FEW = "--inner-points 30 --random-inner 10 --random-corners 10 --witness-steps 4 --witness-queries 8"
TRAINED = "--train-data TRAIN --train-samples 10 --calibration-samples 20"
COMMANDS = {
    "binarization": f"--attack {STEP} {FEW}",
    "robust-accuracy": f"--attack {STEP}",
    "evaluate": "--budget quick --planted 8",
    "test-time": f"--defense {SUBJECTS}:rounded --steps 2 --queries 3",
    "mead": f"--detector {SUBJECTS}:spread {TRAINED} --allow-code --resamples 0 "
    f"--arm linf:0.1={STEP} --arm linf:0.2={STEP}",
}


def step(model, x, y, threat_model):
    time.sleep(0.02)
    return sign_step(model, x, y, threat_model)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The data, and for each command what an undisturbed run leaves."""
    folder, draw, undisturbed = tmp_path_factory.mktemp("kills"), np.random.default_rng(0), {}
    for name, count in (("data", 24), ("train", 40)):
        x = draw.random((count, 4, 4))
        # Labels that a setup check takes for the network's own.
        y = NETWORK(torch.from_numpy(x).float()).argmax(1).numpy()
        np.savez(folder / f"{name}.npz", x=x, y=y)

    def expected(*words):
        if words not in undisturbed:
            out = folder / "-".join(words)
            finish(start(folder, words[0], out, *words[1:]))
            undisturbed[words] = essence(out)
        return undisturbed[words]

    return folder, expected


def start(folder, command, out, *extra):
    given = ["--model", f"{NET}:make_network", "--data", str(folder / "data.npz"), "--samples", "24"]
    given += ["--batch-size", "4", "--no-progress", "--out", str(out), *extra]
    given += [] if command == "robust-accuracy" else ["--judge-seed", "1"]
    given += [] if command == "mead" else ["--eps", "0.1"]
    words = COMMANDS[command].replace("TRAIN", str(folder / "train.npz")).split()
    with pytest.MonkeyPatch.context() as patched:
        # A child takes over the command line that there is when it starts.
        patched.setattr(sys, "argv", ["robust-ext", command, *given, *words])
        process = PROCESSES.Process(target=main)
        process.start()
    return process


def main():
    warnings.simplefilter("ignore")
    cli.main()


def finish(process):
    process.join(timeout=300)
    assert process.exitcode == 0


def essence(out):
    """All records of a run, and its result without times."""
    return records_of(out), timeless(json.loads((out / "result.json").read_text()))


def children(process):
    """Ids of a process's children."""
    try:
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def kill_once(process, out, draw, victim):
    """Kill a process at a random moment after something new was written; whether it was still there."""

    def written():
        return sum(file.stat().st_size for file in out.rglob("*.jsonl")) if out.exists() else 0

    before = written()
    while process.is_alive() and written() == before:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.1))
    while process.is_alive():
        # Attacks run in children of the process that was started for them.
        workers = [one for child in children(process.pid) for one in children(child)]
        for found in [process.pid] if victim == "command" else workers:
            os.kill(found, signal.SIGKILL)
            if victim == "command":
                process.join()
            return True
    return False


def survive(files, out, command, *extra, kills, victim):
    """Run a command until it was killed so often, and then to its end."""
    (folder, expected), draw, done = files, random.Random(0), 0
    process = start(folder, command, out, *extra)
    while done < kills:
        if not process.is_alive():
            # A process that is killed while it loads the attack ends the command, with an error that says so.
            assert process.exitcode in ((0, 2) if victim == "worker" else (0, -signal.SIGKILL))
            if process.exitcode == 0:  # It was through: once more from an empty folder.
                out = out.with_name(f"{out.name}-{done}")
            process = start(folder, command, out, *extra)
        done += kill_once(process, out, draw, victim)
    process.join()
    # What was lost with an attack's process is run again, like what is damaged.
    finish(start(folder, command, out, "--repair", *extra))
    assert not list(out.rglob(".*.tmp"))
    assert essence(out) == expected(command, *extra)


QUICK = ("robust-accuracy", "mead")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=() if one in QUICK else pytest.mark.exhaustive) for one in COMMANDS]
)
def test_kills_of_the_command(files, tmp_path, command):
    survive(files, tmp_path / "run", command, "--in-process", kills=2, victim="command")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("command", "victim"), [("binarization", "worker"), ("mead", "worker"), ("mead", "command")])
def test_a_kill_at_arms_length(files, tmp_path, command, victim):
    survive(files, tmp_path / "run", command, kills=1, victim=victim)


@pytest.mark.slow
def test_two_writers(files, tmp_path):
    """A second one is refused while the first one writes, and nothing is lost."""
    both = [start(files[0], "robust-accuracy", tmp_path / "run", "--in-process") for _ in range(2)]
    for process in both:
        process.join(timeout=300)
    assert sorted(process.exitcode for process in both) in ([0, 0], [0, 2])
    assert essence(tmp_path / "run") == files[1]("robust-accuracy", "--in-process")
