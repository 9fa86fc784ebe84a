"""The facts of a run that stand in its report: what, with what, from what, and how to use it."""

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_vit import version
from keras_vit.data import ImageData, image_size_of
from keras_vit.limits import counted
from keras_vit.model import VisionTransformer
from keras_vit.reporting.gallery import short
from keras_vit.training import Provenance, Run
from keras_vit.training.run import MODEL, PROVENANCE, SPLITS

Pairs = list[tuple[str, str]]

_PAPER = """\
@inproceedings{dosovitskiy2021image,
  title     = {An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale},
  author    = {Dosovitskiy, Alexey and Beyer, Lucas and Kolesnikov, Alexander and Weissenborn, Dirk
               and Zhai, Xiaohua and Unterthiner, Thomas and Dehghani, Mostafa and Minderer,
               Matthias and Heigold, Georg and Gelly, Sylvain and Uszkoreit, Jakob and
               Houlsby, Neil},
  booktitle = {International Conference on Learning Representations},
  year      = {2021}
}
@software{keras_vit,
  title   = {keras-vit: Vision Transformers in Keras},
  version = {VERSION}
}"""


def flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the settings of nested fields by their dotted names.

    Example:
        >>> dict(flat({"recipe": {"epochs": 3, "betas": [0.9, 0.999]}, "seed": 0}))
        {'recipe.epochs': 3, 'recipe.betas': [0.9, 0.999], 'seed': 0}
    """
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def shown(value: Any) -> str:
    """Returns a setting as text of a sensible length."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return short(text, 200)


def provenance(run: Run) -> Provenance:
    """Returns the commands that trained a run, and the weights that it started from."""
    return Provenance.from_dict(run.config.get(PROVENANCE))


def summary(model: keras.Model, run: Run | None, data: ImageData | None) -> Pairs:
    """Returns the facts at the head of a report: model, images, training."""
    height, width = image_size_of(model)
    pairs = [("Model", _model_name(model))]
    if not _is_exported(model):
        pairs.append(("Parameters", f"{model.count_params():,}"))
    pairs.append(("Takes images of", f"{height}x{width} pixels (height x width)"))
    if run is not None:
        pairs += _training(run)
    labels = data.labels if data is not None else (run.labels if run is not None else ())
    if labels:
        listed = ", ".join(short(label, 30) for label in labels[:12])
        more = f" and {len(labels) - 12:,} more" if len(labels) > 12 else ""
        pairs.append(("Classes", f"{len(labels):,}: {listed}{more}"))
    if data is not None and (run is None or data.source != run.config["data"]["source"]):
        counts = ", ".join(f"{n:,} {name}" for name, n in data.counts.items() if n)
        pairs.append(("Measured on", f"{short(data.source, 200)}: {counts} images"))
    return pairs


def _training(run: Run) -> Pairs:
    config = run.config
    data, result, recipe = config["data"], config.get("result", {}), config.get("recipe", {})
    images = data.get("images", {})
    pairs = [("Images from", short(data["source"], 200))]
    if isinstance(images, Mapping) and images:
        pairs.append(("Images", ", ".join(f"{n:,} {name}" for name, n in images.items())))
    for word, files in (
        ("Left out, damaged", data.get("damaged")),
        ("Replaced, damaged", result.get("replaced")),
    ):
        if files:
            pairs.append((word, _files(files, source=data["source"])))
    epochs, best = result.get("epochs"), result.get("best_epoch")
    if epochs:
        pairs.append(
            (
                "Trained for",
                f"{counted(epochs, 'epoch')}, {counted(result.get('steps'), 'step')} of "
                f"{counted(recipe.get('batch_size'), 'image')}; epoch {best} was kept",
            )
        )
    origin = provenance(run)
    if origin.weights is not None:
        licence = f", licence {origin.licence}" if origin.licence else ""
        pairs.append(("Started from", short(f"{origin.weights}{licence}", 200)))
    if origin.teacher is not None:
        licence = f", licence {origin.teacher_licence}" if origin.teacher_licence else ""
        pairs.append(("Learnt from the teacher", short(f"{origin.teacher}{licence}", 200)))
    if origin.forbids:
        pairs.append(("Their terms", origin.forbids))
    if not result.get("finished", True):
        pairs.append(("Interrupted", "this training has not run to its end"))
    if config.get("objective"):
        pairs.append(("Objective", shown(config["objective"])))
    pairs.append(("Trained at", str(config.get("made", "unknown"))))
    return pairs


def _files(names: Sequence[str], *, source: str) -> str:
    """Returns the number of files, and the first of them, inside the folder of the images."""
    inside = (str(name).removeprefix(f"{source}{os.sep}") for name in names[:5])
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)}: {', '.join(short(name) for name in inside)}{more}"


def unmeasured(run: Run | None) -> str:
    """Returns the first sentence of the report of a run that has no classifier."""
    if run is None:
        return "No images were measured."
    loss = run.config.get("result", {}).get("validation_loss")
    said = "" if loss is None else f" Its validation loss is {loss:.4f}."
    return f"The model was trained without labels, and has no classifier.{said}"


def tables(model: keras.Model, run: Run | None) -> list[tuple[str, Pairs]]:
    """Returns the settings, versions and hashes, each with a heading."""
    config = model.config if isinstance(model, VisionTransformer) else None
    named: list[tuple[str, Mapping[str, Any]]]
    if run is None:
        fields = {} if config is None else config.to_dict()
        versions = {"keras_vit": version.__version__, "keras": keras.__version__}
        named = [("Model", fields), ("Versions", versions)]
    else:
        read = run.config
        names = ("seed", "objective", "trained_parameters")
        others: dict[str, Any] = {name: read[name] for name in names if name in read}
        named = [
            ("Recipe", dict(read.get("recipe", {})) | others),
            ("Model", read.get("model", {})),
            ("Execution", read.get("execution", {})),
            ("Versions", read.get("versions", {})),
            ("Hashes", _hashes(run)),
        ]
    return [(name, [(k, shown(v)) for k, v in flat(one)]) for name, one in named if one]


def _hashes(run: Run) -> dict[str, str]:
    files = [(f"SHA-256 of {name}", run.path / name) for name in (MODEL, SPLITS)]
    hashes = {name: _sha256(file) for name, file in files if file.is_file()}
    state = run.config.get("result", {}).get("state_sha256")
    return hashes | ({"state of the training": state} if state else {})


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def uses(name: str, model: keras.Model, run: Run | None) -> Pairs:
    """Returns commands to go on with, each with a heading, and how to cite."""
    path = shlex.quote(name)
    cite = ("Cite", _PAPER.replace("VERSION", version.__version__))
    if isinstance(model, VisionTransformer) and model.config.classes is None:
        source = shlex.quote(run.config["data"]["source"]) if run is not None else "photos"
        train = f"keras-vit train --data {source} --out NEW-RUN --weights {path}"
        return [("Train a classifier from it", train), ("In Python", _python(name, False)), cite]
    if _is_exported(model):
        predict = f"keras-vit predict {path} IMAGE.jpg\nkeras-vit check {path}"
        return [("Predict, and see whether it is as it was exported", predict), cite]
    predict = f"keras-vit predict {path} IMAGE.jpg\nkeras-vit explain {path} IMAGE.jpg --out seen"
    serve = f"keras-vit export {path} --out EXPORT\n# EXPORT/README.md says how to serve it"
    return [
        ("Predict, and see why", predict),
        ("Export and serve", serve),
        ("In Python", _python(name, run is not None)),
        cite,
    ]


def _python(name: str, is_run: bool) -> str:
    if not is_run:
        return f"import keras_vit\n\nmodel = keras_vit.load({name!r})"
    return (
        "from keras_vit import data, evaluation, training\n\n"
        f"run = training.Run.load({name!r})\n"
        'image = data.read_image("IMAGE.jpg")\n'
        "print(evaluation.predict(run.model, [image], labels=run.labels))"
    )


def _is_exported(model: keras.Model) -> bool:
    """Whether a model has no weights of its own, and asks an exported file."""
    return not model.count_params()


def _model_name(model: keras.Model) -> str:
    if _is_exported(model):
        return f"{short(model.name)}, exported"
    if not isinstance(model, VisionTransformer):
        return f"{type(model).__name__} {short(model.name)}"
    config = model.config
    patch = config.patch_size
    return (
        f"Vision Transformer, {config.num_layers} layers of width {config.hidden_dim}, "
        f"{config.num_heads} heads, patches of {patch}"
    )
