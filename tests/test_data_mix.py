"""Tests of keras_vit.data.augment."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from keras_vit.data import mix_batch

SEED = (3, 5)


def mixed(
    alpha: float,
    *,
    count: int = 400,
    seed: tuple[int, int] = SEED,
    side: int = 2,
    **options: Any,
) -> tuple[np.ndarray, ...]:
    """Mixes images that are their own number everywhere, and targets that name it."""
    images = np.broadcast_to(
        np.arange(count, dtype=np.float32)[:, None, None, None], (count, side, side + 1, 3)
    )
    images, targets = mix_batch(
        tf.constant(images), tf.eye(count), alpha=alpha, seed=tf.constant(seed, tf.int64), **options
    )
    return np.asarray(images), np.asarray(targets)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0])
def test_mixup_blends_an_image_and_its_target_alike(alpha: float) -> None:
    """Targets stay probabilities, say what is in the image, and the image itself weighs most."""
    images, targets = mixed(alpha)
    numbers = np.arange(len(images))
    assert np.allclose(targets.sum(axis=1), 1, atol=1e-5)
    assert ((targets > 0).sum(axis=1) <= 2).all()
    assert (targets[numbers, numbers] >= 0.5 - 1e-6).all()
    assert np.allclose(images[:, 0, 0, 0], targets @ numbers, atol=0.05)
    assert (images == images[:, :1, :1, :1]).all()


def test_mixup_follows_beta() -> None:
    """The share that is kept has the mean of max(b, 1 - b), b from Beta(1, 1): three quarters."""
    _, targets = mixed(1.0, count=2000)
    kept = targets.max(axis=1)
    assert abs(kept[kept < 1].mean() - 0.75) < 0.02


def test_mixing_is_a_function_of_its_seed() -> None:
    """The same seed mixes the same, another differently, and two alphas of 0 not at all."""
    cases: tuple[dict[str, Any], ...] = ({}, {"cutmix": 1.0})
    for options in cases:
        assert np.array_equal(mixed(0.2, **options)[0], mixed(0.2, **options)[0])
        assert not np.array_equal(mixed(0.2, **options)[0], mixed(0.2, seed=(3, 6), **options)[0])
    assert np.array_equal(mixed(0.0)[1], np.eye(400))


def test_cutmix_pastes_one_rectangle_and_shares_the_target_by_area() -> None:
    """Pixels are the image's or the other's, these a full rectangle; the share is the area."""
    images, targets = mixed(0.0, side=12, cutmix=1.0)
    for number, (image, target) in enumerate(zip(images[..., 0], targets, strict=True)):
        pasted = image != number
        rows, columns = pasted.any(axis=1), pasted.any(axis=0)
        assert len(np.unique(image[pasted])) <= 1
        assert pasted.sum() == rows.sum() * columns.sum()
        if pasted.any():
            assert target[int(image[pasted][0])] == pytest.approx(pasted.mean(), abs=1e-6)
        assert target[number] == pytest.approx(1 - pasted.mean(), abs=1e-6)


def test_cutmix_follows_the_paper() -> None:
    """Sides are those of area 1 - b around a uniform centre, so that the border cuts many."""
    images, _ = mixed(0.0, count=3000, side=40, cutmix=1.0)
    pasted = images[..., 0] != np.arange(3000)[:, None, None]
    drawn = np.random.default_rng(0)
    shares, y, x = drawn.uniform(size=(3, 200_000))
    side = np.sqrt(1 - shares)
    expected = (np.minimum(y + side / 2, 1) - np.maximum(y - side / 2, 0)) * (
        np.minimum(x + side / 2, 1) - np.maximum(x - side / 2, 0)
    )
    assert pasted.mean() == pytest.approx(expected.mean(), abs=0.02)
    assert pasted[:, 0, 0].mean() == pytest.approx(
        ((y < side / 2) & (x < side / 2)).mean(), abs=0.02
    )


def test_both_mixtures_have_equal_chances() -> None:
    """With two alphas about half of the images are blended, the others pasted into."""
    images, _ = mixed(8.0, count=1000, side=12, cutmix=8.0)
    numbers = np.arange(1000)[:, None, None]
    blended = (images[..., 0] != numbers).all(axis=(1, 2))
    assert 420 < blended.sum() < 580


@pytest.mark.parametrize("options", [{}, {"cutmix": 1.0}])
def test_workers_mix_with_their_own_images(options: dict[str, Any]) -> None:
    """The second of two workers draws its part of the shares, and a permutation of its own."""
    _, whole = mixed(0.3, count=100, side=30, **options)
    parts = [mixed(0.3, count=50, side=30, shard=(index, 2), **options)[1] for index in (0, 1)]

    for index, part in enumerate(parts):
        rows = np.arange(50)
        single = part[rows, rows]
        together = whole[rows + 50 * index, rows + 50 * index]
        other = (single == 1) | (together == 1)  # mixed with itself
        assert np.allclose(single[~other], together[~other], atol=1e-6)
        assert (~other).sum() > 30
    assert not np.array_equal(parts[0] > 0, parts[1] > 0)


@pytest.mark.parametrize("options", [{"alpha": 0.4}, {"alpha": 0.0, "cutmix": 1.0}])
def test_a_batch_can_have_one_share(options: dict[str, Any]) -> None:
    """Each image is mixed with the one before it, all by the same share, or rectangle."""
    shares = set()
    for seed in range(6):
        images, targets = mixed(**options, count=7, side=12, per="batch", seed=(3, seed))
        numbers = np.arange(7)
        kept, other = targets[numbers, numbers], targets[numbers, numbers - 1]
        assert np.allclose(kept, kept[0])
        assert np.allclose(kept + other, 1)
        pasted = images[..., 0] != numbers[:, None, None]
        assert (pasted == pasted[:1]).all()
        if options["alpha"]:
            assert kept[0] >= 0.5
            assert np.allclose(images[:, 0, 0, 0], targets @ numbers, atol=1e-4)
        shares.add(float(kept[0]))
    assert len(shares) > 3


def test_one_share_for_a_batch_follows_beta() -> None:
    """As big_vision draws it: the mean of max(b, 1 - b), b from Beta(1, 1), is three quarters."""
    shares = [mixed(1.0, count=2, per="batch", seed=(1, seed))[1].max() for seed in range(300)]
    assert abs(np.mean(shares) - 0.75) < 0.03


def test_one_mixture_is_chosen_for_a_batch() -> None:
    """With two alphas a batch is blended as a whole or pasted into as a whole, about half each."""
    blended = 0
    for seed in range(60):
        images, _ = mixed(8.0, count=4, side=12, cutmix=8.0, per="batch", seed=(2, seed))
        changed = (images[..., 0] != np.arange(4)[:, None, None]).all(axis=(1, 2))
        assert changed.all() or not changed.any()
        blended += int(changed.all())
    assert 15 < blended < 45


def test_workers_share_the_draw_for_a_batch() -> None:
    """Each mixes its own images, both by the share that a single worker would draw."""
    whole = mixed(0.3, count=8, per="batch")[1].max()
    parts = [mixed(0.3, count=4, per="batch", shard=(index, 2))[1].max() for index in (0, 1)]
    assert parts == [whole, whole]
