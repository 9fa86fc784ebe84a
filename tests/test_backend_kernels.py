"""Tests of keras_vit.backend.tensorflow: what users call runs fused kernels, with right gradients.

What TensorFlow makes of a form is nowhere promised: an upgrade that loses it must fail here.
"""

import collections
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import test_backend
from conftest import CLASSES, TINY, randomize
from tensorflow.python.eager import context
from tensorflow.python.util import _pywrap_util_port
from test_backend import TOLERANCES, relative

from keras_vit import VisionTransformer, backend, environment
from keras_vit.backend import plain, tensorflow

needs_onednn = pytest.mark.skipif(
    not _pywrap_util_port.IsMklEnabled(), reason="oneDNN is not in this TensorFlow, or off"
)

needs_avx512 = pytest.mark.skipif(
    "avx512f" not in environment._processor_features(),
    reason="TensorFlow leaves bfloat16 to oneDNN on processors with AVX-512 alone",
)

# How many of each kernel a forward pass has.
BLOCKS = TINY.num_layers
FORWARD = {
    "_MklLayerNorm": 2 * BLOCKS + 1,
    "_MklSoftmax": BLOCKS,
    "_MklNativeFusedMatMul BiasAdd, GeluApproximate": BLOCKS,
    "_MklNativeFusedMatMul BiasAdd, Add": 2 * BLOCKS,
}

NAMES = ("dense, gelu", "dense, gelu_tanh", "dense, quick_gelu", "layer_norm", "softmax")
FORMS: dict[str, Any] = {
    **{name: test_backend.FORMS[name] for name in (*NAMES, "self_attention")},
    "self_attention of many tokens": ("self_attention", [(2, 17, 24)], {"num_heads": 2}),
}


def kernels(call: Callable[[], Any]) -> collections.Counter[str]:
    """Counts the operations of the graphs that a first call makes, as they are run."""
    context.context().enable_run_metadata()
    try:
        call()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    graphs = [graph for each in metadata.function_graphs for graph in each.partition_graphs]
    counts: collections.Counter[str] = collections.Counter()
    for node in (node for graph in graphs for node in graph.node):
        fused = [name.decode() for name in node.attr["fused_ops"].list.s]
        counts[f"{node.op} {', '.join(fused)}".strip()] += 1
    return counts


def assert_fused(counts: collections.Counter[str]) -> None:
    assert {name: counts[name] for name in FORWARD} == FORWARD


def value_and_gradients(module: Any, name: str, arrays: list[tf.Tensor], **options: Any) -> Any:
    """Runs a form and its gradients in a function with an unknown batch."""
    function, _, arguments = FORMS[name]
    signature = [
        tf.TensorSpec((None, *array.shape[1:]) if place == 0 else array.shape, array.dtype)
        for place, array in enumerate(arrays)
    ]

    def run(*inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = getattr(module, function)(*inputs, **arguments)
            # Not a plain sum, whose gradient would be zero behind a softmax.
            score = tf.reduce_sum(tf.cast(value, tf.float32) ** 2)
        return value, *tape.gradient(score, inputs)

    return tf.function(run, input_signature=signature, autograph=False, **options)(*arrays)


@needs_onednn
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("bfloat16", marks=needs_avx512),
        pytest.param("mixed_bfloat16", marks=needs_avx512),
    ],
)
def test_predict_runs_fused_kernels(dtype: str, images: np.ndarray) -> None:
    """The function behind `model.predict` has every fused kernel."""
    model = VisionTransformer(TINY, dtype=dtype)
    assert_fused(kernels(lambda: model.predict(images, verbose=0)))


@needs_onednn
@pytest.mark.parametrize("batch", [None, 2])
def test_functions_run_fused_kernels(batch: int | None, images: np.ndarray) -> None:
    """A `tf.function` has them with an unknown batch and with a known one."""
    model = VisionTransformer(TINY)
    signature = [tf.TensorSpec((batch, *TINY.input_shape))]
    function = tf.function(lambda x: model(x, training=False), input_signature=signature)
    assert_fused(kernels(lambda: function(images)))


def test_graphs_hold_constants_once() -> None:
    """A block more makes no constants but those of its GELU, and takes rows as they are."""
    counts = []
    for layers in (2, 3):
        model = VisionTransformer(dataclasses.replace(TINY, num_layers=layers))
        signature = [tf.TensorSpec((None, *TINY.input_shape))]
        function = tf.function(lambda x, model=model: model(x, training=False))
        graph = function.get_concrete_function(*signature).graph
        counts.append(collections.Counter(op.type for op in graph.get_operations()))
    more = counts[1] - counts[0]
    assert more["Const"] == 5 + 1  # the axis of a split
    assert more["Shape"] == 2  # of the normalisations' rows
    assert more["Reshape"] == 13


def test_constants_keep_to_their_device() -> None:
    """One tensor for a graph and a device; another graph has its own."""

    def reshaped() -> list[tf.Tensor]:
        made = []
        for device in ("CPU:0", "CPU:0", "CPU:1"):
            with tf.device(device):
                made.append(tensorflow.reshape(tf.zeros((4, 3)), (-1, 6)).op.inputs[1])
        return made

    with tf.Graph().as_default():
        one, again, elsewhere = reshaped()
    assert one is again
    assert one is not elsewhere
    assert one.device != elsewhere.device
    with tf.Graph().as_default():
        assert reshaped()[0] is not one
    assert tensorflow.as_rows(tf.zeros((2, 2, 3))).shape == (4, 3)  # eagerly


def test_constants_do_not_keep_a_graph_alive() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.zeros((4, 3))
        assert tensorflow.constant(2.0, tf.float32, beside=x).graph is graph
    freed = weakref.ref(graph)
    del graph, x
    gc.collect()
    assert freed() is None


@needs_onednn
@pytest.mark.parametrize("dtype", ["float32", pytest.param("mixed_bfloat16", marks=needs_avx512)])
def test_training_runs_fused_kernels(dtype: str, images: np.ndarray) -> None:
    """A training step has them; in float32 the GELU is a loop of its own."""
    model = VisionTransformer(TINY, dtype=dtype)
    model.compile("sgd", "mse", jit_compile=False)
    targets = np.zeros((2, CLASSES))
    counts = kernels(lambda: model.fit(images, targets, verbose=0))
    expected = dict(FORWARD)
    if dtype == "float32":
        expected["_MklNativeFusedMatMul BiasAdd, GeluApproximate"] = 0
    assert {name: counts[name] for name in expected} == expected


@needs_onednn
@pytest.mark.parametrize(("tokens", "times"), [(16, 1), (17, 2)])
def test_attention_weights_are_kept_of_few_tokens(tokens: int, times: int) -> None:
    """Those of 4 * 4 tokens are as large as an MLP's hidden layer; larger ones are made anew."""
    qkv = tf.ones((2, tokens, 3 * 2 * 4))

    def run() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(qkv)
            value = backend.self_attention(qkv, num_heads=2)
        return value, tape.gradient(value, qkv)

    assert kernels(tf.function(run, autograph=False))["_MklSoftmax"] == times


@needs_onednn
def test_the_comparison_sees_a_lost_kernel(images: np.ndarray) -> None:
    """Keras' own normalisation and dense layer are not fused: the count tells them apart."""
    dense = keras.layers.Dense(8, activation="gelu")
    model = keras.Sequential([keras.layers.LayerNormalization(), dense])
    assert not set(FORWARD) & set(kernels(lambda: model.predict(images, verbose=0)))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", FORMS)
def test_fused_forms_have_the_plain_numbers_and_gradients(name: str, dtype: str) -> None:
    """In a graph, and compiled by XLA, as TensorFlow derives them from the plain form."""
    arrays = [
        tf.cast(np.random.default_rng(k).standard_normal(shape), dtype)
        for k, shape in enumerate(FORMS[name][1])
    ]
    expected = value_and_gradients(plain, name, arrays)
    found = [value_and_gradients(backend, name, arrays)]
    if dtype == "float32":
        found.append(value_and_gradients(backend, name, arrays, jit_compile=True))
    for ours in found:
        for each, wanted in zip(ours, expected, strict=True):
            assert relative(each, wanted) < TOLERANCES[dtype]
            assert relative(each, 1.05 * wanted) > TOLERANCES[dtype]


@pytest.mark.parametrize("remat", [False, True])
def test_training_moves_weights_as_eager_training_does(remat: bool, images: np.ndarray) -> None:
    """A step in a graph, blocks recomputed or not, gives the gradients of the eager plain forms."""
    config = dataclasses.replace(TINY, remat=remat)
    steps = []
    for eagerly in (True, False):
        model = randomize(VisionTransformer(config))
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        model.fit(images, np.ones((2, CLASSES)), verbose=0)
        steps.append(model.get_weights())
    for eager, graph in zip(*steps, strict=True):
        np.testing.assert_allclose(graph, eager, atol=1e-5)
