"""Tests of keras_vit.figures."""

import sys
import types
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import variants_oracle
from conftest import TINY
from matplotlib.figure import Figure

from keras_vit import VisionTransformer, explain, figures

GENERATOR = np.random.default_rng(0)
IMAGE = GENERATOR.integers(0, 256, (32, 48, 3), dtype=np.uint8)
EPOCH = types.SimpleNamespace(epoch=1, loss=1.0, validation_loss=1.0, accuracy=None)
HEATMAP = GENERATOR.uniform(0, 1, (4, 6))
FIGURES: dict[str, Callable[[], Figure]] = {
    "heatmap": lambda: explain.plot_heatmap(IMAGE, HEATMAP, title="rollout", unit="share"),
    "grey image": lambda: explain.plot_heatmap(IMAGE[..., :1], HEATMAP, title="x", unit="y"),
    "heads": lambda: explain.plot_heads(
        GENERATOR.uniform(0, 1, (5, 4, 6)), title="heads", unit="weight"
    ),
    "many heads": lambda: explain.plot_heads(np.ones((16, 14, 14)), title="heads", unit="weight"),
    "distance": lambda: explain.plot_attention_distance(GENERATOR.uniform(0, 90, (24, 16))),
    "positions": lambda: explain.plot_position_similarity(GENERATOR.uniform(-1, 1, (4, 6, 4, 6))),
    "filters": lambda: explain.plot_filters(
        explain.Filters(GENERATOR.standard_normal((10, 8, 8, 3)), np.full(10, 0.1))
    ),
    "confusion": lambda: figures.plot_confusion(np.array([[3, 1], [0, 2]]), ("a", "b")),
    "curves": lambda: figures.plot_curves([EPOCH], best_epoch=1),
    "rows": lambda: figures.plot_rows({"image": GENERATOR.uniform(-1, 1, (2, 8, 8, 3))}),
}


# What stands on the axes and scales of some of them.
WORDS = {
    "heatmap": {"pixels", "share", "rollout", "image"},
    "heads": {"row of the patch", "column of the patch", "weight", "head 4"},
    "distance": {"network depth (layer)", "mean attention distance (pixels)"},
    "positions": {"row of the patch", "column of the patch", "cosine similarity"},
    "filters": {"each 8x8 pixels; grey is zero", "10.0 %"},
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_picture_is_drawn(name: str, tmp_path: Path) -> None:
    """Without a warning, not in one flat colour; axes and scales carry their names and units."""
    figure = FIGURES[name]()
    figure.savefig(tmp_path / "picture.png", dpi=50)
    assert matplotlib.image.imread(tmp_path / "picture.png").std() > 0.02
    texts = {figure.get_supxlabel(), figure.get_supylabel(), figure.get_suptitle()}
    for axes in figure.axes:
        texts |= {axes.get_xlabel(), axes.get_ylabel(), axes.get_title()}
    assert WORDS.get(name, set()) <= texts


def test_the_heatmap_lies_over_the_image() -> None:
    """All three panels share the image's extent in pixels, oblong images too.

    The last panel is bright where the heatmap is high and dark where it is low.
    """
    heatmap = np.zeros((4, 6))
    heatmap[1, 4] = 1
    figure = explain.plot_heatmap(np.full((32, 48, 3), 255), heatmap, title="", unit="")
    panels = [axes.get_images()[0] for axes in figure.axes[:3]]
    assert [tuple(panel.get_extent()) for panel in panels] == [(0, 48, 32, 0)] * 3
    np.testing.assert_array_equal(panels[1].get_array(), heatmap)
    lit = np.asarray(panels[2].get_array())
    assert lit[12, 36].min() > 0.95
    assert lit[28, 4].max() < 0.15


@pytest.mark.parametrize(("spread", "is_stretched"), [(0, False), (0.01, False), (0.5, True)])
def test_noise_is_not_drawn_as_evidence(spread: float, is_stretched: bool) -> None:
    """Attention of 0.0625 to 0.0631 has one colour, and a title that says so."""
    heatmap = 0.0625 * (1 + spread * np.eye(4, 6))
    figure = explain.plot_heatmap(np.full((32, 48, 3), 255), heatmap)
    title = "heatmap" if is_stretched else "heatmap\nnearly uniform: no patch stands out"
    assert figure.axes[1].get_title() == title
    low, high = figure.axes[1].get_images()[0].get_clim()
    share = np.ptp(heatmap) / (high - low)
    assert share == pytest.approx(1 if is_stretched else 5 * spread, rel=0.1)
    lit = np.asarray(figure.axes[2].get_images()[0].get_array())
    assert (lit.min() < 0.2) == is_stretched  # nothing is dark beside noise


def test_heads_share_one_scale() -> None:
    """A faint head looks faint beside a strong one."""
    heads = np.ones((2, 4, 6)) * np.array([1, 9])[:, None, None]
    figure = explain.plot_heads(heads, title="", unit="")
    assert {panel.get_images()[0].get_clim() for panel in figure.axes[:2]} == {(0, 9)}


def test_the_distance_is_drawn_by_depth() -> None:
    """Each head has a marker in each layer; the legend tells heads from their mean."""
    distances = GENERATOR.uniform(0, 90, (3, 4))
    axes = explain.plot_attention_distance(distances).axes[0]
    *heads, mean = axes.get_lines()
    np.testing.assert_array_equal([line.get_ydata() for line in heads], distances.T)
    np.testing.assert_allclose(np.asarray(mean.get_ydata()), distances.mean(axis=1))
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one head", "mean of the heads"]
    assert axes.get_ylim()[1] > distances.max()


def test_a_large_grid_shows_evenly_spaced_positions() -> None:
    """Of 24x24 positions 7x7 tiles are drawn, corners included."""
    figure = explain.plot_position_similarity(np.zeros((24, 24, 24, 24)))
    assert len(figure.axes) == 7 * 7 + 1
    assert {axes.get_xlabel() for axes in figure.axes} >= {"0", "23"}


def test_what_cannot_be_drawn_is_refused() -> None:
    """Filters of a hybrid, which act on features; an image of another shape; no filters."""
    with pytest.raises(ValueError, match="64 channels of a ResNet stem"):
        explain.plot_filters(explain.Filters(np.ones((2, 4, 4, 64)), np.ones(2)))
    with pytest.raises(ValueError, match=r"shape \(2, 32, 48, 3\)"):
        explain.plot_heatmap(np.zeros((2, 32, 48, 3)), HEATMAP, title="", unit="")
    with pytest.raises(ValueError, match="count=0"):
        explain.embedding_filters(VisionTransformer(TINY), count=0)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pip command is in it, of every figure; the arrays need no matplotlib."""
    for module in ("matplotlib.figure", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
        for draw in (FIGURES | {"mistakes": lambda: figures.plot_mistakes((), ())}).values():
            with pytest.raises(ImportError, match=r"pip install matplotlib"):
                draw()


def test_filters_are_the_eigenvectors_of_the_filters_covariance(tiny: VisionTransformer) -> None:
    """Components and variance are those of `numpy.linalg.eigh`, up to the sign."""
    kernel = variants_oracle.arrays(tiny)["patch_encoder/projection/kernel"]
    values, vectors = np.linalg.eigh(np.cov(kernel))
    actual = explain.embedding_filters(tiny, count=5)
    np.testing.assert_allclose(actual.variance, values[::-1][:5] / values.sum(), rtol=1e-4)
    for component, expected in zip(actual.components, vectors.T[::-1], strict=False):
        assert component.shape == (8, 8, 3)
        unit = component.ravel() / np.linalg.norm(component)
        np.testing.assert_allclose(abs(unit @ expected), 1, atol=1e-4)
        assert component.flat[np.abs(component).argmax()] > 0
    assert len(explain.embedding_filters(tiny).components) == 24  # no more than there are filters
