"""Trains with several processes, as on several machines: `model.fit` under a strategy.

    python examples/multi_worker.py              # starts two workers on this machine
    python examples/multi_worker.py --workers 4

On real machines, start the part below `train` on each of them with its own TF_CONFIG.
"""

import argparse
import json
import os
import socket
import subprocess
import sys


def train() -> None:
    """What each worker runs: nothing in it knows that there are several."""
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_vit
    from keras_vit.data import load_digits
    from keras_vit.training import AdamW

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    digits = load_digits()
    config = keras_vit.ViTConfig(
        input_shape=(8, 8, 3),
        patch_size=2,
        hidden_dim=64,
        mlp_dim=128,
        num_heads=4,
        num_layers=4,
        classes=10,
        dropout_rate=0.1,
        include_preprocessing=True,
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras_vit.VisionTransformer(config)
        model.compile(
            AdamW(1e-3, weight_decay=0.05, global_clipnorm=1.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.autotune.enabled = False  # an iterator that dies may wait for its thread
    batches = (
        tf.data.Dataset.from_tensor_slices((digits.train.images, digits.train.targets))
        .shuffle(len(digits.train), seed=0)
        .batch(64, drop_remainder=True)
        .with_options(options)
    )
    history = model.fit(batches.repeat(), epochs=5, steps_per_epoch=19, shuffle=False, verbose=0)

    total = float(sum(np.abs(weight).sum(dtype=np.float64) for weight in model.get_weights()))
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    accuracy = history.history["accuracy"][-1]
    print(f"worker {task}: accuracy {float(accuracy):.1%}, sum of all weights {total:.6f}")


def start(workers: int) -> int:
    """Starts the workers on free ports of this machine, and waits for them."""
    sockets = [socket.socket() for _ in range(workers)]
    for made in sockets:
        made.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{made.getsockname()[1]}" for made in sockets]
    for made in sockets:
        made.close()
    processes = []
    for index in range(workers):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(task), "TF_CPP_MIN_LOG_LEVEL": "3"}
        processes.append(subprocess.Popen([sys.executable, __file__], env=environment))
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    if "TF_CONFIG" in os.environ:
        train()
    else:
        sys.exit(start(parser.parse_args().workers))
