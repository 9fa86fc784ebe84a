"""What the model has learned about places and patches, and pictures of what it has."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np

from keras_vit import environment
from keras_vit.config import ViTConfig
from keras_vit.explain import attention
from keras_vit.model import position_layer


@dataclasses.dataclass(frozen=True, eq=False)
class Filters:
    """Principal components of the filters that turn patches into tokens.

    Attributes:
        components: (n, P, P, channels) directions of unit length, the most telling first.
        variance: (n,) fraction of the filters' variance that each holds.
    """

    components: np.ndarray
    variance: np.ndarray


def position_similarity(model: keras.Model) -> np.ndarray:
    """Returns the cosine similarity of the position embeddings (arXiv 2010.11929, Figure 7 centre).

    Example:
        >>> from keras_vit.config import ViTConfig
        >>> from keras_vit.model import VisionTransformer
        >>> config = ViTConfig(input_shape=(16, 24, 3), patch_size=8, hidden_dim=8, mlp_dim=16,
        ...                    num_heads=2, num_layers=1, classes=5)
        >>> position_similarity(VisionTransformer(config)).shape
        (2, 3, 2, 3)

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.

    Returns:
        (h, w, h, w): of the patch in a row and column with every other, from -1 to 1. Where
        every block has a table, of the first block's.

    Raises:
        ValueError: the model adds no position embeddings to its tokens.
    """
    vit = attention.find_vit(model)
    if not vit.config.adds_positions:
        raise ValueError(
            "The model adds no position embeddings to its tokens. Received: a model with "
            f"position_embedding={vit.config.position_embedding!r}."
        )
    layer = vit.get_layer(position_layer(vit.config, 0) or "patch_encoder")
    directions = _unit(
        attention.to_numpy(layer.position_table())[0, vit.config.num_prefix_tokens :]
    )
    return np.asarray((directions @ directions.T).reshape(*vit.config.grid, *vit.config.grid))


def embedding_filters(model: keras.Model, *, count: int = 28) -> Filters:
    """Returns the principal components of the patch embedding (arXiv 2010.11929, Figure 7 left).

    The signs are arbitrary; each component's largest value is made positive.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        count: how many; the paper shows 28. Fewer where there are fewer.

    Raises:
        ValueError: `count` is not positive.
    """
    if count < 1:
        raise ValueError(f"count must be a positive integer. Received: count={count!r}.")
    vit = attention.find_vit(model)
    kernel = attention.to_numpy(vit.get_layer("patch_encoder").projection.kernel)  # (P*P*C, D)
    filters = kernel.T - kernel.mean(axis=1)
    _, strength, components = np.linalg.svd(filters, full_matrices=False)
    largest = np.take_along_axis(
        components, np.abs(components).argmax(axis=1, keepdims=True), axis=1
    )
    size, channels = vit.config.patch_size, vit.config.patch_channels
    components = (components * np.sign(largest)).reshape(-1, size, size, channels)
    total = max(float((strength**2).sum()), np.finfo(np.float32).tiny)
    return Filters(components[:count], strength[:count] ** 2 / total)


def token_similarity(
    model: keras.Model,
    images: Any,
    *,
    token: tuple[int, int] | Literal["class"] = "class",
    layer: int = -1,
) -> np.ndarray:
    """Returns how like each patch's token is to one chosen token, after any block.

    Args:
        model: a `VisionTransformer`, or any Keras model with one inside.
        images: (B, H, W, channels) as that model takes them.
        token: (row, column) of a patch in the grid, or "class" for the class token.
        layer: after which block, 0 the first, -1 the last.

    Returns:
        (B, h, w) cosine similarities from -1 to 1.

    Raises:
        ValueError: there is no such token or layer.
    """
    vit = attention.find_vit(model)
    (index,) = attention.choose(layer, vit.config.num_layers, word="layer")
    place = _place(vit.config, token)
    block = vit.get_layer(f"block_{index}")
    parts = []
    for batch in attention.image_batches(model, images):
        _, records = attention.run(model, batch, [block])
        directions = _unit(attention.to_numpy(records[block][0]))
        similarity = (directions @ directions[:, place, :, None])[..., 0]
        parts.append(attention.on_grid(vit.config, similarity))
    return np.concatenate(parts)


def _place(config: ViTConfig, token: tuple[int, int] | str) -> int:
    if token == "class":
        if config.class_token:
            return 0
        raise ValueError(
            "The model has no class token; choose a patch by its (row, column) in the grid of "
            f"{config.grid[0]} rows and {config.grid[1]} columns of patches."
        )
    rows, columns = config.grid
    if isinstance(token, str) or not (0 <= token[0] < rows and 0 <= token[1] < columns):
        raise ValueError(
            f"There is no patch {token!r}; the grid has {rows} rows and {columns} columns, "
            'numbered from 0. Give (row, column), or "class".'
        )
    return token[0] * columns + token[1] + config.num_prefix_tokens


def _unit(vectors: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, np.finfo(np.float32).tiny))


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Its lightness rises evenly, so a grey print shows the same order.
COLORS = "magma"
# The paper shows every other position of its 14x14 grid.
SHOWN_POSITIONS = 7


@contextlib.contextmanager
def light_on_dark() -> Iterator[None]:
    """Draws what is drawn and saved inside of it in light letters and lines, for a dark page.

    Example:
        >>> with light_on_dark():
        ...     figure = plot_attention_distance(np.ones((2, 3)))
        >>> figure.axes[0].lines[-1].get_color()
        'white'

    Raises:
        ImportError: matplotlib is not installed.
    """
    with environment.pictures():
        import matplotlib.style
    with matplotlib.style.context("dark_background"):
        yield


def plot_heatmap(image: np.ndarray, heatmap: np.ndarray, *, title: str, unit: str) -> "Figure":
    """Draws an image, a heatmap over its patches, and the image lit by the heatmap.

    Example:
        >>> figure = plot_heatmap(np.zeros((32, 48, 3)), np.ones((4, 6)), title="Rollout",
        ...                       unit="share of the patch")
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
    picture = _displayable(image)
    height, width = picture.shape[:2]
    extent = (0, width, height, 0)
    figure = _figure(10.5, 0.6 + 3.4 * min(max(height / width, 0.5), 1.6))
    axes = figure.subplots(1, 3)
    axes[0].imshow(picture, extent=extent, vmin=0, vmax=1, cmap="gray")
    axes[0].set_title("image")
    low, high = float(heatmap.min()), float(heatmap.max())
    scale = {"vmin": low, "vmax": high if high > low else low + 1}
    artist = axes[1].imshow(heatmap, extent=extent, cmap=COLORS, **scale)
    axes[1].set_title(title)
    axes[2].imshow(lit(picture, heatmap), extent=extent)
    axes[2].set_title("image, lit by it")
    for each in axes:
        each.set_xlabel("pixels")
    axes[0].set_ylabel("pixels")
    figure.colorbar(artist, ax=axes, label=unit, shrink=0.9)
    return figure


def plot_heads(heatmaps: np.ndarray, *, title: str, unit: str) -> "Figure":
    """Draws one heatmap for each attention head, all on one scale.

    Args:
        heatmaps: (H, h, w), for instance what the class token takes from each patch.
        title: what they are.
        unit: what their numbers count.

    Raises:
        ImportError: matplotlib is not installed.
    """
    heads = len(heatmaps)
    columns = min(heads, 4 if heads <= 12 else 8)
    rows = -(-heads // columns)
    shape = heatmaps.shape[1] / heatmaps.shape[2]
    figure = _figure(2 + 2.1 * columns, 1.2 + rows * (0.7 + 1.9 * min(max(shape, 0.4), 2)))
    axes = figure.subplots(rows, columns, squeeze=False)
    for index, each in enumerate(axes.flat):
        if index >= heads:
            each.set_axis_off()
            continue
        artist = each.imshow(heatmaps[index], cmap=COLORS, vmin=0, vmax=heatmaps.max())
        each.set_title(f"head {index}")
        _count_patches(each, heatmaps.shape[1:])
    figure.suptitle(title)
    figure.supxlabel("column of the patch")
    figure.supylabel("row of the patch")
    figure.colorbar(artist, ax=axes, label=unit)
    return figure


def plot_attention_distance(distances: np.ndarray) -> "Figure":
    """Draws how far each head looks, by depth (arXiv 2010.11929, Figure 7 right).

    Args:
        distances: (L, H) in pixels, from `mean_attention_distance`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    layers, heads = distances.shape
    figure = _figure(4.8, 3.6)
    axes = figure.subplots()
    ink = axes.xaxis.label.get_color()
    depth = np.arange(layers)
    for head in range(heads):
        axes.plot(
            depth,
            distances[:, head],
            linestyle="none",
            marker="o",
            markersize=5,
            markerfacecolor="0.75",
            markeredgecolor=ink,
            label="one head" if head == 0 else None,
        )
    axes.plot(depth, distances.mean(axis=1), color=ink, label="mean of the heads")
    axes.set(
        xlabel="network depth (layer)",
        ylabel="mean attention distance (pixels)",
        title="How far each head looks",
        ylim=(0, 1.08 * max(float(distances.max()), 1)),
    )
    axes.set_xticks(_spaced_indices(layers, 13))
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
    columns = min(count, 5)
    rows = -(-count // columns)
    figure = _figure(0.8 + 0.8 * columns, 1 + 1.05 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    for index, each in enumerate(axes.flat):
        each.set(xticks=[], yticks=[])
        if index >= count:
            each.set_axis_off()
            continue
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
    light = attention.resample(heatmap[None, ..., None], color.shape[:2], antialias=True)[0]
    low, high = float(light.min()), float(light.max())
    return np.asarray(color * (0.1 + 0.9 * (light - low) / max(high - low, 1e-12)))


def _count_patches(axes: Any, grid: tuple[int, ...]) -> None:
    axes.set_xticks(_spaced_indices(grid[1], 4))
    axes.set_yticks(_spaced_indices(grid[0], 4))


def _spaced_indices(count: int, most: int = SHOWN_POSITIONS) -> list[int]:
    """Returns at most so many indices, the first and the last among them."""
    return sorted({round(x) for x in np.linspace(0, count - 1, min(count, most))})


def _displayable(image: np.ndarray) -> np.ndarray:
    image = np.asarray(image)
    if image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            "An image to draw has the shape (height, width, 3) or (height, width, 1). "
            f"Received: shape {image.shape}."
        )
    scaled = np.clip(image.astype(np.float32) / 255, 0, 1)
    return scaled if image.shape[2] == 3 else scaled[..., 0]


def _figure(width: float, height: float) -> "Figure":
    with environment.pictures():
        import matplotlib.figure
    return matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
