"""Trains a small Vision Transformer on real handwritten digits, measures it, reads one digit.

Run it as `python examples/quickstart.py [EPOCHS]`; it writes the folder digits-run.
"""

import dataclasses
import sys

from keras_vit.data import load_digits
from keras_vit.evaluation import evaluate, predict
from keras_vit.training import RECIPES, train

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else RECIPES["digits"].epochs
recipe = dataclasses.replace(RECIPES["digits"], epochs=epochs)

data = load_digits()
run = train(data, out="digits-run", recipe=recipe, existing="overwrite")
accuracy = evaluate(run.model, data.test, labels=data.labels).accuracy
print(f"Of {len(data.test)} digits it has never seen, {accuracy:.1%} are read rightly.")

image, label = data.test.images[0], data.labels[data.test.targets[0]]
(best,) = predict(run.model, [image], labels=data.labels, top=1)[0]
print(f"The first is a {label}; it reads a {best.label} (probability {best.probability:.1%}).")
