"""`hf-vit shard`: tars with the content of the dataset, resizing, and continuation."""

import datasets
import numpy as np
import pytest

from hf_vit.cli.command_line import main
from hf_vit.data import shard_writing
from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_named, open_split
from hf_vit.models.image_reading import load_image
from hf_vit.settings.fields import DataSettings

from .test_loaders import picture


@pytest.fixture
def folder(tmp_path):
    for number in range(23):
        place = tmp_path / "images" / ("test" if number % 5 == 0 else "train") / ("owl" if number % 3 else "cat")
        place.mkdir(parents=True, exist_ok=True)
        picture(number, "L" if number == 4 else "RGB").save(place / f"{number}.png")
    return tmp_path / "images"


def contents(split) -> set:
    """Pixels and class names, whatever the order."""
    rows = (split.samples[row] for row in range(len(split)))
    return {(load_image(row[split.image_column]).tobytes(), split.label_names[split.label(row)]) for row in rows}


def test_shards_hold_the_images_and_datasets_reads_them(folder, tmp_path, capsys):
    assert main(["shard", str(folder), str(tmp_path / "out"), "--images", "8", "--workers", "1"]) == 0
    assert "train-*.tar" in capsys.readouterr().out
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    names = [f"{split}-{number:05d}.tar" for split, count in (("test", 1), ("train", 3)) for number in range(count)]
    assert sorted(file.name for file in moved.glob("*.tar")) == names
    for name in ("train", "test"):
        ours = open_split(load_split(str(moved), name, streaming=True))
        assert ours.label_names == ["cat", "owl"]
        assert contents(ours) == contents(open_split(load_split(str(folder), name)))
        for spec in (name, f"{name}[:100%]"):
            copied = open_named(DataSettings(dataset=str(moved)), spec)
            assert not copied.is_sharded
            assert contents(copied) == contents(ours)
    files = str(moved / "train-*.tar")
    theirs = datasets.load_dataset("webdataset", data_files=files, cache_dir=str(tmp_path), split="train")
    assert (len(theirs), set(theirs["cls"])) == (18, {0, 1})


def test_images_are_resized_and_kept_where_they_are_small(folder, tmp_path):
    (folder / "train" / "cat" / "9.png").write_bytes(b"nothing")
    picture(3).resize((40, 90)).save(folder / "train" / "owl" / "90.png")
    main(["shard", str(folder), str(tmp_path / "out"), "--size", "30", "--splits", "train", "--workers", "1"])
    split = open_split(load_split(str(tmp_path / "out"), "train", streaming=True))
    pictures = [load_image(split.samples[row]["jpg"]) for row in range(len(split))]
    sizes = [image.size for image in pictures]
    assert (len(sizes), sizes.count((30, 68)), sizes.count((14, 9))) == (18, 1, 17)
    assert sum(image.mode == "L" for image in pictures) == 1


def test_interrupted_writing_continues_and_another_plan_is_refused(folder, tmp_path, monkeypatch, capsys):
    command = ["shard", str(folder), str(tmp_path / "out"), "--images", "6", "--workers", "1", "--splits", "train"]
    written, encode = [], shard_writing.encode_image

    def fail_at_ten(*arguments):
        written.append(arguments)
        if len(written) == 10:
            raise KeyboardInterrupt
        return encode(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shard_writing, "encode_image", fail_at_ten)
        assert main(command) == 130
    assert len(list((tmp_path / "out").glob("*.tar"))) == 1
    first = (tmp_path / "out" / "train-00000.tar").stat().st_ino
    assert main(command) == 0
    assert (tmp_path / "out" / "train-00000.tar").stat().st_ino == first
    assert len(open_split(load_split(str(tmp_path / "out"), "train", streaming=True))) == 18
    assert main([*command, "--workers", "-1"]) == 2
    assert main([*command, "--size", "9"]) == 2
    assert "size None" in capsys.readouterr().err


def test_shards_of_images_that_have_changed_since_and_no_images_are_refused(folder, tmp_path, capsys):
    command = ["shard", str(folder), str(tmp_path / "out"), "--images", "9", "--workers", "1"]
    assert main([*command, "--splits", "test"]) == 0
    assert main(command) == 0
    (tmp_path / "out" / "train-00001.tar").unlink()  # as if it had been interrupted
    image = folder / "train" / "cat" / "3.png"
    picture(77, "RGB").save(image)  # of the same name
    assert main(command) == 2
    assert "images of train" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train-00001.tar").exists()
    (tmp_path / "empty").mkdir()
    assert main(["shard", str(tmp_path / "empty"), str(tmp_path / "nothing"), "--splits", "train"]) == 2
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_two_processes_write_in_a_shuffled_order(folder, tmp_path):
    main(["shard", str(folder), str(tmp_path / "out"), "--splits", "train", "--workers", "2", "--images", "9"])
    split = open_split(load_split(str(tmp_path / "out"), "train", streaming=True))
    labels = [split.label(split.samples[row]) for row in range(18)]
    assert np.abs(np.diff(labels)).sum() > 1  # sorted, they would change once
