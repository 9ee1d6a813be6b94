"""Time of an attack through its adapter, divided by calling its library directly on the same module.

    python benchmarks/adapters_overhead.py [--weights FILE --data-root FOLDER]

Both get the same binarized problems, with the network's weights frozen, and alternate in one process. The passes of
both are the same.
"""

from __future__ import annotations

import contextlib
import io
import warnings

import torch
from common import THREAT, load, parser, seconds

import robust_ext
from robust_ext.core.guard import frozen
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import split


def main() -> None:
    """Print one ratio an attack."""
    options = parser(__doc__)
    options.set_defaults(samples=16)
    options.add_argument("--rounds", type=int, default=8)
    arguments = options.parse_args()
    network, inputs = load(arguments)
    robust_ext.as_attack("foolbox:LinfPGD"), robust_ext.as_attack("art:FastGradientMethod")
    warnings.simplefilter("ignore")
    import foolbox
    from art.attacks.evasion import ProjectedGradientDescentPyTorch
    from art.estimators.classification import PyTorchClassifier

    settings = BinarizationSettings(threat_model=THREAT, inner_points=200)
    parts = split(network, inputs[:2])
    problems = fit(measure(Forward(parts.features, 64), inputs, range(len(inputs)), settings), parts.readout, settings)
    module = problems.classifier(parts.features, settings, batching="full")
    target = Target(
        module=module, bounds=(0.0, 1.0), classes=2, input_shape=tuple(inputs.shape[1:]), device=inputs.device
    )
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    epsilon = THREAT.epsilon

    def direct_foolbox() -> object:
        model = foolbox.PyTorchModel(module, bounds=(0, 1), device="cpu")
        return foolbox.attacks.LinfPGD(steps=40, rel_stepsize=0.1)(model, inputs, labels, epsilons=epsilon)

    def direct_art() -> object:
        classifier = PyTorchClassifier(
            module, loss=torch.nn.CrossEntropyLoss(), input_shape=(3, 32, 32), nb_classes=2, clip_values=(0, 1)
        )
        attack = ProjectedGradientDescentPyTorch(
            classifier, eps=epsilon, eps_step=epsilon / 10, max_iter=40, batch_size=len(inputs), verbose=False
        )
        return attack.generate(inputs.numpy(), labels.numpy())

    cases = [
        ("foolbox:LinfPGD(steps=40, rel_stepsize=0.1)", direct_foolbox),
        (f"art:ProjectedGradientDescentPyTorch(max_iter=40, eps_step={epsilon / 10})", direct_art),
    ]
    for text, direct in cases:
        attack = robust_ext.as_attack(text)

        def adapted(attack: robust_ext.attacks.Attack = attack) -> object:
            return attack.search(target, inputs, labels, threat_model=THREAT, generator=stream(0, 0))

        ours, theirs = [], []
        with frozen(module), contextlib.redirect_stdout(io.StringIO()):
            for _ in range(arguments.rounds + 1):
                theirs.append(seconds(direct))
                ours.append(seconds(adapted))
        # The first round warms up.
        print(f"{text.split('(')[0]:<42} adapter / library = {sum(ours[1:]) / sum(theirs[1:]):.3f}", flush=True)


if __name__ == "__main__":
    main()
