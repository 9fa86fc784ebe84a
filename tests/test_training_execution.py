"""Tests of keras_vit.training.execution."""

import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_vit
from keras_vit.training import Execution, is_first_worker
from keras_vit.training.execution import StrategyName, TensorFlowEngine
from keras_vit.training.train import make_engine

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tensorflow", {"strategy": "parameter_server"}, "strategy must be one .*='parameter_server'"),
    ("tensorflow", {"precision": "int8"}, "precision must be one of .*='int8'"),
    ("tensorflow", {"accumulate": 0}, "accumulate must be a positive integer. .*: accumulate=0"),
    ("tensorflow", {"mesh": "data=2"}, "Meshes are for JAX: set KERAS_BACKEND=jax"),
    ("jax", {"strategy": "mirrored"}, "on JAX give a mesh, such as data=8, in place of"),
    ("jax", {"xla": False}, "XLA compiles every step on JAX"),
    ("torch", {}, "TensorFlow or JAX backend. Received: 'torch'"),
]


def test_what_cannot_be_done_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made; the sentence says what to do on which backend."""
    for backend, fields, message in WRONG:
        monkeypatch.setattr(keras.backend, "backend", lambda name=backend: name)
        with pytest.raises(ValueError, match=message):
            make_engine(Execution(**fields))


def test_several_workers_need_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF_CONFIG, or with one worker in it, the sentence says what it must hold."""
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["localhost:1"]}}))
    with pytest.raises(ValueError, match=r"cluster\.worker listing two or more host:port"):
        Execution(strategy="multi_worker").make_strategy()


def test_the_first_worker_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the index in TF_CONFIG; alone, a process is the first."""
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    actual = []
    for index in (0, 1):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(task))
        actual.append(is_first_worker())
    monkeypatch.delenv("TF_CONFIG")

    assert [*actual, is_first_worker()] == [True, False, True]


def test_all_devices_of_the_machine_are_used(strategy: tf.distribute.Strategy) -> None:
    """Here two logical CPUs; a second strategy would break off the sums of another model."""
    engine = TensorFlowEngine(strategy)

    assert strategy.num_replicas_in_sync == 2
    assert (engine.index, engine.count, engine.gather(5)) == (0, 1, [5])
    assert Execution(strategy="mirrored").make_strategy() is strategy


def test_replicas_of_one_machine_divide_nothing_among_workers() -> None:
    """TensorFlow would rewrite the batches for one worker, for most of a minute."""
    batches = tf.data.Dataset.range(4).batch(2)
    strategies = Execution(strategy="mirrored"), Execution(strategy="none")
    machine, device = (
        TensorFlowEngine(execution.make_strategy()).one_pass(lambda _: batches).options()
        for execution in strategies
    )

    policies = tf.data.experimental.AutoShardPolicy
    assert machine.experimental_distribute.auto_shard_policy == policies.OFF
    assert device.experimental_distribute.auto_shard_policy == policies.DATA


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_each_evaluation_is_one_pass_over_all_images(strategy: StrategyName) -> None:
    """However many there are of them; the last batch is short, and the second replica has none."""
    values = np.array([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]], np.float32)
    pairs = tf.data.Dataset.from_tensor_slices((values, values))
    engine = make_engine(Execution(strategy=strategy))
    with engine.scope():
        inputs = keras.Input((1,))
        outputs = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)(inputs)
        model = keras_vit.ExactModel(inputs, outputs)
        model.compile("sgd", loss="mse")
    batches = pairs.batch(4)
    engine.begin(model, training=lambda _: batches, validation=lambda _: batches, size=4)

    losses = [float(engine.evaluate()["loss"]) for _ in range(3)]

    np.testing.assert_allclose(losses, [(values**2).mean()] * 3, rtol=1e-6)
