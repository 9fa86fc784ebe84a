"""All figures that matplotlib draws, from arrays: what a model sees, training curves, confusions.

Each function returns a `matplotlib.figure.Figure`, which `savefig` writes to a file.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_vit import environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Its lightness rises evenly, so a grey print shows the same order.
COLORS = "magma"
# The paper shows every other position of its 14x14 grid.
SHOWN_POSITIONS = 7
# The range of colours is at least this share of a map's mean: 0.0625 to 0.0631 are no evidence.
LEAST_RANGE = 0.2
UNIFORM = "nearly uniform: no patch stands out"
# Up to so many classes each cell shows its number and each row its label.
_NUMBERED, _LABELLED = 20, 100


@dataclasses.dataclass(frozen=True, eq=False)
class Filters:
    """Principal components of the filters that turn patches into tokens.

    Attributes:
        components: (n, P, P, channels) directions of unit length, the most telling first.
        variance: (n,) fraction of the filters' variance that each holds.
    """

    components: np.ndarray
    variance: np.ndarray


@contextlib.contextmanager
def light_on_dark() -> Iterator[None]:
    """Draws what is drawn and saved inside of it in light letters and lines, for a dark page.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with environment.pictures():
        import matplotlib.style
    with matplotlib.style.context("dark_background"):
        yield


def plot_heatmap(
    image: np.ndarray, heatmap: np.ndarray, *, title: str = "heatmap", unit: str = "value"
) -> "Figure":
    """Draws an image, a heatmap over its patches, and the image lit by the heatmap.

    Example:
        >>> figure = plot_heatmap(np.zeros((32, 48, 3)), np.eye(4, 6), title="Rollout",
        ...                       unit="share of the answer")
        >>> [axes.get_title() for axes in figure.axes[:3]]
        ['image', 'Rollout', 'image, lit by it']

    Args:
        image: (H, W, channels) pixels 0..255.
        heatmap: (h, w) values of its patches, as `attention_rollout` and `class_relevance` give
            them for one image.
        title: what the heatmap is.
        unit: what its numbers count.

    Raises:
        ImportError: matplotlib is not installed.
    """
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            "An image to draw has the shape (height, width, 3) or (height, width, 1). "
            f"Received: shape {image.shape}."
        )
    picture = np.clip(image.astype(np.float32) / 255, 0, 1)
    if image.shape[2] == 1:
        picture = picture[..., 0]
    height, width = picture.shape[:2]
    extent = (0, width, height, 0)
    figure = _figure(10.5, 0.6 + 3.4 * min(max(height / width, 0.5), 1.6))
    axes = figure.subplots(1, 3)
    axes[0].imshow(picture, extent=extent, vmin=0, vmax=1, cmap="gray")
    axes[0].set_title("image")
    low, high = color_range(heatmap)
    artist = axes[1].imshow(heatmap, extent=extent, cmap=COLORS, vmin=low, vmax=high)
    axes[1].set_title(f"{title}\n{UNIFORM}" if is_uniform(heatmap) else title)
    axes[2].imshow(lit(picture, heatmap), extent=extent)
    axes[2].set_title("image, lit by it")
    for each in axes:
        each.set_xlabel("pixels")
    axes[0].set_ylabel("pixels")
    figure.colorbar(artist, ax=axes, label=unit, shrink=0.9)
    return figure


def plot_heads(
    heatmaps: np.ndarray, *, title: str = "attention heads", unit: str = "attention weight"
) -> "Figure":
    """Draws one heatmap for each attention head, all on one scale.

    Args:
        heatmaps: (H, h, w), for instance what the class token takes from each patch.
        title: what they are.
        unit: what their numbers count.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shape = heatmaps.shape[1] / heatmaps.shape[2]
    most, size = 4 if len(heatmaps) <= 12 else 8, (2.1, 0.7 + 1.9 * min(max(shape, 0.4), 2))
    figure, axes = _tiles(len(heatmaps), most, size, (2, 1.2))
    for index, each in enumerate(axes):
        artist = each.imshow(heatmaps[index], cmap=COLORS, vmin=0, vmax=heatmaps.max())
        each.set_title(f"head {index}")
        each.set_xticks(_spaced_indices(heatmaps.shape[2], 4))
        each.set_yticks(_spaced_indices(heatmaps.shape[1], 4))
    figure.suptitle(title)
    figure.supxlabel("column of the patch")
    figure.supylabel("row of the patch")
    figure.colorbar(artist, ax=figure.axes, label=unit)
    return figure


def plot_attention_distance(distances: np.ndarray) -> "Figure":
    """Draws how far each head looks, by depth (arXiv 2010.11929, Figure 7 right).

    Args:
        distances: (L, H) in pixels, from `mean_attention_distance`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _figure(4.8, 3.6)
    axes = figure.subplots()
    ink = axes.xaxis.label.get_color()
    first, *_ = axes.plot(distances, "o", markersize=5, markerfacecolor="0.75", color=ink)
    first.set_label("one head")
    axes.plot(distances.mean(axis=1), color=ink, label="mean of the heads")
    axes.set(
        xlabel="network depth (layer)",
        ylabel="mean attention distance (pixels)",
        title="How far each head looks",
        ylim=(0, 1.08 * max(float(distances.max()), 1)),
    )
    axes.set_xticks(_spaced_indices(len(distances), 13))
    axes.legend()
    return figure


def plot_position_similarity(similarity: np.ndarray) -> "Figure":
    """Draws the similarity of position embeddings (arXiv 2010.11929, Figure 7 centre).

    Each tile is one patch's similarity with all; of large grids evenly spaced patches are shown.

    Args:
        similarity: (h, w, h, w), from `position_similarity`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    height, width = similarity.shape[:2]
    rows, columns = _spaced_indices(height), _spaced_indices(width)
    figure = _figure(1.7 + 0.45 * len(columns), 1.2 + 0.45 * len(rows) * height / width)
    axes: Any = figure.subplots(len(rows), len(columns), squeeze=False)
    for i, j in np.ndindex(axes.shape):
        tile = similarity[rows[i], columns[j]]
        artist = axes[i, j].imshow(tile, cmap=COLORS, vmin=-1, vmax=1)
        axes[i, j].set(xticks=[], yticks=[])
    for i, row in enumerate(rows):
        axes[i, 0].set_ylabel(str(row))
    for j, column in enumerate(columns):
        axes[-1, j].set_xlabel(str(column))
    figure.suptitle("Position embedding similarity")
    figure.supxlabel("column of the patch")
    figure.supylabel("row of the patch")
    figure.colorbar(artist, ax=axes, label="cosine similarity")
    return figure


def plot_filters(filters: Filters) -> "Figure":
    """Draws the principal components of the patch embedding (arXiv 2010.11929, Figure 7 left).

    Args:
        filters: from `embedding_filters`, of a model that embeds pixels.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the filters act on a ResNet's features, not on pixels.
    """
    count, size, _, channels = filters.components.shape
    if channels not in (1, 3):
        raise ValueError(
            f"These filters act on {channels} channels of a ResNet stem, not on pixels; only "
            "filters with 1 or 3 channels can be drawn."
        )
    figure, axes = _tiles(count, 5, (0.8, 1.05), (0.8, 1))
    for index, each in enumerate(axes):
        each.set(xticks=[], yticks=[])
        component = filters.components[index]
        scaled = 0.5 + 0.5 * component / np.abs(component).max()
        each.imshow(scaled, vmin=0, vmax=1, cmap="gray")
        each.set_title(f"{100 * filters.variance[index]:.1f} %", fontsize=9)
    figure.suptitle("Embedding filters:\nprincipal components, share of variance")
    figure.supxlabel(f"each {size}x{size} pixels; grey is zero", fontsize=10)
    return figure


def lit(picture: np.ndarray, heatmap: np.ndarray) -> np.ndarray:
    """Returns a picture, 0..1, multiplied by a heatmap (h, w), smoothed to its size, 1 at most."""
    color = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=-1)
    values, size = heatmap[..., None].astype(np.float32), color.shape[:2]
    light = keras.ops.image.resize(values, size, antialias=True, data_format="channels_last")
    light = keras.ops.convert_to_numpy(light)
    low, high = color_range(light)
    return np.asarray(color * (0.1 + 0.9 * (light - low) / (high - low)))


def is_uniform(heatmap: np.ndarray) -> bool:
    """Whether the values of a map differ so little that no patch stands out."""
    return float(np.ptp(heatmap)) <= LEAST_RANGE * float(np.abs(heatmap).mean())


def color_range(heatmap: np.ndarray) -> tuple[float, float]:
    """Returns the values that have the first colour and the last, so far apart that noise has one.

    The range grows downwards: of a picture lit by a map that is uniform, nothing is dark.
    """
    low, high = float(heatmap.min()), float(heatmap.max())
    least = LEAST_RANGE * float(np.abs(heatmap).mean()) or 1.0
    return min(low, high - least), high


def plot_confusion(confusion: np.ndarray, labels: Sequence[str]) -> "Figure":
    """Draws the confusion matrix, true classes in rows, each row in per cent of its images.

    Args:
        confusion: (C, C) images of each class (row) predicted as each (column).
        labels: the name of each class.

    Raises:
        ImportError: matplotlib is not installed.
    """
    side = min(max(3.5 + 0.45 * len(labels), 4.5), 14)
    figure = _figure(side + 0.8, side)
    import matplotlib.colors

    axes = figure.subplots()
    share = 100 * confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    # The square root lets one image in a hundred be seen.
    scale = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=100)
    picture = axes.imshow(share, cmap="Greys", norm=scale)
    figure.colorbar(picture, ax=axes, label="per cent of the class", shrink=0.8)
    right = 100 * float(np.trace(confusion)) / int(confusion.sum())
    axes.set(
        xlabel="predicted class",
        ylabel="true class",
        title=f"{int(confusion.sum())} images, {right:.2f} % right",
    )
    every = -(-len(labels) // _LABELLED)  # of very many classes each second, each third, ...
    places = range(0, len(labels), every)
    short = [_short(labels[place]) for place in places]
    size = 10 if len(labels) <= _NUMBERED else 7 if len(labels) <= 50 else 5
    turn = 90 if max(map(len, short)) > 2 else 0
    axes.set_xticks(places, short, rotation=turn, fontsize=size, parse_math=False)
    axes.set_yticks(places, short, fontsize=size, parse_math=False)
    if len(labels) <= _NUMBERED:
        _number_cells(axes, confusion, share)
    return figure


def plot_mistakes(mistakes: Sequence[Any], images: Sequence[np.ndarray]) -> "Figure":
    """Draws mistakes with their images: the true class of each, and the predicted one.

    Args:
        mistakes: from `evaluation.confident_mistakes`.
        images: (H, W, 3) pixels of each of them.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no mistakes to draw.
    """
    with environment.pictures():
        import matplotlib.figure  # noqa: F401
    if not mistakes:
        raise ValueError("There are no mistakes to draw.")
    figure, tiles = _tiles(len(mistakes), 4, (2.6, 3.0), (0, 0), h_pad=0.15)
    for axes, mistake, image in zip(tiles, mistakes, images, strict=False):
        axes.imshow(image)
        axes.set_title(
            f"{_short(mistake.label)}\npredicted as {_short(mistake.predicted)}, "
            f"{100 * mistake.probability:.1f} %",
            fontsize=9,
            parse_math=False,
        )
        axes.set_xlabel(_short(Path(mistake.name).name), fontsize=7, parse_math=False)
    for axes in tiles:
        axes.set(xticks=[], yticks=[])
    return figure


def plot_curves(history: Sequence[Any], *, best_epoch: int) -> "Figure":
    """Draws the loss of each epoch, and the accuracy where there is one.

    Args:
        history: `training.EpochDone` of each epoch.
        best_epoch: the epoch whose model is kept.

    Raises:
        ImportError: matplotlib is not installed.
    """
    names = ("loss", "accuracy") if history[0].accuracy is not None else ("loss",)
    figure = _figure(4.5 * len(names), 3.6)
    import matplotlib.ticker

    epochs = [record.epoch for record in history]
    marker = "o" if len(history) == 1 else None  # a line needs two points
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        training = [getattr(record, name) for record in history]
        validation = [getattr(record, f"validation_{name}") for record in history]
        # The line styles differ too, for readers who cannot tell the colours apart.
        axes.plot(epochs, training, "--", color="0.45", marker=marker, label="training (varied)")
        axes.plot(epochs, validation, "-", color="tab:blue", marker=marker, label="validation")
        axes.axvline(best_epoch, color="black", linestyle=":", linewidth=1, label="epoch kept")
        axes.set(xlabel="epoch", ylabel=name)
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("cross-entropy loss" if len(names) > 1 else "mean squared error")
    figure.axes[0].set_ylim(bottom=0)
    for axes in figure.axes[1:]:
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    return figure


def plot_rows(rows: Mapping[str, np.ndarray]) -> "Figure":
    """Draws rows of images, each with its name, for instance of reconstructions.

    Args:
        rows: (B, H, W, channels) pixels in [-1, 1] by the name of the row.

    Raises:
        ImportError: matplotlib is not installed.
    """
    count = len(next(iter(rows.values())))
    figure = _figure(1.3 * count + 1.1, 5.6)
    grid = figure.subplots(len(rows), count, squeeze=False)
    for row, (name, images) in zip(grid, rows.items(), strict=True):
        row[0].set_ylabel(name)
        for axes, image in zip(row, images, strict=True):
            axes.imshow(np.clip((image + 1) / 2, 0, 1), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
    return figure


def _spaced_indices(count: int, most: int = SHOWN_POSITIONS) -> list[int]:
    return sorted({round(x) for x in np.linspace(0, count - 1, min(count, most))})


def _short(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:19]}…"


def _number_cells(axes: Any, confusion: np.ndarray, share: np.ndarray) -> None:
    for (row, column), count in np.ndenumerate(confusion):
        if count:
            color = "white" if share[row, column] > 25 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color)


def _tiles(
    count: int, most: int, size: tuple[float, float], around: tuple[float, float], **padding: Any
) -> "tuple[Figure, list[Any]]":
    columns = min(count, most)
    rows = -(-count // columns)
    width, height = (a + n * each for a, n, each in zip(around, (columns, rows), size, strict=True))
    figure = _figure(width, height, **padding)
    axes: Any = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat[count:]:
        each.set_axis_off()
    return figure, list(axes.flat[:count])


def _figure(width: float, height: float, **padding: Any) -> "Figure":
    with environment.pictures():
        import matplotlib.figure
        import matplotlib.layout_engine
    layout = matplotlib.layout_engine.ConstrainedLayoutEngine(**padding)
    return matplotlib.figure.Figure(figsize=(width, height), layout=layout)
