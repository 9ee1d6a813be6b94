"""Models of JAX, TensorFlow and Keras through the bridge, against the same network in torch and their own gradients."""

import copy
import pickle

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import (
    InvalidArgumentError,
    ModelError,
    ThreatModel,
    as_module,
    binarization_test,
    evaluate,
    robust_accuracy,
)
from robust_ext.core.errors import RobustExtWarning
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from tests.adapters.common import require
from tests.adapters.frameworks import FRAMEWORKS, weights_channels_last

LINF = ThreatModel(norm="linf", epsilon=0.1)
WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
WHOLE = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# The libraries' own.
pytestmark = [
    WHOLE,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(params=["jax", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("keras", "tensorflow"))])
def framework(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def digits():
    return load_dataset("digits").take(range(48))


def gradient(module, x, weights):
    x = x.clone().requires_grad_()
    return torch.autograd.grad((module(x) * weights).sum(), x)[0]


def test_values_and_gradients_are_those_of_the_same_network(framework, digits):
    network, (x, _) = digits_network(), digits
    module = FRAMEWORKS[framework](network)
    for rows in (5, 1, 48):
        torch.testing.assert_close(module(x[:rows]), network(x[:rows]), rtol=1e-4, atol=1e-4)
        weights = torch.randn(rows, 10, generator=torch.Generator().manual_seed(rows))
        expected = gradient(network, x[:rows], weights)
        torch.testing.assert_close(gradient(module, x[:rows], weights), expected, rtol=1e-3, atol=1e-4)
    assert module(x[:0]).shape == (0, 10)
    assert not module(x[:2]).requires_grad


def test_evaluations_find_the_same(framework, digits):
    """Planted, attacked and judged alike, at the same draws; a weak attack is told from a good one."""
    require("foolbox")
    network, (x, y) = digits_network(), digits
    attacks = {
        "good": "robust_ext:APGD(steps=10)",
        "weak": "foolbox:LinfPGD(steps=1, rel_stepsize=0.05, random_start=False)",
    }
    found = {}
    for name, model in {"torch": network, framework: FRAMEWORKS[framework](network)}.items():
        test = binarization_test(model, dict(attacks), x, LINF, inner_points=99)
        robust = robust_accuracy(model, dict(attacks), x, y, LINF)
        rows = [(one["name"], one["verdict"], one["score"]) for one in test.content["attacks"]]
        findings = [(one["code"], one["attack"]) for one in test.content["findings"]]
        found[name] = rows, findings, [one["robust_accuracy"][0]["robust"] for one in robust.content["attacks"]]
    assert found[framework] == found["torch"]
    assert [row[1] for row in found["torch"][0]] == ["passed", "failed"]


@pytest.mark.exhaustive
def test_a_whole_evaluation_is_that_of_torch(framework, digits, tmp_path):
    """Also in an attack's own process, and resumed from a run folder."""
    network, (x, y) = digits_network(), digits
    results = {}
    for name, model in {"torch": network, framework: FRAMEWORKS[framework](network)}.items():
        for again in range(2):
            out = tmp_path / name
            results[name, again] = evaluate(model, x, y, LINF, budget="quick", out=out, isolate=True)
    assert {one.robust_accuracy for one in results.values()} == {results["torch", 0].robust_accuracy}
    assert {one.verdict for one in results.values()} == {"passed"}


def test_attacks_run_in_processes_of_their_own(framework, digits):
    x, y = digits
    module = FRAMEWORKS[framework](digits_network())
    here, apart = (
        robust_accuracy(module, "robust_ext:APGD(steps=5)", x[:4], y[:4], LINF, isolate=one) for one in (False, True)
    )
    assert here.content["attacks"][0]["robust_accuracy"] == apart.content["attacks"][0]["robust_accuracy"]


def test_copies_and_pickles_return_the_same(framework, digits):
    module = FRAMEWORKS[framework](digits_network())
    expected = module(digits[0])
    for other in (copy.deepcopy(module), pickle.loads(cloudpickle.dumps(module))):  # noqa: S301 - our own bytes
        assert torch.equal(other(digits[0]), expected)


# What enters without a call, each with the number of its inputs.
def compiled():
    jax = pytest.importorskip("jax")
    return jax.jit(lambda x: x @ WEIGHT)


def foolbox_jax():
    jnp, foolbox = pytest.importorskip("jax").numpy, require("foolbox")
    model = foolbox.JAXModel(lambda x: x @ jnp.asarray(WEIGHT), bounds=(0, 2), preprocessing={"mean": 1.0, "std": 2.0})
    return foolbox.models.TransformBoundsWrapper(model, (0, 1))


def foolbox_tensorflow():
    tf, foolbox = pytest.importorskip("tensorflow"), require("foolbox")
    model = foolbox.TensorFlowModel(
        lambda x: x @ tf.constant(WEIGHT), bounds=(0, 2), device="/CPU:0", preprocessing={"mean": 1.0, "std": 2.0}
    )
    return foolbox.models.TransformBoundsWrapper(model, (0, 1))


def tensorflow_module():
    tf = pytest.importorskip("tensorflow")

    class Product(tf.Module):
        def __call__(self, x):
            return x @ tf.constant(WEIGHT)

    return Product()


def keras_linear(activation=None):
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False, activation=activation)])
    model.set_weights([WEIGHT])
    return model


def art_tensorflow():
    require("art")
    tf = pytest.importorskip("tensorflow")
    from robust_ext.adapters.art.library import art

    return art.estimators.classification.TensorFlowV2Classifier(
        keras_linear(),
        nb_classes=3,
        input_shape=(4,),
        clip_values=(0, 1),
        preprocessing=(0.5, 2.0),
        loss_object=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def art_keras():
    require("art")
    pytest.importorskip("keras")
    from robust_ext.adapters.art.library import art

    return art.estimators.classification.KerasClassifier(
        keras_linear(), clip_values=(0, 1), use_logits=True, preprocessing=(0.5, 2.0)
    )


def plain(x):
    return x


def halved(x):
    return (x - 0.5) / 2


OBJECTS = {
    "jax.jit": (compiled, plain, None),
    "foolbox JAXModel": (foolbox_jax, lambda x: (2 * x - 1) / 2, (0.0, 1.0)),
    "foolbox TensorFlowModel": (foolbox_tensorflow, lambda x: (2 * x - 1) / 2, (0.0, 1.0)),
    "tf.Module": (tensorflow_module, plain, None),
    "keras": (keras_linear, plain, None),
    "art TensorFlowV2Classifier": (art_tensorflow, halved, (0.0, 1.0)),
    "art KerasClassifier": (art_keras, halved, (0.0, 1.0)),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_enter_as_they_are(name):
    """Values and gradients, with the preprocessing, are those of the affine map by hand."""
    make, before, bounds = OBJECTS[name]
    adapted = as_module(make())
    assert adapted.bounds == bounds
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    by_hand = lambda x: before(x) @ torch.from_numpy(WEIGHT)  # noqa: E731
    torch.testing.assert_close(adapted.module(x), by_hand(x))
    torch.testing.assert_close(gradient(adapted.module, x, weights), gradient(by_hand, x, weights))


def foolbox_digits(framework):
    """A Foolbox model of the demo's network in a framework, and what makes its arrays of numpy's."""
    foolbox = require("foolbox")
    features, head = (part.function.function for part in FRAMEWORKS[framework](digits_network()))
    if framework == "jax":
        return foolbox.JAXModel(lambda x: head(features(x)), bounds=(0, 1)), pytest.importorskip("jax").numpy.asarray
    model = foolbox.TensorFlowModel(lambda x: head(features(x)), bounds=(0, 1), device="/CPU:0")
    return model, pytest.importorskip("tensorflow").constant


@pytest.fixture(params=["jax", pytest.param("tensorflow", marks=pytest.mark.exhaustive)])
def foolbox_model(request):
    pytest.importorskip(request.param)
    return foolbox_digits(request.param)


def test_attacks_of_foolbox_end_where_foolbox_ends(foolbox_model):
    """The last of the samples has a gradient of cross-entropy whose signs torch's formula rounds the other way."""
    (model, array), attacks = foolbox_model, require("foolbox").attacks
    x, y = load_dataset("digits").take(range(28, 40))
    x = x.permute(0, 2, 3, 1).contiguous()
    for attack, norm, epsilon in (
        (attacks.LinfFastGradientAttack(), "linf", 0.1),
        (attacks.DDNAttack(steps=10), "l2", 2.0),
    ):
        given = None if norm == "l2" else epsilon
        _, points, _ = attack(model, array(x.numpy()), array(y.numpy()), epsilons=given)
        points = np.array(points)
        broken = np.array(model(array(points))).argmax(1) != y.numpy()
        broken &= np.abs(points - x.numpy()).max((1, 2, 3)) <= epsilon + 1e-6 if norm == "linf" else True
        found = robust_accuracy(model, attack, x, y, ThreatModel(norm=norm, epsilon=epsilon), keep_candidates=True)
        assert [row["outcome"] == "found" for row in found.records] == broken.tolist()
        np.testing.assert_allclose(found.candidates[broken], points[broken], atol=1e-5)
        assert all(row["queries"] for row in found.records)


def test_attacks_written_for_jax_run_on_its_models():
    """One that is compiled as a whole, one that is not, and one that draws from EagerPy's generator."""
    jax, foolbox, eagerpy = pytest.importorskip("jax"), require("foolbox"), pytest.importorskip("eagerpy")
    (model, _), (x, y) = foolbox_digits("jax"), load_dataset("digits").take(range(4))
    x = x.permute(0, 2, 3, 1).contiguous()

    class InJax(foolbox.attacks.base.FixedEpsilonAttack):
        distance = foolbox.distances.linf

        def __init__(self, around):
            self.around = around

        def run(self, model, inputs, criterion, *, epsilon, **kwargs):
            assert isinstance(inputs, eagerpy.JAXTensor)
            assert isinstance(model, foolbox.JAXModel)
            rows, labels = jax.numpy.arange(len(inputs)), criterion.labels.raw

            def loss(x):
                return jax.nn.log_softmax(model(x))[rows, labels].sum()

            start = (inputs + inputs.uniform(inputs.shape, -epsilon / 2, epsilon / 2)).clip(0, 1).raw
            step = self.around(lambda x: x - epsilon / 2 * jax.numpy.sign(jax.grad(loss)(x)))
            return eagerpy.astensor(step(start)).clip(0, 1)

    eagerpy.JAXTensor.key = key = jax.random.PRNGKey(5)
    found = {}
    for name, around in (("eager", lambda f: f), ("again", lambda f: f), ("compiled", jax.jit)):
        found[name] = robust_accuracy(model, {"own": InJax(around)}, x, y, LINF, keep_candidates=True)
        assert eagerpy.JAXTensor.key is key
    np.testing.assert_array_equal(found["eager"].candidates, found["again"].candidates)
    np.testing.assert_allclose(found["compiled"].candidates, found["eager"].candidates, atol=1e-6)
    # Foolbox queries what comes back once more; what is compiled is not counted.
    assert [found[name].records[0]["queries"] for name in ("eager", "compiled")] == [2, 1]


def test_attacks_of_foolbox_start_in_the_framework_of_its_model(foolbox_model):
    """A sample that is wrong already is excused, and does not end the others."""
    (model, _), (x, y) = foolbox_model, load_dataset("digits").take(range(3))
    x, y = x.permute(0, 2, 3, 1).contiguous(), y.clone()
    y[1] = (y[1] + 1) % 10
    attack = "foolbox:HopSkipJumpAttack(steps=1, initial_gradient_eval_steps=5, max_gradient_eval_steps=5)"
    found = robust_accuracy(model, attack, x, y, ThreatModel(norm="l2", epsilon=8.0))
    assert [(row["correct"], row["outcome"]) for row in found.records][::2] == [(True, "found")] * 2
    assert not found.records[1]["correct"]


def test_a_pullback_is_of_the_point_that_went_forward():
    """The input changed in place afterwards, two backward passes, and a cotangent of part of the rows."""
    jax = pytest.importorskip("jax")
    from robust_ext.adapters.jax import jax_model

    module = jax_model(lambda x: jax.numpy.stack([x.sum(1) ** 2, x[:, 0]], 1))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]])
    held = x.clone().requires_grad_()
    out = module(held)
    held.data.zero_()
    for _ in range(2):
        (found,) = torch.autograd.grad(out[:2, 0].sum(), held, retain_graph=True)
        assert torch.equal(found, torch.tensor([[6.0, 6.0], [14.0, 14.0], [0.0, 0.0]]))


def test_few_batch_sizes_are_compiled():
    jax = pytest.importorskip("jax")
    from robust_ext.adapters.jax import jax_model

    shapes = []

    def noted(x):
        shapes.append(x.shape)
        return x @ jax.numpy.asarray(WEIGHT)

    module = jax_model(noted)
    for rows in range(1, 33):
        module(torch.zeros(rows, 4))
    assert sorted(shape[0] for shape in shapes) == [1, 2, 4, 8, 16, 32]


def test_what_cannot_enter_is_said():
    jax = pytest.importorskip("jax")
    from robust_ext.adapters.jax import jax_model

    with pytest.raises(InvalidArgumentError, match="features: got int"):
        jax_model(lambda x: x, features=3)
    x = torch.rand(4, 4)
    with pytest.raises(ModelError, match=r"the JAX function returned tuple, expected one array of logits"):
        binarization_test(jax_model(lambda x: (x, x)), "robust_ext:APGD", x, LINF)
    pair = jax_model(lambda x: x @ WEIGHT, features=jax.numpy.tanh)
    with pytest.raises(InvalidArgumentError, match="none for a model that is a pair"):
        binarization_test(pair, "robust_ext:APGD", x, LINF, layer="1")
    with pytest.raises(InvalidArgumentError, match=r"robust_ext\.adapters\.jax\.jax_model"):
        binarization_test(lambda x: x, "robust_ext:APGD", x, LINF)


def test_features_are_the_logits_unless_others_are_given():
    pytest.importorskip("jax")
    from robust_ext.adapters.jax import jax_model

    x = torch.rand(2, 4)
    with pytest.warns(RobustExtWarning, match="the 3 logits themselves are its features"):
        binarization_test(jax_model(lambda x: x @ WEIGHT), "robust_ext:APGD(steps=2)", x, LINF, inner_points=20)


def test_a_keras_softmax_is_left_out_and_a_layer_is_found_by_name():
    keras = pytest.importorskip("keras")
    from robust_ext.adapters.keras import keras_model

    with pytest.warns(RobustExtWarning, match="is a softmax, which is left out"):
        module = keras_model(keras_linear("softmax"))
    x = torch.rand(5, 4)
    torch.testing.assert_close(module(x), x @ torch.from_numpy(WEIGHT))
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, activation="relu", name="first"), keras.layers.Dense(3, name="last")]
    )
    model.add(keras.layers.Softmax())
    with pytest.warns(RobustExtWarning, match="left out"):
        split = keras_model(model, layer="first")
    first = model.get_layer("first")(x.numpy()).numpy()
    torch.testing.assert_close(split[0](x), torch.from_numpy(np.array(first)))
    torch.testing.assert_close(split(x).softmax(1), torch.from_numpy(np.array(model(x.numpy()))))
    with pytest.raises(InvalidArgumentError, match="did you mean first"):
        keras_model(model, layer="fist")


def test_weights_that_are_trained_afterwards_count():
    pytest.importorskip("keras")
    from robust_ext.adapters.keras import keras_model

    model = keras_linear()
    module, x = keras_model(model), torch.rand(3, 4)
    before, digest = module(x), module.state_dict()
    model.set_weights([2 * WEIGHT])
    torch.testing.assert_close(module(x), 2 * before)
    assert module.state_dict() != digest


def test_images_with_channels_last_stay_so_and_are_mentioned(digits):
    keras = pytest.importorskip("keras")
    network, (x, y) = digits_network(), digits
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.ZeroPadding2D(1),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.set_weights(weights_channels_last(network))
    given = x.permute(0, 2, 3, 1)
    torch.testing.assert_close(as_module(model).module(given), network(x), rtol=1e-4, atol=1e-4)
    result = robust_accuracy(model, "robust_ext:APGD(steps=2)", given[:2], y[:2], LINF)
    assert any("inputs stay so" in one for one in result.content["warnings"])


def test_art_classes_of_this_project_run_on_tensorflow_classifiers():
    classifier = art_tensorflow()
    from robust_ext.adapters.art.attacks import APGD

    x = np.random.default_rng(0).random((6, 4), dtype=np.float32)
    found = APGD(classifier, eps=0.2, max_iter=5).generate(x)
    assert np.abs(found - x).max() <= 0.2 + 1e-6
    assert (classifier.predict(found).argmax(1) != classifier.predict(x).argmax(1)).any()
    assert nn.Module not in type(classifier).__mro__
