"""Models of JAX, TensorFlow and Keras through the bridge, against the same network in torch and their own gradients."""

import copy
import os
import pickle

import cloudpickle
import numpy as np
import pytest
import torch

from robust_ext import InvalidArgumentError, ModelError, ThreatModel, as_module, binarization_test, robust_accuracy
from robust_ext.core.errors import RobustExtWarning
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.adapters.common import require
from tests.adapters.frameworks import FRAMEWORKS, sequential

# Most of the time goes into the compilation of many small functions, each of which is run a few times.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
LINF = ThreatModel(norm="linf", epsilon=0.1)
WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
X, Y = load_dataset("digits").take(range(48))
# The libraries' own.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")]


@pytest.fixture(params=["jax", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("keras", "tensorflow"))])
def framework(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def jax_model():
    pytest.importorskip("jax")
    from robust_ext.adapters.jax import jax_model

    return jax_model


def gradient(module, x, weights):
    x = x.clone().requires_grad_()
    return torch.autograd.grad((module(x) * weights).sum(), x)[0]


def test_values_and_gradients_are_those_of_the_same_network_in_copies_and_pickles_too(framework):
    network = digits_network()
    module = FRAMEWORKS[framework](network)
    for rows in (5, 1, 48):
        torch.testing.assert_close(module(X[:rows]), network(X[:rows]), rtol=1e-4, atol=1e-4)
        weights = torch.randn(rows, 10, generator=torch.Generator().manual_seed(rows))
        expected = gradient(network, X[:rows], weights)
        torch.testing.assert_close(gradient(module, X[:rows], weights), expected, rtol=1e-3, atol=1e-4)
    assert module(X[:0]).shape == (0, 10)
    assert not module(X[:2]).requires_grad
    for other in (copy.deepcopy(module), pickle.loads(cloudpickle.dumps(module))):  # noqa: S301 - our own bytes
        assert torch.equal(other(X), module(X))


def test_evaluations_find_the_same_and_are_resumed(framework, tmp_path):
    """Planted, attacked and judged alike, at the same draws, also in an attack's own process; a weak attack is told."""
    require("foolbox")
    weak = "foolbox:LinfPGD(steps=1, rel_stepsize=0.05, random_start=False)"
    attacks, network = {"good": "robust_ext:APGD(steps=10)", "weak": weak}, digits_network()
    found = {}
    for name, model in {"torch": network, framework: FRAMEWORKS[framework](network)}.items():
        test = binarization_test(model, dict(attacks), X, LINF, inner_points=99, depths=(1,))
        robust = robust_accuracy(model, dict(attacks), X, Y, LINF)
        ways = {"isolate": name != "torch", "out": tmp_path / name}
        apart, resumed = (robust_accuracy(model, attacks["good"], X[:4], Y[:4], LINF, **ways) for _ in range(2))
        rows = [(one["name"], one["verdict"], one["score"]) for one in test.content["attacks"]]
        findings = [(one["code"], one["attack"]) for one in test.content["findings"]]
        every = [one for result in (robust, apart, resumed) for one in result.content["attacks"]]
        found[name] = rows, findings, [one["robust_accuracy"][0]["robust"] for one in every]
    assert found[framework] == found["torch"]
    assert [row[1] for row in found["torch"][0]] == ["passed", "failed"]


# What enters without a call.


def foolbox_model(framework):
    foolbox, wrapped = require("foolbox"), {"bounds": (0, 2), "preprocessing": {"mean": 1.0, "std": 2.0}}
    if framework == "jax":
        weight = pytest.importorskip("jax").numpy.asarray(WEIGHT)
        model = foolbox.JAXModel(lambda x: x @ weight, **wrapped)
    else:
        weight = pytest.importorskip("tensorflow").constant(WEIGHT)
        model = foolbox.TensorFlowModel(lambda x: x @ weight, device="/CPU:0", **wrapped)
    return foolbox.models.TransformBoundsWrapper(model, (0, 1))


def tensorflow_module():
    tf = pytest.importorskip("tensorflow")
    return type("Product", (tf.Module,), {"__call__": lambda self, x: x @ tf.constant(WEIGHT)})()


def keras_linear(activation=None):
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False, activation=activation)])
    model.set_weights([WEIGHT])
    return model


def in_art(kind):
    settings = {"clip_values": (0, 1), "preprocessing": (0.5, 2.0)}
    if kind == "KerasClassifier":
        settings["use_logits"] = True
    else:
        loss = pytest.importorskip("tensorflow").keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        settings |= {"nb_classes": 3, "input_shape": (4,), "loss_object": loss}
    return getattr(require("art").estimators.classification, kind)(keras_linear(), **settings)


# What makes an object, the preprocessing before its linear map, and its bounds.
OBJECTS = {
    "jax.jit": (lambda: pytest.importorskip("jax").jit(lambda x: x @ WEIGHT), (0, 1), None),
    "foolbox JAXModel": (lambda: foolbox_model("jax"), (0.5, 1), (0.0, 1.0)),
    "foolbox TensorFlowModel": (lambda: foolbox_model("tensorflow"), (0.5, 1), (0.0, 1.0)),
    "tf.Module": (tensorflow_module, (0, 1), None),
    "keras": (keras_linear, (0, 1), None),
    "art TensorFlowV2Classifier": (lambda: in_art("TensorFlowV2Classifier"), (0.5, 2), (0.0, 1.0)),
    "art KerasClassifier": (lambda: in_art("KerasClassifier"), (0.5, 2), (0.0, 1.0)),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_enter_as_they_are(name):
    """Values and gradients, with the preprocessing, are those of the affine map by hand."""
    make, (mean, deviation), bounds = OBJECTS[name]
    adapted = as_module(make())
    assert adapted.bounds == bounds
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(adapted.module(x), (x - mean) / deviation @ torch.from_numpy(WEIGHT))
    by_hand = weights @ torch.from_numpy(WEIGHT).T / deviation
    torch.testing.assert_close(gradient(adapted.module, x, weights), by_hand)


@pytest.fixture(params=["jax", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def foolbox_digits(request):
    """A Foolbox model of the demo's network in a framework, what makes its arrays, and images as it takes them."""
    foolbox, framework = require("foolbox"), pytest.importorskip(request.param)
    features, head = (part.function.function for part in FRAMEWORKS[request.param](digits_network()))
    forward, x = lambda x: head(features(x)), X.permute(0, 2, 3, 1).contiguous()
    if request.param == "jax":
        return foolbox.JAXModel(forward, bounds=(0, 1)), framework.numpy.asarray, x
    return foolbox.TensorFlowModel(forward, bounds=(0, 1), device="/CPU:0"), framework.constant, x


def test_attacks_of_foolbox_end_where_foolbox_ends(foolbox_digits):
    """The last of the samples has a gradient of cross-entropy whose signs torch's formula rounds the other way."""
    (model, array, x), attacks = foolbox_digits, require("foolbox").attacks
    x, y = x[28:40], Y[28:40].clone()
    for attack, norm, epsilon in (
        (attacks.LinfFastGradientAttack(), "linf", 0.1),
        (attacks.DDNAttack(steps=10), "l2", 2.0),
    ):
        given = None if norm == "l2" else epsilon
        points = np.array(attack(model, array(x.numpy()), array(y.numpy()), epsilons=given)[1])
        broken = np.array(model(array(points))).argmax(1) != y.numpy()
        broken &= np.abs(points - x.numpy()).max((1, 2, 3)) <= epsilon + 1e-6 if norm == "linf" else True
        found = robust_accuracy(model, attack, x, y, ThreatModel(norm=norm, epsilon=epsilon), keep_candidates=True)
        assert [row["outcome"] == "found" for row in found.records] == broken.tolist()
        np.testing.assert_allclose(found.candidates[broken], points[broken], atol=1e-5)
        assert all(row["queries"] for row in found.records)
    # One that starts in the framework of its model: a sample that is wrong already does not end the others.
    y[1] = (y[1] + 1) % 10
    given = model, "foolbox:BoundaryAttack(steps=2)", x, y, ThreatModel(norm="l2", epsilon=8.0)
    found, again = (robust_accuracy(*given, keep_candidates=True) for _ in range(2))
    np.testing.assert_array_equal(found.candidates, again.candidates)
    assert [row["correct"] for row in found.records] == [number != 1 for number in range(12)]
    assert all(row["outcome"] == "found" for row in found.records if row["correct"])


def test_a_pullback_is_of_the_point_that_went_forward(jax_model):
    """The input changed in place afterwards, two backward passes, and a cotangent of part of the rows."""
    import jax

    module = jax_model(lambda x: jax.numpy.stack([x.sum(1) ** 2, x[:, 0]], 1))
    held = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]).requires_grad_()
    out = module(held)
    held.data.zero_()
    for _ in range(2):
        (found,) = torch.autograd.grad(out[:2, 0].sum(), held, retain_graph=True)
        assert torch.equal(found, torch.tensor([[6.0, 6.0], [14.0, 14.0], [0.0, 0.0]]))


def test_few_batch_sizes_are_compiled(jax_model):
    shapes = []
    module = jax_model(lambda x: shapes.append(len(x)) or x @ WEIGHT)
    for rows in range(1, 33):
        module(torch.zeros(rows, 4))
    assert sorted(shapes) == [1, 2, 4, 8, 16, 32]


def test_what_cannot_enter_is_said_and_features_are_the_logits_unless_others_are_given(jax_model):
    x, linear = torch.rand(4, 4), lambda x: x @ WEIGHT
    with pytest.raises(InvalidArgumentError, match="features: got int"):
        jax_model(linear, features=3)
    for model, error, words in (
        (jax_model(lambda x: (x, x)), ModelError, r"the JAX function returned tuple, expected one array of logits"),
        (jax_model(linear, features=lambda x: x + 1), InvalidArgumentError, "none for a model that is a pair"),
        (lambda x: x, InvalidArgumentError, r"robust_ext\.adapters\.jax\.jax_model"),
    ):
        with pytest.raises(error, match=words):
            binarization_test(model, "robust_ext:APGD", x, LINF, layer="1" if "pair" in words else None)
    with pytest.warns(RobustExtWarning, match="the 3 logits themselves are its features"):
        binarization_test(jax_model(linear), "robust_ext:APGD(steps=2)", x, LINF, inner_points=20)


def test_a_keras_softmax_is_left_out_a_layer_is_found_by_name_and_weights_trained_afterwards_count():
    keras = pytest.importorskip("keras")
    from robust_ext.adapters.keras import keras_model

    with pytest.warns(RobustExtWarning, match="is a softmax, which is left out"):
        module = keras_model(keras_linear("softmax"))
    x = torch.rand(5, 4)
    torch.testing.assert_close(module(x), x @ torch.from_numpy(WEIGHT))
    layers = [keras.layers.Dense(6, activation="relu", name="first"), keras.layers.Dense(3, name="last")]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Softmax()])
    with pytest.warns(RobustExtWarning, match="left out"):
        split = keras_model(model, layer="first")
    first = model.get_layer("first")(x.numpy())
    torch.testing.assert_close(split[0](x), torch.from_numpy(np.array(first)))
    torch.testing.assert_close(split(x).softmax(1), torch.from_numpy(np.array(model(x.numpy()))))
    with pytest.raises(InvalidArgumentError, match="did you mean first"):
        keras_model(model, layer="fist")
    model = keras_linear()
    module = keras_model(model)
    before, digest = module(x), module.state_dict()
    model.set_weights([2 * WEIGHT])
    torch.testing.assert_close(module(x), 2 * before)
    assert module.state_dict() != digest


def test_images_with_channels_last_stay_so_and_are_mentioned():
    pytest.importorskip("keras")
    network = digits_network()
    model, given = sequential(network), X.permute(0, 2, 3, 1)
    torch.testing.assert_close(as_module(model).module(given), network(X), rtol=1e-4, atol=1e-4)
    result = robust_accuracy(model, "robust_ext:APGD(steps=2)", given[:2], Y[:2], LINF)
    assert any("inputs stay so" in one for one in result.content["warnings"])


def test_art_classes_of_this_project_run_on_tensorflow_classifiers():
    classifier = in_art("TensorFlowV2Classifier")
    from robust_ext.adapters.art.attacks import APGD

    x = np.random.default_rng(0).random((6, 4), dtype=np.float32)
    found = APGD(classifier, eps=0.2, max_iter=5).generate(x)
    assert np.abs(found - x).max() <= 0.2 + 1e-6
    assert (classifier.predict(found).argmax(1) != classifier.predict(x).argmax(1)).any()
