"""What it costs to record an attack's queries: PGD with 20 steps with the recorder, divided by the same without it.

    python benchmarks/recording.py [--weights FILE --data-root FOLDER] [--samples 64]

Both alternate; the least processor time of each counts, so that other work on the machine counts little. Candidates are
compared. The digits network is so small that any look at a query shows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from common import THREAT, load, parser, pgd
from torch import Tensor, nn

from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine import task as engine
from robust_ext.registry.attack import as_attack


class Nothing:
    """A recorder that records nothing."""

    def trace(self) -> None:
        """No trace."""


@contextlib.contextmanager
def unrecorded(*_: object) -> Iterator[Nothing]:
    """In place of the recorder."""
    yield Nothing()


def cost(network: nn.Module, inputs: Tensor, threat_model: ThreatModel, *, rounds: int) -> float:
    """Least processor time with the recorder, divided by that without it."""
    network.eval().requires_grad_(False)
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    task = engine.Task(
        attack=as_attack(pgd(20)),
        target=Target(
            module=network,
            bounds=threat_model.bounds,
            classes=10,
            input_shape=tuple(inputs.shape[1:]),
            device=inputs.device,
        ),
        inputs=inputs,
        labels=labels,
        threat_model=threat_model,
        stream=(0, "recording"),
    )

    def seconds(context: Callable[..., contextlib.AbstractContextManager[object]]) -> tuple[float, Tensor]:
        begun = time.process_time()
        with mock.patch.object(engine, "record_queries", context):
            result = engine.run_task(task)
        return time.process_time() - begun, torch.as_tensor(result.candidates)

    recorded = engine.record_queries
    seconds(recorded)
    least = {recorded: float("inf"), unrecorded: float("inf")}
    found = []
    for number in range(rounds):
        for context in (recorded, unrecorded) if number % 2 else (unrecorded, recorded):
            took, candidates = seconds(context)
            least[context] = min(took, least[context])
            found.append(candidates)
    assert all(torch.equal(one, found[0]) for one in found), "the candidates are the same"
    return least[recorded] / least[unrecorded]


def main() -> None:
    """Print one ratio a network."""
    options = parser(__doc__)
    options.set_defaults(samples=64)
    options.add_argument("--rounds", type=int, default=7)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    network, inputs = load(arguments)
    digits = load_dataset("digits")
    small = digits.take(digits.choose(arguments.samples, seed=0))[0]
    for name, model, rows, threat_model, rounds in (
        ("ResNet-20", network, inputs, THREAT, arguments.rounds),
        ("digits network", digits_network(), small, ThreatModel(norm="linf", epsilon=0.1), 10 * arguments.rounds),
    ):
        found = cost(model, rows, threat_model, rounds=rounds)
        print(f"{name:<16} PGD-20 on {len(rows)} samples: recorded / not recorded = {found:.3f}", flush=True)


if __name__ == "__main__":
    main()
