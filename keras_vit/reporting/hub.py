"""A run on the Hugging Face Hub: its model card, and the upload by the Hub's own library.

The card is README.md as https://huggingface.co/docs/hub/model-cards describes it: a YAML header
between two lines of dashes, then Markdown. JSON is YAML: the header's values are written as JSON.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_vit import atomic, environment
from keras_vit.data import resizing_of
from keras_vit.training import Run, read_fields
from keras_vit.training.run import (
    CARD,
    CONFIG,
    FILES,
    METRICS,
    MODEL,
    PROVENANCE,
    RECONSTRUCTIONS,
    REPORT,
    SAMPLE,
    SPLITS,
)
from keras_vit.weights.download import printable
from keras_vit.weights.sources import FOLDER_FILES, hub_parts

# Stands for the address in a card that is not published yet; `push` puts in the right one.
ADDRESS = "hf://owner/name"
# What shows images, or names them; it is published on demand alone.
_WITH_IMAGES = (SPLITS, SAMPLE, RECONSTRUCTIONS, REPORT)
_LICENSE = re.compile(r"^license: .*$(\nlicense_name: .*$)?", re.MULTILINE)
# The licences of the catalogues that the Hub knows by name; others are "other", with their name.
_LISTED = ("apache-2.0", "mit", "cc-by-nc-4.0")
_MOST_LABELS = 50
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|!~])")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A run on the Hub.

    Attributes:
        address: "hf://owner/name", which `keras_vit.load` takes.
        url: of its page.
        commit: the commit that was made.
        files: the names of the files in it.
    """

    address: str
    url: str
    commit: str
    files: tuple[str, ...]


def push(
    path: str | os.PathLike[str],
    address: str,
    *,
    private: bool = False,
    license: str | None = None,
    images: bool = False,
) -> Published:
    """Uploads the files of a run to a repository on the Hub, in one commit.

    The repository is made if there is none. config.json names the folder of the images without the
    path to it. Files that the repository has beside those of the run stay as they are.

    Example:
        >>> push("photos-run", "hf://owner/photos").address  # doctest: +SKIP
        'hf://owner/photos'

    Args:
        path: the run directory.
        address: "hf://owner/name".
        private: whether a repository that is made is private.
        license: what the model card says, such as "apache-2.0"; None to leave it as it is.
        images: whether the files that show images of yours, or name their files, go along: the
            report, the sample, the reconstructions and the list of the splits.

    Raises:
        FileNotFoundError: there is no such run.
        ImportError: the Hub's library is not installed.
        OSError: nobody is logged in, or the Hub cannot be reached or refuses.
        ValueError: `path` is no run, `address` no address, or the repository holds another model.
    """
    repository, revision, file = hub_parts(address, suffixes=())
    if revision is not None or file is not None:
        raise ValueError(f"A run is pushed to hf://owner/name. Received: {address!r}.")
    opened = Run.load(path)  # whole, and loadable
    with environment.installed(f"{address} needs the library huggingface-hub", "huggingface-hub"):
        import huggingface_hub as hub
    if hub.get_token() is None:
        raise PermissionError(
            "Nobody is logged in to the Hugging Face Hub; run hf auth login, or set HF_TOKEN to a "
            "token that may write (https://huggingface.co/settings/tokens)."
        )
    contents = _contents(opened, address, license=license, images=images)
    operations = [
        hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
        for name, content in contents.items()
    ]
    api = hub.HfApi()
    try:
        url = str(api.create_repo(repository, private=private or None, exist_ok=True))
        held = api.list_repo_files(repository)
        # Of these `keras_vit.load` takes the first that there is.
        others = [name for name in FOLDER_FILES[: FOLDER_FILES.index(MODEL)] if name in held]
        if others:
            raise ValueError(
                f"{address} holds another model ({others[0]}), which would be loaded in place of "
                "the run; choose another name, or delete it there."
            )
        message = f"Run of keras-vit {opened.config.get('versions', {}).get('keras_vit', '')}"
        made = api.create_commit(repository, operations, commit_message=message.strip())
    except (hub.errors.HfHubHTTPError, OSError, RuntimeError) as error:
        first = error.__cause__ if isinstance(error, RuntimeError) else error
        reason = printable(str(first or error).strip().partition("\n")[0])
        raise OSError(
            f"{address} could not be written ({reason}); check the name, the token's rights and "
            "the network, and push again."
        ) from None
    return Published(address=address, url=url, commit=made.oid, files=tuple(contents))


def _contents(
    run: Run, address: str, *, license: str | None, images: bool
) -> dict[str, Path | bytes]:
    if not (run.path / CARD).is_file():
        write_card(run)
    contents: dict[str, Path | bytes] = {}
    for name in FILES:
        place = run.path / name
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        if images or name not in _WITH_IMAGES:
            contents |= {
                each.relative_to(run.path).as_posix(): each for each in files if each.is_file()
            }
    config = {**run.config, "data": {**run.config["data"], "source": _data_name(run)}}
    if PROVENANCE in config:  # commands name folders, too
        config[PROVENANCE] = run.provenance.public().to_dict()
    if not images:  # names of files
        config["data"]["damaged"], config["skipped"] = [], {}
        config["result"] = {**run.config.get("result", {}), "replaced": []}
    contents[CONFIG] = f"{json.dumps(config, indent=2)}\n".encode()
    text = (run.path / CARD).read_text(encoding="utf-8").replace(ADDRESS, address)
    if license is not None:
        text = _LICENSE.sub(f"license: {license}", text, count=1)
    contents[CARD] = text.encode()
    return contents


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
    use = f"keras-vit predict {ADDRESS} image.jpg"
    summary = (
        f"A Vision Transformer that tells {len(run.labels)} classes, trained by keras-vit on "
        f"{_escaped(_data_name(run))}."
    )
    if not run.has_classifier:
        use = f"keras-vit train --data photos --out photos-run --weights {ADDRESS}"
        summary = (
            "A Vision Transformer without classifier, trained by keras-vit on unlabelled images."
        )
    versions = ", ".join(f"{key} {value}" for key, value in _fields(run, "versions").items())
    state = _fields(run, "result").get("state_sha256")
    listed = ", ".join(map(_escaped, run.labels[:_MOST_LABELS]))
    rest = len(run.labels) - _MOST_LABELS
    more = f" and {rest} more" if rest > 0 else ""
    sections = (
        f"---\n{_header(run, metrics, name=name)}\n---",
        f"# {_escaped(name)}",
        summary,
        _facts(run),
        _results(metrics),
        f"## Classes\n\n{listed}{more}." if run.labels else "",
        "## How to use it",
        "In a clone of keras-vit, as there is no release yet (`keras-vit` on the package index is "
        "another project):",
        f'```console\npip install -e ".[hub]"\n{use}\n```',
        f'```python\nimport keras_vit\n\nmodel = keras_vit.load("{ADDRESS}")\n```',
        f"## Licence\n\n{_terms(run)}",
        f"## Versions\n\n{_escaped(versions)}; made {run.config.get('made')}. SHA-256 of the "
        f"trained state: `{state}`.",
    )
    return "\n\n".join(filter(None, sections)) + "\n"


def _header(run: Run, metrics: Mapping[str, Any], *, name: str) -> str:
    task = "image-classification" if run.has_classifier else "image-feature-extraction"
    origin = run.provenance.public()
    licence = (origin.licence or "unknown").lower()
    fields: dict[str, Any] = {"license": licence}
    if origin.licence is not None and licence not in _LISTED:
        fields = {"license": "other", "license_name": licence}
    if base := re.match(r"hf://([\w.-]+/[\w.-]+)", origin.weights or ""):
        fields["base_model"] = base[1]
    fields |= {"library_name": "keras", "pipeline_tag": task}
    fields["tags"] = ["keras-vit", "vision-transformer", task]
    if run.has_classifier and metrics:
        data = _data_name(run)
        kind = "imagefolder" if Path(run.config["data"]["source"]).is_absolute() else data
        results = [
            {
                "task": {"type": "image-classification", "name": "Image classification"},
                "dataset": {"name": data, "type": kind, "split": split},
                "metrics": [
                    {"type": measure, "value": values[measure]}
                    for measure in ("accuracy", "top5_accuracy", "loss")
                    if measure in values
                ],
            }
            for split, values in _splits(metrics, {"accuracy"})
        ]
        fields |= {"metrics": ["accuracy"], "model-index": [{"name": name, "results": results}]}
    return "\n".join(f"{name}: {_scalar(value)}" for name, value in fields.items())


def _scalar(value: Any) -> str:
    is_word = isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", value)
    return value if is_word else json.dumps(value)


def _facts(run: Run) -> str:
    model, recipe = _fields(run, "model"), _fields(run, "recipe")
    images = run.config["data"].get("images")
    counts = images.items() if isinstance(images, dict) else ()
    origin = run.provenance
    started = "random weights" if origin.commands else "not recorded"
    steps, epochs = recipe.get("steps"), recipe.get("epochs")
    how = resizing_of(run.model)
    cropped = f" (crop_pct {how.crop_pct:g}, {how.crop_mode})" * (how != how.uncropped)
    facts = {
        "architecture": "Vision Transformer"
        + (f", {model['num_layers']} layers" if "num_layers" in model else "")
        + (f", width {model['hidden_dim']}" if "hidden_dim" in model else ""),
        "parameters": f"{run.model.count_params():,}",
        "input": f"RGB images, resized to {'x'.join(map(str, how.size))} pixels (height x width)"
        f"{cropped}; values 0..255",
        "objective": str(run.config.get("objective", "classification")),
        "images": f"{_data_name(run)}: "
        + ", ".join(f"{count} {split}" for split, count in counts if count),
        "recipe": f"{f'{epochs} epochs' if epochs else f'{steps} steps'}, batches of "
        f"{recipe.get('batch_size')}, {recipe.get('optimizer')}, learning rate "
        f"{recipe.get('learning_rate')}",
        "started from": origin.public().weights or started,
        "seed": str(run.config.get("seed")),
        "epoch kept": str(_fields(run, "result").get("best_epoch")),
    }
    return _table(("", ""), [(name, _escaped(text)) for name, text in facts.items()])


def _results(metrics: Mapping[str, Any]) -> str:
    rows = [
        (split, str(values["images"]), f"{values['accuracy']:.2%}", f"{values['loss']:.4f}")
        for split, values in _splits(metrics, {"images", "accuracy", "loss"})
    ]
    if not rows:
        return ""
    table = _table(("images", "number", "accuracy", "cross-entropy loss"), rows)
    return (
        f"## Results\n\n{table}\n\nThe test images were not used for training, nor to choose the "
        "epoch. `metrics.json` has recall and precision of each class."
    )


def _splits(metrics: Mapping[str, Any], needed: set[str]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (split, values)
        for split, values in metrics.items()
        if isinstance(values, dict) and needed <= values.keys()
    ]


def _terms(run: Run) -> str:
    origin = run.provenance.public()
    of = f" of `{origin.weights}`" if origin.weights else ""
    text = (
        f"Nothing is known of the licence{of}: say it by `keras-vit push RUN {ADDRESS} --license "
        "NAME`, or in the first lines of this file."
    )
    if origin.licence is not None:
        text = f"The training started from `{origin.weights}`, whose licence is {origin.licence}."
    if origin.teacher is not None:
        licence = "not known" if origin.teacher_licence is None else origin.teacher_licence
        text += f" It learnt from the predictions of `{origin.teacher}`; its licence is {licence}."
    return f"{text} {_escaped(origin.restrictions)}".rstrip()


def _fields(run: Run, name: str) -> dict[str, Any]:
    fields = run.config.get(name)
    return fields if isinstance(fields, dict) else {}


def _data_name(run: Run) -> str:
    """Returns the name of the data, of a folder without the path to it, which concerns nobody."""
    source: str = run.config["data"]["source"]
    return source if source.startswith("tfds:") else Path(source).name or source


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines: list[tuple[str, ...]] = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
