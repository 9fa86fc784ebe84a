"""The model card of a run: README.md with the header that the Hugging Face Hub reads.

The format is that of https://huggingface.co/docs/hub/model-cards: a YAML header between two lines
of dashes, then Markdown. JSON is YAML, so that each value of the header is written as JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_vit import atomic
from keras_vit.training import Provenance, Run, read_fields
from keras_vit.training.run import CARD, METRICS, PROVENANCE

# Stands for the address in a card that is not published yet; `push` puts in the right one.
ADDRESS = "hf://owner/name"
UNKNOWN = "unknown"
# The licences of the catalogues that the Hub knows by name; others are "other", with their name.
_LISTED = ("apache-2.0", "mit", "cc-by-nc-4.0")
_MOST_LABELS = 50
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|!~])")


def write_card(run: Run, *, name: str | None = None) -> Path:
    """Writes the model card of a run into it, whole or not at all, and returns its path.

    The numbers are those of the run's metrics.json, where it has one.

    Args:
        run: the run.
        name: what to call it; None for the name of its folder.
    """
    file = run.path / METRICS
    text = model_card(run, read_fields(file) if file.is_file() else {}, name=name)
    with atomic.whole_file(run.path / CARD) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return run.path / CARD


def model_card(run: Run, metrics: Mapping[str, Any], *, name: str | None = None) -> str:
    """Returns the model card of a run: what was trained on what, its numbers, how to use it.

    Args:
        run: the run.
        metrics: the content of metrics.json; empty where nothing was measured.
        name: what to call it; None for the name of its folder.
    """
    name = run.path.resolve().name if name is None else name
    header = "\n".join(_yaml(_header(run, metrics, name=name)))
    body = "\n\n".join(filter(None, [f"# {_escaped(name)}", *_sections(run, metrics)]))
    return f"---\n{header}\n---\n\n{body}\n"


def _header(run: Run, metrics: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    has_classifier = run.config.get("objective") != "masked-patches"
    task = "image-classification" if has_classifier else "image-feature-extraction"
    fields: dict[str, Any] = {
        **_license(_provenance(run)),
        "library_name": "keras",
        "pipeline_tag": task,
        "tags": ["keras-vit", "vision-transformer", task],
    }
    if has_classifier and metrics:
        fields["metrics"] = ["accuracy"]
        fields["model-index"] = [{"name": name, "results": _results(run, metrics)}]
    return fields


def _origin(run: Run) -> str:
    origin = Provenance.from_dict(run.config.get(PROVENANCE))
    return origin.public().weights or ("fresh weights" if origin.commands else "not recorded")


def _provenance(run: Run) -> Provenance:
    return Provenance.from_dict(run.config.get(PROVENANCE)).public()


def _license(provenance: Provenance) -> dict[str, Any]:
    """Returns the licence as the Hub writes it, and the repository that the weights are from."""
    licence = provenance.licence
    fields: dict[str, Any] = {"license": UNKNOWN}
    if licence is not None:
        named = licence.lower()
        is_listed = named in _LISTED
        fields = {"license": named} if is_listed else {"license": "other", "license_name": named}
    repository = re.match(r"hf://([\w.-]+/[\w.-]+)", provenance.weights or "")
    return fields | ({"base_model": repository[1]} if repository else {})


def _results(run: Run, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the results in the form of the Hub's model-index, one for each split."""
    data = data_name(run)
    kind = "imagefolder" if Path(run.config["data"]["source"]).is_absolute() else data
    return [
        {
            "task": {"type": "image-classification", "name": "Image classification"},
            "dataset": {"name": data, "type": kind, "split": split},
            "metrics": [
                {"type": name, "value": values[name]}
                for name in ("accuracy", "top5_accuracy", "loss")
                if name in values
            ],
        }
        for split, values in metrics.items()
        if isinstance(values, dict) and "accuracy" in values
    ]


def _yaml(fields: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {_scalar(value)}" for name, value in fields.items()]


def _scalar(value: Any) -> str:
    """Returns a value as YAML: a plain word, otherwise JSON."""
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", value)
    return value if is_word else json.dumps(value)


def _sections(run: Run, metrics: Mapping[str, Any]) -> list[str]:
    return [
        _summary(run),
        _what(run),
        _numbers(metrics),
        _classes(run),
        _use(run),
        _terms(run),
        _versions(run),
    ]


def _summary(run: Run) -> str:
    if run.config.get("objective") == "masked-patches":
        return "A Vision Transformer without classifier, trained by keras-vit on unlabelled images."
    data, classes = _escaped(data_name(run)), len(run.labels)
    return f"A Vision Transformer that tells {classes} classes, trained by keras-vit on {data}."


def _what(run: Run) -> str:
    config = run.config
    model, recipe, images = (
        fields if isinstance(fields, dict) else {}
        for fields in (config.get("model"), config.get("recipe"), config["data"].get("images"))
    )
    size = "x".join(map(str, run.image_size))
    counts = ", ".join(f"{count} {split}" for split, count in images.items() if count)
    facts = {
        "architecture": "Vision Transformer"
        + (f", {model['num_layers']} layers" if "num_layers" in model else "")
        + (f", width {model['hidden_dim']}" if "hidden_dim" in model else ""),
        "parameters": f"{run.model.count_params():,}",
        "input": f"RGB images, resized to {size} pixels (height x width); values 0..255",
        "objective": str(config.get("objective", "classification")),
        "images": f"{data_name(run)}: {counts}",
        "recipe": _recipe(recipe),
        "started from": _origin(run),
        "seed": str(config.get("seed")),
        "epoch kept": str(_result(run).get("best_epoch")),
    }
    return _table(("", ""), [(name, _escaped(text)) for name, text in facts.items()])


def _recipe(recipe: Mapping[str, Any]) -> str:
    length = f"{recipe.get('epochs')} epochs" if recipe.get("epochs") else None
    length = length or f"{recipe.get('steps')} steps"
    return (
        f"{length}, batches of {recipe.get('batch_size')}, {recipe.get('optimizer')}, learning "
        f"rate {recipe.get('learning_rate')}"
    )


def _numbers(metrics: Mapping[str, Any]) -> str:
    rows = [
        (split, str(values["images"]), f"{values['accuracy']:.2%}", f"{values['loss']:.4f}")
        for split, values in metrics.items()
        if isinstance(values, dict) and {"images", "accuracy", "loss"} <= values.keys()
    ]
    if not rows:
        return ""
    table = _table(("images", "number", "accuracy", "cross-entropy loss"), rows)
    return (
        f"## Results\n\n{table}\n\nThe test images were not used for training, nor to choose the "
        "epoch. `metrics.json` has recall and precision of each class."
    )


def _classes(run: Run) -> str:
    labels = run.labels
    if not labels:
        return ""
    listed = ", ".join(map(_escaped, labels[:_MOST_LABELS]))
    more = f" and {len(labels) - _MOST_LABELS} more" if len(labels) > _MOST_LABELS else ""
    return f"## Classes\n\n{listed}{more}."


def _use(run: Run) -> str:
    install = 'pip install "keras-vision-transformer[hub]"'
    lines = ["```console", install]
    if run.config.get("objective") == "masked-patches":
        lines += [f"keras-vit train --data photos --out photos-run --weights {ADDRESS}", "```"]
    else:
        lines += [f"keras-vit predict {ADDRESS} image.jpg", "```"]
    lines += ["", "```python", "import keras_vit", "", f'model = keras_vit.load("{ADDRESS}")']
    return "\n".join(["## How to use it", "", *lines, "```"])


def _terms(run: Run) -> str:
    """Returns what is known of the licence, and how to set it."""
    provenance = _provenance(run)
    terms = _escaped(provenance.forbids)
    if provenance.licence is None:
        started = "Nothing is known of the licence"
        started += f" of `{provenance.weights}`" if provenance.weights else ""
        text = (
            f"{started}: say it by `keras-vit push RUN {ADDRESS} --license NAME`, or in the first "
        )
        text += "lines of this file."
    else:
        text = (
            f"The training started from `{provenance.weights}`, whose licence is "
            f"{provenance.licence}."
        )
    if provenance.teacher is not None:
        licence = provenance.teacher_licence
        said = "not known" if licence is None else licence
        text += f" It learnt from the predictions of `{provenance.teacher}`; its licence is {said}."
    return f"## Licence\n\n{text} {terms}".rstrip()


def _versions(run: Run) -> str:
    versions = run.config.get("versions")
    named = versions.items() if isinstance(versions, dict) else ()
    listed = ", ".join(f"{name} {version}" for name, version in named)
    sums = f"SHA-256 of the trained state: `{_result(run).get('state_sha256')}`."
    return f"## Versions\n\n{_escaped(listed)}; made {run.config.get('made')}. {sums}"


def _result(run: Run) -> Mapping[str, Any]:
    result = run.config.get("result")
    return result if isinstance(result, dict) else {}


def data_name(run: Run) -> str:
    """Returns the name of the data, of a folder without the path to it, which concerns nobody."""
    source: str = run.config["data"]["source"]
    return source if source.startswith("tfds:") else Path(source).name or source


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines: list[tuple[str, ...]] = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    """Returns text whose characters mean themselves in Markdown, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
