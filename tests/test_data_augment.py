"""Tests of keras_vit.data.augment."""

from collections.abc import Callable
from typing import Any

import numpy as np
import published
import pytest
import scipy.stats
import tensorflow as tf

from keras_vit.data import Augmentation, augment, mix_batch

SEED = (3, 5)
WRONG: list[tuple[dict[str, Any], str]] = published.TABLES["wrong augmentation"]
VALUE = 300.0  # no noise has it
COUNT = 3000
# Two samples of COUNT from one distribution lie further apart once in ten thousand times
# (Kolmogorov and Smirnov: sqrt(log(2 / 1e-4) / COUNT)).
BOUND = 0.058
# Shapes of images, from photographs to strips in which hardly a part of the aspect fits.
SHAPES = [(375, 500), (500, 375), (64, 64), (90, 800), (800, 90), (7, 5)]
AREAS = [0.05, 0.3]


def picture(batch: int = 64, height: int = 9, width: int = 11) -> np.ndarray:
    """Images with one bright pixel off the middle."""
    images = np.zeros((batch, height, width, 3), np.float32)
    images[:, 2, 3] = 200
    return images


def moved(images: np.ndarray, *, seed: Any = SEED, shard: Any = (0, 1), **fields: Any) -> Any:
    augmentation = Augmentation(**fields)
    return np.asarray(
        augment.transform_batch(images, augmentation=augmentation, seed=seed, shard=shard)
    )


def test_images_are_a_function_of_the_seed() -> None:
    """Also in a graph; halves, transformed by two workers, are the whole to the bit."""
    fields: dict[str, Any] = {"rotation": 20, "shift": 0.2, "zoom": 0.2, "flip": True}
    first = moved(picture(), **fields)
    graph = tf.function(
        lambda images: augment.transform_batch(
            images, augmentation=Augmentation(**fields), seed=SEED
        )
    )
    halves = [moved(picture()[:32], shard=(index, 2), **fields) for index in (0, 1)]

    assert np.array_equal(moved(picture(), **fields), first)
    assert not np.array_equal(moved(picture(), seed=(3, 6), **fields), first)
    assert np.array_equal(np.concatenate(halves), first)
    assert np.allclose(graph(picture()), first, atol=1e-3)
    assert np.array_equal(moved(picture()), picture())  # the simplest augmentation is none


def test_flipping_mirrors_about_half_of_the_images_exactly() -> None:
    """Each image is either itself or its mirror image, to the bit, and both occur."""
    images = picture(batch=200)
    actual = moved(images, flip=True)
    same = (actual == images).all(axis=(1, 2, 3))
    mirrored = (actual == images[:, :, ::-1]).all(axis=(1, 2, 3))

    assert (same | mirrored).all()
    assert 60 < mirrored.sum() < 140


def test_moves_stay_within_their_limits_and_reach_them() -> None:
    """A shift of a tenth of the side to all sides; 30 degrees about the middle; a zoom by 1.25."""

    def places(row: int, column: int, *, side: int = 21, **fields: float) -> np.ndarray:
        """Where a bright pixel ends in 300 images, from the middle."""
        images = np.zeros((300, side, side, 3), np.float32)
        images[:, row, column] = 200
        light = moved(images, **fields)[..., 0]
        weights = light / light.sum(axis=(1, 2), keepdims=True)
        centers = [(weights * place).sum((1, 2)) for place in np.indices((side, side))]
        return np.stack(centers, axis=1) - side // 2

    shifts = places(10, 10, shift=0.1)
    assert np.abs(shifts).max() <= 2.1 + 1e-4
    assert (shifts.max(axis=0) > 1.5).all()
    assert (shifts.min(axis=0) < -1.5).all()

    turned = places(10, 18, rotation=30)  # eight pixels to the right of the middle
    angles = np.degrees(np.arctan2(turned[:, 0], turned[:, 1]))
    assert np.abs(angles).max() <= 31
    assert angles.max() > 25
    assert angles.min() < -25
    assert np.hypot(*turned.T) == pytest.approx(np.full(300, 8.0), abs=0.3)

    distances = places(20, 28, side=41, zoom=0.25)[:, 1]
    assert 8 / 1.25 - 0.3 <= distances.min() < 7
    assert 9.3 < distances.max() <= 8 * 1.25 + 0.3


def test_impossible_strengths_are_errors() -> None:
    """One out of range is named with its limits; two kinds of crops exclude each other."""
    for fields, message in WRONG:
        with pytest.raises(ValueError, match=message):
            Augmentation(**fields)


def erased(probability: float, *, count: int = 400, **options: Any) -> np.ndarray:
    images = np.full((count, 30, 40, 3), VALUE, np.float32)
    return np.asarray(
        augment.erase_rectangles(images, probability=probability, seed=SEED, **options)
    )


def test_one_rectangle_of_the_paper_s_sizes_is_lost() -> None:
    """As many images as asked for lose a full rectangle of 2 to 40 per cent, anywhere."""
    lost = (erased(0.25) != VALUE).all(axis=-1)
    hit = lost.any(axis=(1, 2))
    heights, widths = lost.any(axis=2).sum(axis=1)[hit], lost.any(axis=1).sum(axis=1)[hit]
    areas = lost[hit].mean(axis=(1, 2))

    assert 70 < hit.sum() < 130
    assert np.array_equal(lost[hit].sum(axis=(1, 2)), heights * widths)
    assert areas.min() > 0.01
    assert areas.max() < 0.43
    assert areas.std() > 0.08
    assert (heights / 30 > 1.5 * widths / 40).any()
    assert (widths / 40 > 1.5 * heights / 30).any()
    assert lost.any(axis=(0, 1)).all()
    assert lost.any(axis=(0, 2)).all()


def test_what_is_lost_becomes_noise_of_the_whole_range() -> None:
    """Each value is random, another in each channel and image; workers' parts are the whole's."""
    actual = erased(1.0, count=60)
    noise = actual[actual != VALUE]

    assert set(np.unique(noise)) == set(range(256))
    assert noise.mean() == pytest.approx(127.5, abs=2)
    assert noise.std() == pytest.approx(np.arange(256).std(), abs=2)
    parts = [erased(0.5, count=20, shard=(index, 2)) for index in (0, 1)]
    assert np.array_equal(np.concatenate(parts), erased(0.5, count=40))
    assert (erased(0.0) == VALUE).all()


def mixed(
    alpha: float, *, count: int = 400, seed: tuple[int, int] = SEED, side: int = 2, **options: Any
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
    """The share that is kept has the mean of max(b, 1 - b), b from Beta(1, 1): three quarters.

    One share for a batch too, as big_vision draws it.
    """
    _, targets = mixed(1.0, count=2000)
    kept = targets.max(axis=1)
    assert abs(kept[kept < 1].mean() - 0.75) < 0.02
    shares = [mixed(1.0, count=2, per="batch", seed=(1, seed))[1].max() for seed in range(300)]
    assert abs(np.mean(shares) - 0.75) < 0.03


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
    """With two alphas half of the images, or of the batches as a whole, are blended."""
    images, _ = mixed(8.0, count=1000, side=12, cutmix=8.0)
    blended = (images[..., 0] != np.arange(1000)[:, None, None]).all(axis=(1, 2))
    assert 420 < blended.sum() < 580
    wholes = []
    for seed in range(60):
        images, _ = mixed(8.0, count=4, side=12, cutmix=8.0, per="batch", seed=(2, seed))
        changed = (images[..., 0] != np.arange(4)[:, None, None]).all(axis=(1, 2))
        assert changed.all() or not changed.any()
        wholes.append(changed.all())
    assert 15 < sum(wholes) < 45


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


def test_workers_share_the_draw_for_a_batch() -> None:
    """Each mixes its own images, both by the share that a single worker would draw."""
    whole = mixed(0.3, count=8, per="batch")[1].max()
    parts = [mixed(0.3, count=4, per="batch", shard=(index, 2))[1].max() for index in (0, 1)]
    assert parts == [whole, whole]


def sampled(draw: Callable[[tf.Tensor], tf.Tensor]) -> np.ndarray:
    """COUNT parts, (top, left, height, width); `draw` takes a number of its own each time."""
    parts = tf.data.Dataset.range(COUNT).map(draw).batch(COUNT)
    return next(parts.as_numpy_iterator())


def ours(shape: tuple[int, int], area: float) -> np.ndarray:
    return sampled(
        lambda number: augment.inception_part(
            shape, smallest_area=area, seed=tf.random.experimental.stateless_fold_in((1, 2), number)
        )
    )


def originals(shape: tuple[int, int], area: float) -> np.ndarray:
    """What vit_jax/input_pipeline.py calls, with its arguments."""

    def draw(number: tf.Tensor) -> tf.Tensor:
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            (*shape, 3),
            tf.zeros((0, 0, 4)),
            seed=1,
            area_range=(area, 1.0),
            min_object_covered=0,
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], size[:2]], axis=0)

    return sampled(draw)


def distance(left: np.ndarray, right: np.ndarray) -> float:
    """The largest distance of two distributions, over area, aspect and both places of a part."""

    def measures(parts: np.ndarray) -> list[np.ndarray]:
        top, left, height, width = parts.T
        return [height * width, width / height, top, left]

    pairs = zip(measures(left), measures(right), strict=True)
    return max(float(scipy.stats.ks_2samp(*pair, method="asymp").statistic) for pair in pairs)


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_inception_parts_are_drawn_as_the_originals_are(
    shape: tuple[int, int], area: float
) -> None:
    """Area, aspect and place have the distribution of TensorFlow's op, whatever the shape."""
    parts = ours(shape, area)

    assert (parts[:, :2] >= 0).all()
    assert (parts[:, 2:] >= 1).all()
    assert (parts[:, :2] + parts[:, 2:] <= shape).all()
    assert distance(parts, originals(shape, area)) < BOUND


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_another_crop_is_told_apart(shape: tuple[int, int]) -> None:
    """Another aspect is found out, and so is another smallest area."""
    wider = ours(shape, 0.05) * (1, 1, 1, 4 / 3)
    assert distance(wider, originals(shape, 0.05)) > 3 * BOUND
    assert distance(ours(shape, 0.15), originals(shape, 0.05)) > BOUND


def test_a_part_is_a_function_of_its_seed() -> None:
    """The same seed, eagerly and in a graph, gives the same part; another gives another."""
    graph = tf.function(lambda seed: augment.inception_part((60, 80), smallest_area=0.1, seed=seed))
    parts = [augment.inception_part((60, 80), smallest_area=0.1, seed=(1, n)) for n in range(20)]

    assert all(np.array_equal(graph((1, n)), part) for n, part in enumerate(parts))
    assert len({part.numpy().tobytes() for part in parts}) == 20


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 2)])
def test_no_image_is_too_small(shape: tuple[int, int]) -> None:
    """A part has at least one pixel, and never more than the image."""
    for number, place in enumerate(np.random.default_rng(0).uniform(size=(30, 2))):
        for part in (
            augment.inception_part(shape, smallest_area=0.01, seed=(0, number)).numpy(),
            augment.small_part(
                shape, size=(5, 4), ratio=3.0, place=place.astype(np.float32)
            ).numpy(),
        ):
            assert (part[2:] >= 1).all()
            assert (part[:2] >= 0).all()
            assert (part[:2] + part[2:] <= shape).all()


@pytest.mark.parametrize("shape", [(120, 180), (200, 90), (96, 64)])
@pytest.mark.parametrize("place", [(0.0, 0.0), (0.5, 0.5), (0.999, 0.999)])
def test_cutting_first_shows_what_resizing_first_shows(
    shape: tuple[int, int], place: tuple[float, float]
) -> None:
    """The part, resized, is a cut of the image whose short side was resized, to a pixel's half."""
    size, ratio = (48, 32), 1.25
    rows, columns = np.indices(shape)
    image = np.stack([rows, columns], axis=-1).astype(np.float32)  # each pixel is its place

    top, left, height, width = augment.small_part(
        shape, size=size, ratio=ratio, place=place
    ).numpy()
    actual = tf.image.resize(image[top : top + height, left : left + width], size).numpy()

    factor = max(ratio * size[0] / shape[0], ratio * size[1] / shape[1])
    resized = np.round(np.array(shape) * factor).astype(int)
    whole = tf.image.resize(image, resized).numpy()
    free = resized - size
    y, x = (round(where * room) for where, room in zip(place, free, strict=True))
    expected = whole[y : y + size[0], x : x + size[1]]
    assert min(free / np.array(size)) == pytest.approx(0.25, abs=0.03)
    assert np.abs(actual - expected)[2:-2, 2:-2].max() < 1 / factor + 0.5
