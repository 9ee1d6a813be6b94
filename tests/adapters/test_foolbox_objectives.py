import eagerpy as ep
import pytest
import torch

from robust_ext.adapters.foolbox.objectives import with_objective
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.registry import as_attack
from robust_ext.testing.networks import small_batch
from tests.adapters.hosts import EPSILONS, OBJECTIVES, EachNorm, foolbox, foolbox_model
from tests.adapters.hosts import foolbox_problem as problem
from tests.adapters.objectives_on_paper import EachBounds, EachName, Smooth, slopes_by_inputs

HOSTS = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD, "l1": foolbox.attacks.L1PGD}


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("name", OBJECTIVES[1:])
def test_aims_are_refused_but_for_cross_entropy(name, epsilon):
    _, model, x, y = problem()
    criterion = foolbox.criteria.TargetedMisclassification(y)
    for host in (foolbox.attacks.LinfPGD, foolbox.attacks.L2BasicIterativeAttack):
        attack = with_objective(host, name)()
        with pytest.raises(InvalidArgumentError, match=rf"criterion: got TargetedMisclassification.*'{name}'.*'ace'"):
            attack(model, x, criterion, epsilons=epsilon)


@pytest.mark.parametrize(
    "host",
    [
        foolbox.attacks.LinfPGD(),
        foolbox.attacks.L2PGD(steps=7, random_start=False),
        foolbox.attacks.L1PGD(steps=7),
        foolbox.attacks.LinfBasicIterativeAttack(),
        foolbox.attacks.LinfFastGradientAttack(),
        foolbox.attacks.L2AdamPGD(steps=5),
        foolbox.attacks.LinfMomentumIterativeFastGradientMethod(),
        foolbox.attacks.SparseL1DescentAttack(quantile=0.8),
    ],
    ids=repr,
)
def test_with_cross_entropy_foolboxes_attacks_are_themselves(host):
    _, model, x, y = problem()
    twin = object.__new__(with_objective(type(host), "ace"))
    vars(twin).update(vars(host))
    epsilons = [0.05, 0.3]
    for criterion in (y, foolbox.criteria.TargetedMisclassification((y + 1) % 4)):
        if type(host).__name__ == "LinfFastGradientAttack" and criterion is not y:
            continue
        both = []
        for attack in (host, twin):
            torch.manual_seed(0)
            both.append(attack(model, x, criterion, epsilons=epsilons)[0])
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@EachNorm
@EachName
@EachBounds
def test_foolboxes_pgd_is_a_loop_with_the_derivatives_on_paper(norm, name, bounds):
    network = Smooth().double().eval()
    x = small_batch(5, (16,), bounds=bounds).double()
    y = network(x).argmax(1)
    epsilon = EPSILONS[norm] * (bounds[1] - bounds[0])
    attack = with_objective(HOSTS[norm], name)(steps=12, rel_stepsize=0.3)
    model = foolbox_model(network, bounds)
    torch.manual_seed(2)
    found = attack.run(model, x, y, epsilon=epsilon)
    torch.manual_seed(2)
    point = attack.get_random_start(ep.astensor(x), epsilon).raw.clamp(*bounds)
    for _ in range(12):
        gradient = slopes_by_inputs(name, network, point, x, y)
        order = {"linf": torch.inf, "l2": 2, "l1": 1}[norm]
        step = gradient.sign() if norm == "linf" else gradient / gradient.norm(p=order, dim=1, keepdim=True)
        offset = point + 0.3 * epsilon * step - x
        if norm == "linf":
            offset = offset.clamp(-epsilon, epsilon)
        else:
            offset = offset * (epsilon / offset.norm(p=order, dim=1, keepdim=True)).clamp_max(1)
        point = (x + offset).clamp(*bounds)
    torch.testing.assert_close(found, point, rtol=0, atol=1e-9)


@EachName
def test_every_query_is_the_batch_and_clean_inputs_cost_one(name):
    network = Smooth().eval()
    x = small_batch(5, (16,))
    y = network(x).argmax(1)
    model = foolbox_model(network)
    network.queries.clear()
    with_objective(foolbox.attacks.LinfPGD, name)(steps=4).run(model, x, y, epsilon=0.1)
    compares = name in ("kl", "fisher-rao")
    assert len(network.queries) == 4 + compares
    assert all(len(points) == 5 for points in network.queries)
    assert all(bool(((points - x).abs() <= 0.1 + 1e-6).all()) for points in network.queries)
    assert torch.equal(network.queries[0], x) is compares


def test_foolboxes_attack_with_an_objective_is_an_attack_of_this_project_too():
    attack = as_attack(with_objective(foolbox.attacks.LinfPGD, "kl")(steps=4))
    assert attack.traits.norms == ("linf",)
    assert "WithKL" in attack.description
