"""Chooses a learning rate: a short training with each, and the lowest validation loss.

    python examples/sweep.py                                # the digits
    python examples/sweep.py --data photos --rates 0.001 0.003 0.01 0.03

Stop it whenever you like: the same command repeats no training that is complete.
"""

import argparse
import dataclasses
import pathlib

from keras_vit import data, training

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", default="digits", help="a folder with one sub-folder per class")
parser.add_argument("--rates", type=float, nargs="+", default=(0.0005, 0.001, 0.002, 0.004))
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("sweep"))
arguments = parser.parse_args()

images = data.load_data(arguments.data)
recipe = dataclasses.replace(training.default_recipe(images), epochs=arguments.epochs)
losses = {}  # of the runs by their folders
print("| learning rate | validation loss | accuracy |\n| --- | --- | --- |")
for rate in arguments.rates:
    folder = arguments.out / f"{rate:g}"
    try:
        run = training.train(
            images,
            out=folder,
            recipe=dataclasses.replace(recipe, learning_rate=rate),
            existing="resume",
        )
    except FloatingPointError:
        print(f"| {rate:g} | not finite | |")
        continue
    result = run.config["result"]
    losses[folder] = result["validation_loss"]
    print(f"| {rate:g} | {losses[folder]:.4f} | {result['validation_accuracy']:.1%} |", flush=True)
if not losses:
    raise SystemExit("The loss is not finite with any of these; try smaller ones.")
best = min(losses, key=losses.__getitem__)
print(f"The best run is {best}.")
if len(losses) > 1 and best.name in (f"{min(arguments.rates):g}", f"{max(arguments.rates):g}"):
    print("Its learning rate is at the edge of those tried: others may be better.")
