"""Tests of keras_vit.data.folder: folders of images, what a run wrote of them, named images."""

import io
import os
from pathlib import Path

import image_files
import numpy as np
import published
import pytest

from keras_vit.data import datasets, folder, images, load_folder, source

# Where a folder has the images of splits, and how many each split gets of its twenty.
GIVEN: list[tuple[dict[str, str], list[int]]] = published.TABLES["given splits"]
# Folders of images, and why they are neither classes nor splits.
NEITHER: list[tuple[list[str], str]] = published.TABLES["neither"]
# Names of classes that hold those of splits.
CLASSES = [
    ("car", "train"),
    ("dev_board", "eval_board"),
    ("invalid", "valid"),
    ("steam_train", "test_tube"),
    ("cross-validation-train", "train test"),
]
ROWS = {
    "empty": "",
    "other columns": "a,b\n1,2\n",
    "short": "split,label,path\ntest,plain\n",
    "long": "split,label,path\ntest,plain,a.png,b\n",
    "endless field": 'split,label,path\ntest,plain,"' + "x" * 300_000,
    "split": "split,label,path\nothers,plain,plain/000.jpg\n",
    "label": "split,label,path\ntest,cat,plain/000.jpg\n",
    "absolute": "split,label,path\ntest,plain,/etc/hostname\n",
    "above": "split,label,path\ntest,plain,../other/000.jpg\n",
}
PHOTOS = ["photos/[1].jpg", "photos/a.png", "photos/b/ä 1.jpg"]


def test_classes_become_labels_and_every_file_is_used_once(tmp_path: Path) -> None:
    """A folder of four formats gives stratified splits of all its images with their targets."""
    data = load_folder(image_files.write_classes(tmp_path))
    everything = [image for name in source.SPLITS for image in data.split(name).images]

    assert data.labels == ("plain", "striped")
    assert data.counts == {"train": 16, "validation": 2, "test": 2}
    assert sorted(everything) == sorted(str(file) for file in tmp_path.glob("*/*"))
    for name in source.SPLITS:
        split = data.split(name)
        parents = [Path(image).parent.name for image in split.images]
        assert parents == [data.labels[target] for target in split.targets]


@pytest.mark.parametrize(("given", "expected"), GIVEN)
def test_given_splits_are_kept_and_missing_ones_carved_out_of_training(
    tmp_path: Path, given: dict[str, str], expected: list[int]
) -> None:
    """A tenth of each class of train/ becomes what is missing, and is not trained on.

    Training without labels leaves the same images unseen, and evaluation takes those of the test.
    """
    for folder_name in given.values():
        image_files.write_classes(tmp_path / folder_name)

    data = load_folder(tmp_path)

    assert list(data.counts.values()) == expected
    assert (data.labels, data.skipped) == (("plain", "striped"), ())
    for name in source.SPLITS:
        place = tmp_path / given.get(name, given["train"])
        assert all(Path(image).parents[1] == place for image in data.split(name).images)
    assert not set(data.train.images) & {*data.validation.images, *data.test.images}
    without = folder.load_unlabelled_folder(tmp_path)
    assert without.train.images.tolist() == data.train.images.tolist()
    if "test" in given:
        test = folder.load_test_folder(tmp_path, labels=data.labels).test
        assert test.images.tolist() == data.test.images.tolist()
    else:
        with pytest.raises(ValueError, match="has no folder of test images beside '"):
            folder.load_test_folder(tmp_path, labels=data.labels)


@pytest.mark.parametrize(("folders", "message"), NEITHER)
def test_folders_that_are_neither_classes_nor_splits_are_refused(
    tmp_path: Path, folders: list[str], message: str
) -> None:
    """Splits of other names, in each class, twice, without classes, without training."""
    for name in folders:
        image_files.write_classes(tmp_path, classes=(name,), count=3)
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path)


@pytest.mark.parametrize("classes", CLASSES)
def test_a_class_may_be_named_like_a_split(tmp_path: Path, classes: tuple[str, ...]) -> None:
    """With images inside it is none, also of the folder to evaluate on."""
    data = load_folder(image_files.write_classes(tmp_path, count=4, classes=classes))
    assert data.labels == classes
    assert np.bincount(data.train.targets).tolist() == [2, 2]
    assert len(folder.load_test_folder(tmp_path, labels=classes).test) == 8


def test_two_spellings_of_an_accent_are_one_class(tmp_path: Path) -> None:
    """In one folder, in splits, in a model's labels and in splits.csv; splits are the same."""
    one, parts = "caf\xe9", "cafe\u0301"
    images_of = {}
    for name in (one, parts):
        root = image_files.write_classes(tmp_path / name, classes=(name, "tea"))
        data = load_folder(root)
        assert data.labels == (one, "tea")
        images_of[name] = [Path(image).name for image in data.test.images]
        test = folder.load_test_folder(root, labels=("tea", parts)).test
        assert test.targets.tolist() == [1] * 10 + [0] * 10
    assert images_of[parts] == images_of[one]
    data.write_splits(tmp_path / "splits.csv")
    again = folder.read_splits(tmp_path / "splits.csv", root=root, labels=(parts, "tea"))
    assert (again.labels, again.counts) == (data.labels, data.counts)
    image_files.write_classes(root, classes=(one,), count=3)
    assert load_folder(root).labels == (one, "tea")
    both = image_files.write_classes(tmp_path / "both", classes=(one, parts))
    assert folder.load_unlabelled_folder(both).labels == ()  # one class is none to tell apart
    assert source.split_of("e\u0301val") is None


def test_classes_may_hold_folders(tmp_path: Path) -> None:
    """One that all have, or others in each; what lies beside the inner of two is named."""
    for name, inner in (("a", ("a/images", "b/images")), ("b", ("a/1", "a/2", "b/2", "b/3"))):
        for below in inner:
            image_files.write_classes(tmp_path / name, classes=(below,), count=4)
        assert load_folder(tmp_path / name).labels == ("a", "b")
    for name in ("x_train/x_train/a", "x_train/x_train/b", "x_test/a", "x_pred"):
        image_files.write_classes(tmp_path / "c", classes=(name,), count=4)
    (tmp_path / "c" / "x_train" / "labels.csv").touch()
    skipped = load_folder(tmp_path / "c").reasons[folder.OUTSIDE]
    names = [Path(name).relative_to(tmp_path / "c").as_posix() for name in skipped]
    assert names == ["x_pred", "x_train/labels.csv"]


def test_damaged_images_are_left_out_and_named(tmp_path: Path) -> None:
    """Half a file, a text with an image's ending and an empty file are skipped and listed."""
    image_files.write_classes(tmp_path)
    image_files.damage(tmp_path / "plain" / "000.jpg")
    (tmp_path / "plain" / "text.png").write_text("not an image")
    (tmp_path / "striped" / "empty.bmp").touch()

    data = load_folder(tmp_path)

    assert {Path(file).name for file in data.damaged} == {"000.jpg", "text.png", "empty.bmp"}
    assert sum(data.counts.values()) == 19
    with pytest.raises(ValueError, match=r"3 of 22 images .*000\.jpg.*strict"):
        load_folder(tmp_path, strict=True)


def test_every_file_that_is_left_out_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ending, a broken link, hidden, beside the class folders, unreadable: none unseen."""
    image_files.write_classes(tmp_path)
    plain = tmp_path / "plain"
    (tmp_path / "README.txt").touch()
    image_files.write_image(tmp_path / "beside.png")
    image_files.write_image(tmp_path / ".thumbnails" / "a.png")
    (plain / "notes.txt").touch()
    (plain / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (plain / "elsewhere").symlink_to(tmp_path / "striped")
    image_files.write_image(plain / "deep" / "._a.png")
    for name in ("photo.webp", "other.WEBP"):  # these are images
        image_files.write_image(plain / name)
    os.mkfifo(plain / "pipe.png")
    locked = image_files.write_image(plain / "locked.png")
    read = images.read_bytes

    def refuse(path: Path) -> bytes:
        if path == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(images, "read_bytes", refuse)
    data = load_folder(tmp_path)

    actual = {Path(one.name).name: one.reason for one in data.skipped}
    assert actual == {
        "README.txt": folder.OUTSIDE,
        "beside.png": folder.OUTSIDE,
        ".thumbnails": folder.HIDDEN,
        "notes.txt": folder.ENDING,
        "gone.png": folder.BROKEN_LINK,
        "elsewhere": folder.FOLDER_LINK,
        "._a.png": folder.HIDDEN,
        "pipe.png": folder.NO_FILE,
        "locked.png": folder.UNREADABLE,
    }
    assert len(data.skipped) == len(actual)
    assert sum(data.counts.values()) == 22
    assert data.labels == ("plain", "striped")
    assert data.reasons[folder.UNREADABLE] == (str(locked),)
    with pytest.raises(ValueError, match=r"1 of 23 images .* cannot be decoded or read: .*locked"):
        load_folder(tmp_path, strict=True)


def test_what_lies_beside_given_splits_is_named(tmp_path: Path) -> None:
    """A folder that is no split, and a file beside them; to test on, only the test split counts."""
    for name in ("train", "test", "extra"):
        image_files.write_classes(tmp_path / name)
    (tmp_path / "labels.csv").touch()

    data = load_folder(tmp_path)

    assert [Path(name).name for name in data.reasons[folder.OUTSIDE]] == ["extra", "labels.csv"]
    assert folder.load_test_folder(tmp_path, labels=data.labels).skipped == ()


def test_files_are_judged_as_they_are_now(tmp_path: Path) -> None:
    """What was mended is taken, what was damaged since is named; progress counts each once."""
    root = image_files.write_classes(tmp_path / "photos", count=4)
    (root / "plain" / "bad.png").write_text("no image")
    seen: list[tuple[int, int]] = []
    first = load_folder(root, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 9) for done in range(1, 10)]
    assert [Path(file).name for file in first.damaged] == ["bad.png"]
    image_files.write_image(root / "plain" / "bad.png")
    image_files.damage(root / "plain" / "000.jpg")
    assert [Path(file).name for file in load_folder(root).damaged] == ["000.jpg"]
    with pytest.raises(ValueError, match="1 of 9 images"):
        load_folder(root, strict=True)


def test_a_wrong_folder_is_one_sentence(tmp_path: Path) -> None:
    """Nothing, a file, no, one, an empty or an unknown class, or one that damage took away."""
    image_files.write_image(tmp_path / "flat" / "a.png")
    image_files.write_classes(tmp_path / "one", classes=("only",))
    image_files.write_classes(tmp_path / "hollow")
    (tmp_path / "hollow" / "nothing").mkdir()
    image_files.write_classes(tmp_path / "few", count=1)
    (tmp_path / "empty").mkdir()
    image_files.write_classes(tmp_path / "lost", count=2, classes=("a", "b", "c"))
    for file in (tmp_path / "lost" / "c").iterdir():
        image_files.damage(file)
    image_files.write_classes(tmp_path / "other" / "train")
    image_files.write_classes(tmp_path / "other" / "test", classes=("plain", "spotted"))
    wrong = {
        "empty": "holds no class folders",
        "flat": "holds no class folders",
        "one": "has one class, 'only'",
        "hollow": "nothing' holds no JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF file",
        "few": "too few for a validation split",
        "lost": "none of the images of class 'c'",
        "other": "not trained for: 'spotted'; .* 'plain', 'striped'",
    }

    with pytest.raises(FileNotFoundError, match=r"There is no folder '.*gone'"):
        load_folder(tmp_path / "gone")
    with pytest.raises(NotADirectoryError, match="is a file; give a folder"):
        load_folder(tmp_path / "flat" / "a.png")
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            load_folder(tmp_path / name)


def test_a_folder_to_evaluate_on_is_taken_whole(tmp_path: Path) -> None:
    """All class folders are the test split; targets follow the model's labels, not the folder's."""
    image_files.write_classes(tmp_path / "flat", count=3, classes=("b", "c"))
    labels = ("a", "b", "c")

    data = folder.load_test_folder(tmp_path / "flat", labels=labels)

    assert data.counts == {"train": 0, "validation": 0, "test": 6}
    assert data.test.targets.tolist() == [1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="not trained for: 'c'"):
        folder.load_test_folder(tmp_path / "flat", labels=("a", "b"))
    for name, count in (("train", 4), ("test", 3)):  # of given splits the training is not tested on
        image_files.write_classes(tmp_path / "given" / name, count=count)
    assert len(folder.load_test_folder(tmp_path / "given", labels=("plain", "striped")).test) == 6


def test_file_names_of_any_alphabet_are_read(tmp_path: Path) -> None:
    """Names with spaces and other scripts are kept; a message about a thousand is a sentence."""
    classes = ("Äpfel und Birnen", "猫")
    data = load_folder(image_files.write_classes(tmp_path, count=4, classes=classes))
    assert data.labels == classes
    assert np.bincount(data.train.targets).tolist() == [2, 2]
    listed = folder.some([f"{index}.png" for index in range(1000)])
    assert listed.endswith("'9.png' and 990 more")


def scatter(root: Path, *, count: int = 20, below: str = "") -> Path:
    """Writes images without classes, half of them a level deeper."""
    for index in range(count):
        folder = root / below / ("deep" if index % 2 else "")
        image_files.write_image(folder / f"{index}.png", seed=index)
    return root


def test_images_without_classes_are_taken_at_any_depth(tmp_path: Path) -> None:
    """Each once; a tenth is carved out; a damaged one is named; splits.csv has no labels then."""
    scatter(tmp_path)
    image_files.damage(tmp_path / "0.png")
    data = folder.load_unlabelled_folder(tmp_path)
    actual = [Path(image).name for part in (data.train, data.validation) for image in part.images]
    assert sorted(actual) == sorted(f"{index}.png" for index in range(1, 20))
    assert data.counts == {"train": 17, "validation": 2, "test": 0}
    assert (data.labels, set(data.train.targets)) == ((), {0})
    assert data.damaged == (str(tmp_path / "0.png"),)
    data.write_splits(tmp_path / "splits.csv")
    again = folder.read_splits(tmp_path / "splits.csv", root=data.source, labels=())
    assert again.train.images.tolist() == data.train.images.tolist()
    assert again.counts == data.counts


def test_class_folders_keep_their_splits_without_labels(tmp_path: Path) -> None:
    """What a classifier would be tested on stays unseen."""
    root = image_files.write_classes(tmp_path)
    without, labelled = folder.load_unlabelled_folder(root), load_folder(root)
    assert without.labels == labelled.labels
    assert without.test.images.tolist() == labelled.test.images.tolist()
    assert datasets.load_data(root, labelled=False).counts == labelled.counts


def test_given_splits_without_classes_are_kept(tmp_path: Path) -> None:
    """A flat train/ and validation/ are splits, not two classes."""
    scatter(tmp_path, below="train")
    assert folder.load_unlabelled_folder(tmp_path).counts == {
        "train": 18,
        "validation": 2,
        "test": 0,
    }
    scatter(tmp_path, below="validation", count=4)
    assert folder.load_unlabelled_folder(tmp_path).counts == {
        "train": 20,
        "validation": 4,
        "test": 0,
    }


def test_too_few_images_are_an_error(tmp_path: Path) -> None:
    """None, or one alone, cannot be trained and validated on; a missing folder is named."""
    with pytest.raises(ValueError, match="too few images"):
        folder.load_unlabelled_folder(tmp_path)
    scatter(tmp_path, count=1)
    with pytest.raises(ValueError, match="too few images"):
        folder.load_unlabelled_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder 'gone'"):
        folder.load_unlabelled_folder("gone")


def test_other_words_are_folders(tmp_path: Path) -> None:
    """A path is a folder, whatever its name."""
    root = image_files.write_classes(tmp_path / "digits")
    assert datasets.load_data(root).source == str(root)
    assert datasets.load_data("digits").source == "digits"
    with pytest.raises(FileNotFoundError, match="There is no folder 'nowhere'"):
        datasets.load_data("nowhere")


def test_splits_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Files, targets and order survive, also after the folder has grown, and has moved.

    Evaluating on what is left of it would be another number, so it is an error.
    """
    data = load_folder(image_files.write_classes(tmp_path / "images"))
    record, moved = tmp_path / "splits.csv", tmp_path / "moved"
    data.write_splits(record)
    image_files.write_image(tmp_path / "images" / "plain" / "new.png")

    actual = folder.read_splits(record, root=data.source, labels=data.labels)

    for name in source.SPLITS:
        assert actual.split(name).images.tolist() == data.split(name).images.tolist()
        assert np.array_equal(actual.split(name).targets, data.split(name).targets)
    (tmp_path / "images").rename(moved)
    test = folder.read_splits(record, root=moved, labels=data.labels).test
    assert Path(test.images[0]).is_file()
    Path(test.images[0]).unlink()
    with pytest.raises(
        FileNotFoundError, match=r"1 of the 20 images of .*splits\.csv' are no longer in"
    ):
        folder.read_splits(record, root=moved, labels=data.labels)


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    """Nor is a file read that lies outside of the folder."""
    for name, rows in ROWS.items():
        (tmp_path / "splits.csv").write_text(rows)
        with pytest.raises(ValueError, match=r"splits.csv' is (damaged|not of this run)") as error:
            folder.read_splits(tmp_path / "splits.csv", root=tmp_path, labels=("plain",))
        assert len(str(error.value)) < 600, name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos in folders, names with spaces and accents, and what is no photo."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/b/ä 1.jpg", "photos/a.png", "photos/[1].jpg", "one.jpg"):
        image_files.write_image(tmp_path / name)
    (tmp_path / "photos" / "notes.txt").write_text("notes")
    (tmp_path / "photos" / ".hidden.jpg").write_text("hidden")
    (tmp_path / "photos" / "broken.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "empty").mkdir()
    return tmp_path


def names(arguments: list[str], pipe: bytes | None = None) -> list[str]:
    stream = None if pipe is None else io.BufferedReader(io.BytesIO(pipe))
    found = folder.named_images(arguments, pipe=stream)
    return [one.name for one in found if isinstance(one, folder.NamedImage) and one.problem is None]


def test_files_folders_and_patterns(place: Path) -> None:
    """A folder is walked, a pattern expanded, a file with brackets taken by its name, once each."""
    assert names(["photos"]) == PHOTOS
    matching = ["photos/[1].jpg", "photos/b/ä 1.jpg", "photos/broken.jpg"]
    assert names(["photos/**/*.jpg"]) == matching  # as a shell expands it
    assert names(["photos/[1].jpg", "one.jpg"]) == ["photos/[1].jpg", "one.jpg"]
    assert names(["one.jpg", "./one.jpg", "photos", "photos/a.png"]) == ["one.jpg", *PHOTOS]
    skipped = {
        one.name for one in folder.named_images(["photos"]) if isinstance(one, source.SkippedFile)
    }
    assert skipped == {"photos/notes.txt", "photos/.hidden.jpg", "photos/broken.jpg"}


def test_what_is_not_there_is_told_when_it_is_read(place: Path) -> None:
    """No match, an empty folder, a missing file."""
    problems = {
        "*.webp": "No file matches",
        "empty": "holds no JPEG",
        "gone.jpg": "There is no image file",
    }
    for name, problem in problems.items():
        (image,) = folder.named_images([name])
        assert isinstance(image, folder.NamedImage)
        with pytest.raises((ValueError, OSError), match=problem):
            image.read()


def piped(contents: bytes) -> folder.NamedImage:
    (image,) = folder.named_images(["-"], pipe=io.BufferedReader(io.BytesIO(contents)))
    assert isinstance(image, folder.NamedImage)
    return image


def test_an_image_comes_through_a_pipe(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each format; what is neither an image nor a list of names, and a huge one, are refused."""
    for kind in ("jpg", "png", "bmp", "gif", "webp", "tif", "avif"):
        contents = image_files.write_image(place / f"image.{kind}").read_bytes()
        image = piped(contents)
        assert (image.name, image.contents) == ("-", contents)
        assert image.read().shape[2] == 3
    for contents in (b"%PDF-1.7\x01\x02" + bytes(100), b"\x7fELF\x02\x01\x01"):
        with pytest.raises(ValueError, match="neither a JPEG"):
            piped(contents).read()
    monkeypatch.setenv("KERAS_VIT_MAX_PIXELS", "10")
    with pytest.raises(ValueError, match="make the image smaller"):
        piped(b"\xff\xd8\xff" + bytes(images.largest_file() + 1)).read()
    assert names(["-"], pipe=b"") == []


@pytest.mark.parametrize("separator", [b"\n", b"\r\n", b"\0"])
@pytest.mark.parametrize("has_end", [False, True])
def test_names_come_through_a_pipe(separator: bytes, has_end: bool, place: Path) -> None:
    """One a line or with NULs between; folders are walked, patterns are names."""
    odd = os.fsdecode(b"odd-\xff.jpg")
    listed = ["BMW/1.jpg", "one.jpg", "photos/[1].jpg", "GIF8.gif", odd]
    if separator == b"\0":
        listed.append("two\nlines.jpg")
    pipe = separator.join(map(os.fsencode, listed)) + separator * has_end
    assert names(["-"], pipe=pipe) == listed
    assert names(["-", "one.jpg"], pipe=b"photos\n") == [*PHOTOS, "one.jpg"]


def test_a_long_list_is_read_as_it_comes(place: Path) -> None:
    """The first name comes before the last is read."""
    listed = [f"{number:06}.jpg" for number in range(50_000)]
    pipe = io.BufferedReader(io.BytesIO("\n".join(listed).encode()))
    found = folder.named_images(["-"], pipe=pipe)
    assert next(found).name == "000000.jpg"
    assert pipe.tell() < 2**18
    assert sum(1 for _ in found) == 49_999
