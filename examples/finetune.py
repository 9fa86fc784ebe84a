"""Fine-tunes a published Vision Transformer on a folder of images: one sub-folder per class.

    python examples/finetune.py photos                      # downloads Ti/16 once
    python examples/finetune.py photos --weights file.npz   # or takes a file that is there

Stop it whenever you like, even by pulling the plug: the same command goes on where it was.
"""

import argparse
import dataclasses

import keras_vit
from keras_vit import data, evaluation, training

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder")
parser.add_argument("--weights", default="imagenet21k", help="name, file or URL of a checkpoint")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--out", default="finetuned")
arguments = parser.parse_args()

images = data.load_folder(arguments.folder)
print(f"{len(images.labels)} classes; images: {images.counts}; damaged: {len(images.damaged)}")

model = keras_vit.ViTTi16(
    weights=arguments.weights,
    classes=len(images.labels),
    input_shape=(arguments.image_size, arguments.image_size, 3),
    classifier_activation=None,
    drop_path_rate=0.1,
)


def show(event: training.Event) -> None:
    """Prints a line for each epoch."""
    if isinstance(event, training.EpochDone):
        print(
            f"epoch {event.epoch}/{event.epochs}: loss {event.loss:.3f}, "
            f"validation accuracy {event.validation_accuracy:.1%}"
        )


run = training.train(
    images,
    out=arguments.out,
    model=model,
    recipe=dataclasses.replace(training.RECIPES["fine-tune"], epochs=arguments.epochs),
    existing="resume",
    on_event=show,
)
result = evaluation.evaluate(run.model, images.test, labels=images.labels)
print(f"test accuracy: {result.accuracy:.1%} of {result.images} images; the run is in {run.path}")
