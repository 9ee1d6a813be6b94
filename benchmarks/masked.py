"""Masked models and broken defenses: robust accuracy by AutoAttack, the best known one, and by `evaluate`.

    python benchmarks/masked.py --cache FOLDER --autoattack FOLDER [--data mnist --root FOLDER] [--held-out] [--write]

``--autoattack`` is a checkout of github.com/fra31/auto-attack; without it, torchattacks' copy runs. ``--cache`` keeps
weights and results; ``--again`` runs `evaluate` where it has a result. ``--write`` puts the table into
docs/evidence/masked.md. Every candidate is verified here, in all columns but the last. Costs are CPU seconds.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from masked_models import Masked, masked_models
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

import robust_ext
from robust_ext import RobustExtError
from robust_ext.attacks.running import run_attack
from robust_ext.core.random import seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.engine.verify import BROKEN, verify

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "masked.md"
NEAR = 0.02
STEPS, RESTARTS, RANDOM_RESTARTS = 100, 5, 2
# Predictions of a random model that choose a candidate, and fresh ones that state its share.
CHOOSING, STATED = 20, 100


class Worst:
    """The worst candidate of each sample, and the share of predictions that are right there.

    A random model is judged as `evaluate` judges it: some draws choose the candidate, and fresh ones state the share.
    """

    def __init__(self, masked: Masked, points: Tensor | None = None) -> None:
        self.masked = masked
        self.points, self.calls = masked.inputs.clone(), 0
        self.left = self.right(masked.inputs, masked.labels, CHOOSING)
        if points is not None:
            self.add(torch.arange(len(points)), points)

    def right(self, points: Tensor, labels: Tensor, draws: int) -> Tensor:
        """Return the share ``(n,)`` of predictions of points that are right, each time over other draws."""
        self.calls += 1
        with seeded_globals(self.calls), torch.no_grad():
            seen = [self.masked.module(points).argmax(1) == labels for _ in range(draws if self.masked.random else 1)]
        return torch.stack(seen).double().mean(0)

    @property
    def rows(self) -> Tensor:
        """The numbers of the samples that are not yet wrong at every draw."""
        return (self.left > 0).nonzero().squeeze(1)

    def add(self, rows: Tensor, candidates: Tensor) -> None:
        """Take in candidates for these samples."""
        x, y, ball = self.masked.inputs[rows], self.masked.labels[rows], self.masked.threat_model
        seen = verify(candidates, x, y, module=self.masked.module, threat_model=ball, attack="benchmark")
        valid = torch.tensor([outcome in (*BROKEN, "not_adversarial") for outcome in seen.outcomes])
        right = self.right(candidates, y, CHOOSING)
        better = valid & (right < self.left[rows])
        self.left[rows[better]], self.points[rows[better]] = right[better], candidates[better]

    def stated(self) -> dict[str, Any]:
        """Return the share of each sample over fresh draws, and the points."""
        with torch.no_grad():
            left = self.right(self.points, self.masked.labels, STATED)
        return {"left": left.tolist(), "points": self.points.tolist()}


def auto_attack_member(whole: Any, name: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the candidates of one of AutoAttack's members."""
    whole.attacks_to_run = [name]
    found: Tensor = whole.run_standard_evaluation(x, y, bs=250)
    return found


def auto_attack(masked: Masked, folder: str | None) -> dict[str, Any]:
    """Run AutoAttack, for random models its version for them, member by member; those that raise break nothing."""
    version, epsilon = "rand" if masked.random else "standard", masked.threat_model.epsilon
    members: dict[str, Callable[[Tensor, Tensor], Tensor]]
    if folder is None:
        from torchattacks import AutoAttack as Copy

        copy = Copy(masked.module, eps=epsilon, version=version, seed=0, n_classes=10)
        members = {type(one).__name__: one for one in copy._autoattack.attacks}
    else:
        sys.path.insert(0, folder)
        from autoattack import AutoAttack

        whole = AutoAttack(masked.module, eps=epsilon, version=version, seed=0, device="cpu", verbose=False)
        members = {name: partial(auto_attack_member, whole, name) for name in whole.attacks_to_run}
    worst, raised = Worst(masked), []
    for name, attack in members.items():
        if len(worst.rows):
            try:
                with seeded_globals(0), redirect_stdout(io.StringIO()):
                    found = attack(masked.inputs[worst.rows].clone(), masked.labels[worst.rows])
            except RuntimeError:
                raised.append(name)
            else:
                worst.add(worst.rows, found.detach())
    return {**worst.stated(), "raised": raised}


def losses(labels: Tensor, classes: int) -> list[Callable[[Tensor], Tensor]]:
    """Return what the adaptive attack raises: cross-entropy, the margin, and the logit of each other class."""
    own = one_hot(labels, classes).bool()

    def margin(logits: Tensor) -> Tensor:
        return logits.masked_fill(own, -torch.inf).amax(1) - logits[own]

    def aimed(shift: int) -> Callable[[Tensor], Tensor]:
        rows, other = torch.arange(len(labels)), (labels + shift) % classes
        return lambda logits: logits[rows, other] - logits[own]

    return [margin, lambda logits: cross_entropy(logits, labels, reduction="none"), *map(aimed, range(1, classes))]


def adaptive(masked: Masked, worst: Worst) -> None:
    """Ascend along gradients of the twin, and ask the masked model at each point, a random one at each tenth."""
    epsilon, every = masked.threat_model.epsilon, 10 if masked.random else 1
    restarts = RESTARTS if not masked.random else RANDOM_RESTARTS if masked.right is None else 1
    for number in range(restarts * 11):
        rows = worst.rows
        if not len(rows):
            break
        x, y = masked.inputs[rows], masked.labels[rows]
        loss = losses(y, 10)[number % 11]
        point = (x + epsilon * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
        for step in range(STEPS):
            slope = torch.zeros_like(x)
            for _ in range(masked.draws):
                at = (point + masked.blur * epsilon * torch.randn_like(x)).requires_grad_(True)
                slope += torch.autograd.grad(loss(masked.twin(at)).sum(), at)[0]
            size = epsilon / 4 * max(1 - step / STEPS, 0.05)
            point = (x + (point + size * slope.sign() - x).clamp(-epsilon, epsilon)).clamp(0, 1)
            if (step + 1) % every:
                continue
            worst.add(rows, point)
            held = worst.left[rows] > 0
            if not held.all():
                rows, x, y, point = rows[held], x[held], y[held], point[held]
                if not len(rows):
                    break
                loss = losses(y, 10)[number % 11]


def best_known(masked: Masked, points: Tensor) -> dict[str, Any]:
    """Run the adaptive attack and the attack that is known to work, if any, after the points of AutoAttack."""
    worst = Worst(masked, points)
    with seeded_globals(0):
        adaptive(masked, worst)
    if masked.right is not None and len(worst.rows):
        shape = tuple(masked.inputs.shape[1:])
        target = Target(
            module=masked.module, bounds=(0.0, 1.0), classes=10, input_shape=shape, device=masked.inputs.device
        )
        x, y = masked.inputs[worst.rows], masked.labels[worst.rows]
        given = {"threat_model": masked.threat_model, "generator": stream(0, "best known")}
        worst.add(worst.rows, run_attack(robust_ext.as_attack(masked.right), target, x, y, **given))
    return worst.stated()


def ours(masked: Masked, **settings: Any) -> dict[str, Any]:
    """Run the whole evaluation, again with the setup accepted where it stops; a refusal is its result."""
    given = masked.module, masked.inputs, masked.labels, masked.threat_model
    try:
        result = robust_ext.evaluate(*given, seed=0, **settings)
    except RobustExtError as error:
        return {"accuracy": None, "words": f"refused: {error}", "verdict": "refused"}
    if result.content["worst_case"] is None:
        accepted = ours(masked, accept_setup=True, **settings)
        return {**accepted, "verdict": f"stopped; with --accept-setup {accepted['verdict']}"}
    accuracy, words = result.robust_accuracy, result.headline
    return {"accuracy": accuracy, "words": words, "verdict": result.verdict, "content": result.content}


def kept(file: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file holds, made and written where it is missing."""
    if not file.exists():
        begun = time.process_time()
        made = make()
        file.write_text(json.dumps({**made, "seconds": time.process_time() - begun}, default=str))
    held: dict[str, Any] = json.loads(file.read_text())
    return held


def share(found: dict[str, Any]) -> float:
    """Return robust accuracy."""
    return float(np.mean(found["left"]))


def row(name: str, masked: Masked, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one model."""
    stem = f"{arguments.data}-{arguments.samples}-{name.replace(' ', '-')}"
    suite, points = None, masked.inputs
    if not arguments.held_out:
        suite = kept(arguments.cache / f"{stem}-aa.json", lambda: auto_attack(masked, arguments.autoattack))
        points = torch.tensor(suite["points"])
    best = kept(arguments.cache / f"{stem}-best.json", lambda: best_known(masked, points))
    known, mine = share(best), arguments.cache / f"{stem}-ours.json"
    if arguments.again:
        mine.unlink(missing_ok=True)
    chosen = {"budget": arguments.budget, "planted": arguments.planted}
    found = {"accuracy": None} if arguments.others else kept(mine, lambda: ours(masked, **chosen))
    return {
        "name": name,
        "clean": float(Worst(masked).left.mean()),
        "suite": None if suite is None else share(suite),
        "raised": [] if suite is None else suite["raised"],
        "best": known,
        "ours": found,
        "near": found["accuracy"] is not None and found["accuracy"] <= known + NEAR + 1e-9,
    }


def percent(share: float | None) -> str:
    """Return a share in per cent without decimals; a dash where there is none."""
    return "-" if share is None else f"{100 * share:.0f}"


def line(one: dict[str, Any]) -> str:
    """Return a row of the table."""
    raised = f" ({', '.join(one['raised'])} raised)" if one["raised"] else ""
    found, shown = one["ours"], [percent(one[key]) for key in ("clean", "suite", "best")]
    mine = percent(found["accuracy"])
    cells = [one["name"], shown[0], shown[1] + raised, shown[2], mine, "yes" if one["near"] else "**no**"]
    return "| " + " | ".join([*cells, found.get("verdict", ""), f"{found.get('seconds', 0):.0f}"]) + " |"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the counts as text."""
    near, passed = (
        [one for one in rows if one["near"]],
        [one for one in rows if one["ours"].get("verdict", "").endswith("passed")],
    )
    both = sum(one in near for one in passed)
    wrong = len(passed) - both
    off = [one["suite"] > one["best"] + NEAR + 1e-9 for one in rows if one["suite"] is not None]
    return (
        f"Ours is within {100 * NEAR:.0f} points of the best known on {len(near)} of {len(rows)}; {both} of those are "
        f"certified, and {wrong} certified ones are not within."
        + (f" AutoAttack is not within on {sum(off)}." if off else "")
    )


def main() -> None:
    """Run all and print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", choices=("digits", "mnist"), default="digits")
    options.add_argument("--root", help="folder with MNIST")
    options.add_argument("--samples", type=int, default=64)
    options.add_argument("--cache", type=Path, required=True, help="folder for weights and results")
    options.add_argument("--autoattack", help="checkout of github.com/fra31/auto-attack")
    options.add_argument("--budget", default="standard", help="budget of `evaluate`")
    options.add_argument("--planted", type=int, default=64, help="samples of the certificate; 0 for none")
    options.add_argument("--only", default="", help="regular expression of the names of the models")
    options.add_argument("--held-out", action="store_true", help="the masks that nothing was developed on, alone")
    options.add_argument("--again", action="store_true", help="run `evaluate` again where it has a result")
    options.add_argument("--others", action="store_true", help="run only what others find")
    options.add_argument("--write", action="store_true", help="put the table into docs/evidence/masked.md")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    given = {"root": arguments.root, "samples": arguments.samples, "cache": arguments.cache, "only": arguments.only}
    given["held_out"] = arguments.held_out
    rows = []
    for name, masked in masked_models(arguments.data, **given).items():
        rows.append(row(name, masked, arguments))
        print(line(rows[-1]), rows[-1]["ours"].get("words", ""), flush=True)
    head = "| model | clean | AutoAttack | best known | ours | within 2 points | certificate | CPU s |"
    lines = [summary(rows), "", head, "|---" * 8 + "|", *map(line, rows)]
    print("\n".join(lines))
    if arguments.write:
        begin, end = (
            f"<!-- {word}: {'held out' if arguments.held_out else arguments.data} -->" for word in ("begin", "end")
        )
        before, rest = PAGE.read_text(encoding="utf-8").split(begin)
        text = "\n".join([before + begin, "", *lines, "", end]) + rest.split(end)[1]
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
