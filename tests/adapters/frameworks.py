"""The demo's network with the same weights in other frameworks, whose images have their channels last."""

from __future__ import annotations

from torch import nn


def weights_channels_last(network):
    """Return the weights of the demo's network as networks of images ``(H, W, C)`` have them."""
    first, second, hidden, last = (part for part in network if isinstance(part, (nn.Conv2d, nn.Linear)))
    kernels = [one.weight.detach().permute(2, 3, 1, 0) for one in (first, second)]
    # What is flattened has its channels last too.
    rows = hidden.weight.detach().view(128, 32, 4, 4).permute(2, 3, 1, 0).reshape(512, 128)
    weights = [kernels[0], first.bias, kernels[1], second.bias, rows, hidden.bias, last.weight.detach().T, last.bias]
    return [one.detach().contiguous().numpy() for one in weights]


def in_jax(network):
    """Return the network as a pair of JAX functions."""
    import jax

    from robust_ext.adapters.jax import jax_model

    k1, b1, k2, b2, w1, c1, w2, c2 = map(jax.numpy.asarray, weights_channels_last(network))

    def convolve(x, kernel, stride):
        layout, padding = ("NHWC", "HWIO", "NHWC"), ((1, 1), (1, 1))
        return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=layout)

    def features(x):
        x = jax.nn.relu(convolve(jax.nn.relu(convolve(x, k1, 1) + b1), k2, 2) + b2)
        return jax.nn.relu(x.reshape(len(x), -1) @ w1 + c1)

    return jax_model(lambda x: x @ w2 + c2, features=features, channels_first=True)


def sequential(network):
    """Return the network as a sequential model of Keras 3, of images with their channels last."""
    import keras

    layers = keras.layers
    first = layers.Conv2D(16, 3, padding="same", activation="relu"), layers.ZeroPadding2D(1)
    second = layers.Conv2D(32, 3, strides=2, activation="relu"), layers.Flatten()
    last = layers.Dense(128, activation="relu"), layers.Dense(10)
    model = keras.Sequential([keras.Input((8, 8, 1)), *first, *second, *last])
    model.set_weights(weights_channels_last(network))
    return model


def in_keras(network):
    """Return the network as a model of Keras."""
    from robust_ext.adapters.keras import keras_model

    return keras_model(sequential(network), channels_first=True)


def in_tensorflow(network):
    """Return the network as a pair of TensorFlow functions."""
    import tensorflow as tf

    from robust_ext.adapters.tensorflow import tensorflow_model

    k1, b1, k2, b2, w1, c1, w2, c2 = map(tf.constant, weights_channels_last(network))

    def features(x):
        x = tf.nn.relu(tf.nn.conv2d(x, k1, 1, "SAME") + b1)
        x = tf.nn.relu(tf.nn.conv2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), k2, 2, "VALID") + b2)
        return tf.nn.relu(tf.reshape(x, [-1, 512]) @ w1 + c1)

    return tensorflow_model(lambda x: x @ w2 + c2, features=features, channels_first=True)


FRAMEWORKS = {"torch": lambda network: network, "jax": in_jax, "keras": in_keras, "tensorflow": in_tensorflow}
