"""Layouts of folders and files -> splits, classes, and lines about what is not used. A new report is one row."""

import io
import logging
import random
import re
import tarfile
from pathlib import Path

import datasets
import pytest
from PIL import Image

from hf_vit.data.layout import SPLIT_NAMES
from hf_vit.data.sources import open_source
from hf_vit.data.splits import open_split
from hf_vit.data.summary import log_splits, write_unused
from hf_vit.files.messages import join_names

# Files ("cat*3" is three images in the folder cat, "train.parquet*4" a file of four rows, "=text" a file's content)
# -> images of each class by split, and names of what is not used; or words of the error.
FOLDERS = {
    # classes
    "cat*3 dog*2": "train: cat 3, dog 2",
    "cat*3 dog*2 .cache/x*2 __MACOSX/cat*1 cat/.hidden.jpg cat/Thumbs.db": "train: cat 3, dog 2",
    "photos/cat*3 photos/dog*2 LICENSE.txt": "train: cat 3, dog 2",
    "a/b/c/cat*3 a/b/c/dog*2": "train: cat 3, dog 2",
    "cat*3": "train: cat 3",
    "0*1 1*2 10*3 2*1": "train: 0 1, 1 2, 10 3, 2 1",
    "猫*2 Öl*1": "train: Öl 1, 猫 2",
    # words inside the names of classes and images
    "model_train*3 steam-train*2 car*1": "train: car 1, model_train 3, steam-train 2",
    "cat/near_a_train.jpg cat/b.jpg dog/test.jpg dog/val-1.jpg": "train: cat 2, dog 2",
    "train/car*3 train/train*2 val/car*1 val/train*1": "train: car 3, train 2; validation: car 1, train 1",
    "train/cat*3 train/toy-train*2 test/cat*1 test/toy-train*1": "train: cat 3, toy-train 2; test: cat 1, toy-train 1",
    "train/cat*3 train/stress_test*2 test/cat*1 test/stress_test*1": (
        "train: cat 3, stress_test 2; test: cat 1, stress_test 1"
    ),
    "contest*2 latest*2 evaluation*2 training_wheels*1": "train: contest 2, evaluation 2, latest 2, training_wheels 1",
    "train/dev*2 train/eval*2 val/dev*1 val/eval*1": "train: dev 2, eval 2; validation: dev 1, eval 1",
    # names of splits
    "train/cat*3 train/dog*3 val/cat*1 val/dog*1": "train: cat 3, dog 3; validation: cat 1, dog 1",
    "train/cat*3 train/dog*3 valid/cat*1 valid/dog*1": "train: cat 3, dog 3; validation: cat 1, dog 1",
    "training/cat*3 training/dog*3 dev/cat*1 dev/dog*1": "train: cat 3, dog 3; validation: cat 1, dog 1",
    "TRAIN/cat*3 TRAIN/dog*3 Eval/cat*1 Eval/dog*1": "train: cat 3, dog 3; validation: cat 1, dog 1",
    "Train/cat*3 Train/dog*3 Test/cat*1 Test/dog*1": "train: cat 3, dog 3; test: cat 1, dog 1",
    "Training/cat*3 Training/dog*3 TESTING/cat*1 TESTING/dog*1": "train: cat 3, dog 3; test: cat 1, dog 1",
    "train/cat*3 train/dog*3 holdout/cat*1 holdout/dog*1": "train: cat 3, dog 3; holdout: cat 1, dog 1",
    "train/cat*2 train/dog*2 val/cat*1 val/dog*1 Test/cat*1": (
        "train: cat 2, dog 2; validation: cat 1, dog 1; test: cat 1"
    ),
    "data/train/cat*3 data/train/dog*3 data/test/cat*1": "train: cat 3, dog 3; test: cat 1",
    "cover.jpg data/train/cat*3 data/train/dog*3 data/test/cat*1": (
        "train: cat 3, dog 3; test: cat 1; unused: cover.jpg"
    ),
    "test/cat*3 test/dog*3": "test: cat 3, dog 3",
    "cat/train*3 cat/test*1 dog/train*2 dog/test*1": "train: cat 3, dog 2; test: cat 1, dog 1",
    "train*3 test*2": "train: 3; test: 2",
    "a.jpg b.jpg test*2": "train: 2; test: 2",
    # folders beside splits
    "train/cat*3 train/dog*3 valid_2024/cat*1 valid_2024/dog*1": "train: cat 3, dog 3; valid_2024: cat 1, dog 1",
    "train/cat*3 train/dog*3 test/cat*1 samples*2": (
        "train: cat 3, dog 3; test: cat 1; unused: samples/0.jpg, samples/1.jpg"
    ),
    "train/cat*2 train/dog*2 val/cat*1 val/dog*1 test*2": (
        "train: cat 2, dog 2; validation: cat 1, dog 1; unused: test/0.jpg, test/1.jpg"
    ),
    "train/cat*2 train/dog*2 val/cat*1 val/dog*1 valid/cat*1 valid/dog*1": (
        "train: cat 2, dog 2; val: cat 1, dog 1; valid: cat 1, dog 1"
    ),
    # depths, stray files
    "cat*3 dog*2 cover.jpg": "train: cat 3, dog 2; unused: cover.jpg",
    "train/cat*3 train/dog*2 train/cover.jpg": "train: cat 3, dog 2; unused: train/cover.jpg",
    "cat*3 dog*2 dog/more*2": "train: cat 3, dog 2; unused: dog/more/0.jpg, dog/more/1.jpg",
    "train/n01/images*3 train/n02/images*2": "train: n01 3, n02 2",
    "animals/cat*2 animals/dog*2 vehicles/car*1 vehicles/bus*1": "train: bus 1, car 1, cat 2, dog 2",
    "train/animals/cat*2 train/animals/dog*2 test/animals/cat*1": "train: cat 2, dog 2; test: cat 1",
    "a.jpg b.jpg c.jpg": "train: 3",
    "a.jpg b.jpg more*2": "train: 4",
    # what is not used
    "cat*3 dog*2 tulip/": "train: cat 3, dog 2; unused: tulip/",
    "cat*3 dog*2 tulip/x.dng": "train: cat 3, dog 2; unused: tulip/, tulip/x.dng",
    "train/cat*3 train/dog*2 test/": "train: cat 3, dog 2; unused: test/",
    "cat*3 dog*2 photos.zip": "train: cat 3, dog 2; unused: photos.zip",
    "cat*3 dog*2 Cat*1": "train: Cat 1, cat 3, dog 2; unused: Cat, cat",
    "cat*3 dog*2 out/.hf_vit out/best/sample*3": "train: cat 3, dog 2; unused: out/",
    # Parquet and tar files
    "train.parquet*4 val.parquet*2": "train: 4; validation: 2",
    "train.parquet*4 val.parquet*2 test.parquet*3": "train: 4; validation: 2; test: 3",
    "Train.parquet*4 Test.parquet*2": "train: 4; test: 2",
    "train-00000-of-00002.parquet*4 train-00001-of-00002.parquet*4 dev-00000-of-00001.parquet*2": (
        "train: 8; validation: 2"
    ),
    "data/train-0.parquet*4 data/eval-0.parquet*2": "train: 4; validation: 2",
    "train/0.parquet*4 val/0.parquet*2 holdout/0.parquet*1": "train: 4; validation: 2; holdout: 1",
    "a.parquet*4 b.parquet*2": "train: 6",
    "latest.parquet*4 contest.parquet*2": "train: 6",
    "train.parquet*4 latest.parquet*2": "train: 4; latest: 2",
    "animals-train-0.parquet*4 animals-valid-0.parquet*2": "train: 4; validation: 2",
    "train_a.parquet*4 train_b.parquet*2 test_a.parquet*1": "train: 6; test: 1",
    "train.tar*4 val.tar*2": "train: 4; validation: 2",
    "train-0001.tar*4 Test-0001.tar*2": "train: 4; test: 2",
    "train.parquet*4 val.parquet*2 preview.jpg": "train: 4; validation: 2; unused: preview.jpg",
    # tables
    "a.jpg b.jpg metadata.csv=file_name,label,year|a.jpg,cat,2001|b.jpg,dog,2002": "train: cat 1, dog 1",
    "a.jpg b.jpg c.jpg metadata.csv=file_name,label|a.jpg,cat|b.jpg,dog": "train: cat 1, dog 1; unused: c.jpg",
    "a.jpg b.jpg metadata.csv=file_name,label|a.jpg,cat|b.jpg,dog|c.jpg,cat": "train: cat 1, dog 1; unused: c.jpg",
    "cat*1 dog*1 cat/metadata.csv=file_name,label|0.jpg,tabby": "train: tabby 1; unused: dog/0.jpg",
    "cat*1 dog*1 metadata.csv=file_name,year|cat/0.jpg,1|dog/0.jpg,2": "train: cat 1, dog 1; unused: metadata.csv",
    "TRAIN*2 VALID*1 Testing*1 TRAIN/metadata.csv=file_name,label,year|0.jpg,cat,1|1.jpg,dog,2 "
    "VALID/metadata.csv=file_name,label,year|0.jpg,cat,1 Testing/metadata.csv=file_name,label|0.jpg,dog": (
        "train: cat 1, dog 1; validation: cat 1; test: dog 1"
    ),
    "Train*2 Val*1 labels.csv=image,labels|Train/0.jpg,cat|Train/1.jpg,dog|Val/0.jpg,cat": (
        "train: cat 1, dog 1; validation: cat 1"
    ),
    "train*2 valid_2024*1 labels.csv=image,labels|train/0.jpg,cat|train/1.jpg,dog|valid_2024/0.jpg,cat": (
        "train: cat 1, dog 1; valid_2024: cat 1"
    ),
    "a.jpg b.jpg c.jpg metadata.csv=file_name,labels,split|a.jpg,cat,TRAIN|b.jpg,dog,train|c.jpg,cat,Val": (
        "train: cat 1, dog 1; validation: cat 1"
    ),
    'a.jpg b.jpg metadata.jsonl={"file_name":"a.jpg","class":"cat"}|{"file_name":"b.jpg","class":"dog"}': (
        "train: cat 1, dog 1"
    ),
}  # fmt: skip
ERRORS = {
    "cat*2 dog*2 test*2": "two ways: test, cat, --layout",
    "bus*2 car*2 train*2": "two ways: train, bus, --layout",
    "control*2 test*2": "two ways: test, control, --layout",
    "flowers*2 train/cat*2 train/dog*2": "two ways: train, flowers, --layout",
    "car/suv*2 car/van*2 train/steam*2 train/diesel*2": "two ways: train, car, --layout",
    "flowers_a/rose*2 flowers_a/iris*2 flowers_b/rose*2 flowers_b/iris*2": "flowers_a, flowers_b, iris, --dataset",
    "train_2023/rose*2 train_2023/iris*2 valid_2024/rose*2 valid_2024/iris*2": "train_2023, valid_2024, --layout",
    "train/train/cat*2 train/train/dog*2 train/val/cat*2 train/val/dog*2": "two ways: train/train, train/val",
    "train/cat*2 train/dog*2 Train/cat*2 Train/dog*2": "Train, train, --dataset",
    "cat*2 dog/photos*2 owl*2": "dog, too deep, --layout",
    "train*3 val/cat*2 val/dog*2": "train, no class folders, val",
    "train/test/cat*2 train/test/dog*2": "two ways: train/test",
    "cat/test*2 cat/more*2 dog/a*2 dog/b*2": "two ways: cat/test",
    "data.zip": "data.zip, unpack",
    "notes.txt": "no images, .txt",
    "cat*2 dog*2 photos.tar*2": "two ways: photos.tar, --dataset",
    "flowers.parquet*4 flowers-test.parquet*2": "two ways: flowers-test.parquet, --layout",
    "my-val-set.parquet*4 my-train-set.parquet*2": "two ways: --layout",
    "test/train.parquet*4": "two ways: test/train.parquet",
}  # fmt: skip
LAYOUTS = {  # the option -> layout -> splits
    "class": {
        "cat*2 dog*2 test*2": "train: cat 2, dog 2, test 2",
        "cat*2 dog/photos*2 owl*2": "train: cat 2, dog 2, owl 2",
        "flowers.parquet*4 flowers-test.parquet*2": "train: 6",
        "flowers_a/rose*2 flowers_a/iris*2 flowers_b/rose*2": "train: flowers_a 4, flowers_b 2",
    },
    "split/class": {
        "train_2023/rose*2 train_2023/iris*2 valid_2024/rose*2": "train_2023: iris 2, rose 2; valid_2024: rose 2",
        "car/suv*2 car/van*2 train/steam*2 train/diesel*2": "car: suv 2, van 2; train: diesel 2, steam 2",
    },
}


def encoded(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("I;16", (1, 1), number).save(content, "PNG")
    return content.getvalue()


def write_parquet(file: Path, images: list[bytes]) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    table = {
        "image": [{"bytes": image, "path": None} for image in images],
        "label": [n % 2 for n in range(len(images))],
    }
    datasets.Dataset.from_dict(table, features=features).to_parquet(file)


def write_tar(file: Path, images: list[bytes]) -> None:
    with tarfile.open(file, "w") as archive:
        for number, image in enumerate(images):
            for suffix, content in (("png", image), ("cls", b"%d" % (number % 2))):
                entry = tarfile.TarInfo(f"{number}.{suffix}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def make(folder: Path, layout: str) -> Path:
    for item in layout.split():
        name, _, content = item.partition("=")
        name, _, count = name.partition("*")
        file = folder / name
        if count and file.suffix not in (".parquet", ".tar"):
            file.mkdir(parents=True, exist_ok=True)
            for number in range(int(count)):
                (file / f"{number}.jpg").touch()
            continue
        if name.endswith("/"):
            file.mkdir(parents=True)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        if count:
            write = write_parquet if file.suffix == ".parquet" else write_tar
            write(file, [encoded(number) for number in range(int(count))])
        else:
            file.write_text(content.replace("|", "\n"))
    return folder


def describe(folder: Path, layout: str | None = None) -> str:
    """Splits, classes and unused names in the words of the tables above."""
    source = open_source(str(folder), layout=layout)
    parts = []
    for name, samples in source.splits.items():
        if not source.is_folder:
            parts.append(f"{name}: {len(open_split(samples).samples)}")
        elif samples.features.keys() == {"image"}:
            parts.append(f"{name}: {len(samples)}")
        else:
            split = open_split(samples)
            counts = [0] * split.num_labels
            for numbers, count in split.label_counts().items():
                for number in numbers:
                    counts[number] += count
            found = [f"{label} {count}" for label, count in zip(split.label_names, counts, strict=True) if count]
            parts.append(f"{name}: {', '.join(found)}")
    order = [*SPLIT_NAMES]
    parts.sort(key=lambda part: order.index(part.split(":")[0]) if part.split(":")[0] in order else 9)
    unused = sorted(name for names in source.unused.values() for name in names)
    return "; ".join(parts + [f"unused: {', '.join(unused)}"] * bool(unused))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_vit.data.shards._cache", lambda: tmp_path_factory.mktemp("indexes"))
        patch.setattr("hf_vit.data.folders.index_folder", lambda *names: tmp_path_factory.mktemp("folders"))
        yield


@pytest.mark.parametrize("layout", FOLDERS)
def test_splits_classes_and_what_is_not_used(layout, tmp_path, caplog):
    source = make(tmp_path / "data", layout)
    assert describe(source) == FOLDERS[layout]
    opened = open_source(str(source))
    with caplog.at_level(logging.WARNING):
        log_splits(opened, {})
    write_unused(tmp_path, opened.unused)
    for names in opened.unused.values():  # a line each, with the count and up to three names
        assert any(line.endswith(f": {len(names)} ({join_names(names, 3)})") for line in caplog.messages)
        assert all(name in (tmp_path / "unused_files.txt").read_text() for name in names)
    for split, folders in opened.sources.items():
        assert any(line.startswith(f"{split}: ") and folders[0] in line for line in caplog.messages)


@pytest.mark.parametrize("layout", ERRORS)
def test_ambiguous_layouts_name_the_users_folders_and_the_option(layout, tmp_path):
    folder = make(tmp_path / "data", layout)
    with pytest.raises(ValueError, match=r".") as error:
        open_source(str(folder))
    for word in re.split("[:,] ", ERRORS[layout]):
        assert word in str(error.value)


@pytest.mark.parametrize(("option", "layout"), [(option, layout) for option in LAYOUTS for layout in LAYOUTS[option]])
def test_the_layout_can_be_named(option, layout, tmp_path):
    expected = LAYOUTS[option][layout]
    assert sorted(describe(make(tmp_path, layout), option).split("; ")) == sorted(expected.split("; "))


# A property of all layouts: random trees with a planted truth

WORDS = ["train", "test", "val", "dev", "eval", "holdout", "Training", "TESTING", "Valid", "cat", "2024", "猫", "Öl"]


def random_name(drawn: random.Random) -> str:
    """A name that means no split, though it may hold words that do."""
    meanings = {name for names in SPLIT_NAMES.values() for name in names}
    while True:
        name = drawn.choice(["-", "_", " ", "", "."]).join(drawn.sample(WORDS, drawn.randint(1, 3)))
        if name.lower() not in meanings:
            return name


def plant(folder: Path, drawn: random.Random) -> dict[str, str]:
    """Write a random tree; return the planted split of each image, "" for an image of no split."""
    kind = drawn.choice(["splits", "splits", "classes", "parquet", "tar", "metadata", "labels"])
    own = {split: drawn.choice(names) for split, names in SPLIT_NAMES.items()}
    own = {split: drawn.choice([str, str.upper, str.title])(name) for split, name in own.items()}
    splits = ["train", *drawn.sample(["validation", "test", "holdout"], drawn.randint(1, 3))]
    truth: dict[str, str] = {}

    def touch(path: str, split: str) -> str:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
        truth[path] = split
        return path

    def image() -> str:
        return f"{random_name(drawn)}{len(truth)}.{drawn.choice(['jpg', 'PNG', 'webp'])}"

    if kind in ("parquet", "tar"):
        is_inside = drawn.random() < 0.5
        prefix = drawn.choice(["", "animals-"])
        for split in splits:
            for number in range(drawn.randint(1, 2)):
                file = folder / (f"{own[split]}/{number:03d}" if is_inside else f"{prefix}{own[split]}-{number:03d}")
                file.parent.mkdir(parents=True, exist_ok=True)
                images = [encoded(len(truth) + row) for row in range(drawn.randint(2, 4))]
                truth |= {image.hex(): split for image in images}
                (write_parquet if kind == "parquet" else write_tar)(Path(f"{file}.{kind}"), images)
        return truth
    outer = drawn.choice(["", "", "unpacked/"])
    if kind == "splits":
        classes = list(dict.fromkeys([*(random_name(drawn) for _ in range(2)), drawn.choice(["train", "test", "cat"])]))
        for split in splits:
            for name in classes if len(classes) > 1 else [*classes, "owl"]:
                for _ in range(drawn.randint(1, 3)):
                    touch(f"{outer}{own[split]}/{name}/{image()}", split)
        if drawn.random() < 0.3:
            touch(f"{outer}{own['train']}/{classes[0]}/deeper/{image()}", "")
    elif kind == "classes":
        for number in range(3):
            name = f"{random_name(drawn)}{number}"
            for _ in range(drawn.randint(1, 3)):
                touch(f"{outer}{name}/{image()}", "train")
    else:
        rows = []
        for split in splits:
            for number in range(drawn.randint(2, 4)):
                rows.append((touch(f"{own[split]}/{image()}", split), ["cat", "dog"][number % 2]))
        table, header = ("labels.csv", "image,labels") if kind == "labels" else ("metadata.csv", "file_name,label")
        (folder / table).write_text("\n".join([header, *(f"{path},{label}" for path, label in rows)]), encoding="utf-8")
        if kind == "metadata" and drawn.random() < 0.5:
            touch(f"{own['train']}/{image()}", "")
        return truth
    if drawn.random() < 0.3:
        touch(f"{outer}{image()}", "")
    return truth


@pytest.mark.parametrize("seed", range(60))
def test_random_trees_keep_the_planted_truth(seed, tmp_path):
    """No image of a held-out folder is trained on, none counts twice, and none vanishes without a name."""
    folder = tmp_path / "data"
    folder.mkdir()
    truth = plant(folder, random.Random(seed))
    source = open_source(str(folder))
    found: dict[str, str] = {}
    for streaming in [False, True] if source.loading else [False]:
        found = {}
        for name in source.names:
            split = open_split(source.load(name, streaming))
            for row in range(len(split)):
                image = split.image(split.samples[row], row)
                key = image["path"].removeprefix(f"{folder}/") if source.is_folder else image["bytes"].hex()
                assert key not in found
                found[key] = name
        assert found == {key: split for key, split in truth.items() if split}
    unused = {name for names in source.unused.values() for name in names}
    assert {key for key, split in truth.items() if not split} <= unused
