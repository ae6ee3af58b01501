"""Datasets of every kind in, batches out, whatever the number of workers and processes."""

import io
import itertools
import os
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from hf_vit.data import workers
from hf_vit.data.augmentation import TrainTransform
from hf_vit.data.loaders import TrainDataset, prefetch, train_loader
from hf_vit.data.samplers import BatchLayout, StepBatchSampler
from hf_vit.data.sources import load_split, read_idx, split_digits
from hf_vit.data.splits import open_split
from hf_vit.data.workers import count_processors, count_workers
from hf_vit.inference.batches import ImageReader
from hf_vit.inference.predictions import SplitImages
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor

from ..photographs import encode, write_colors

TRANSFORM = TrainTransform((6, 10))


def picture(number: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (9, 14, 3), dtype=np.uint8)).convert(mode)


def as_png(number: int) -> bytes:
    return encode(picture(number))


def make(count: int = 13, **columns) -> datasets.Dataset:
    features = {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["cat", "dog", "owl"])}
    values = {
        "img": [{"bytes": as_png(n), "path": None} for n in range(count)],
        "fine_label": [n % 3 for n in range(count)],
    }
    for name, (feature, column) in columns.items():
        features[name], values[name] = feature, column
    return datasets.Dataset.from_dict(values, features=datasets.Features(features))


def make_loader(split, transform, seed: int, layout: BatchLayout, steps: range, workers: int, class_sampling="natural"):
    batches = StepBatchSampler(layout, steps, split.in_blocks)
    return train_loader(TrainDataset(split, transform, seed, class_sampling), batches, workers)


def write_tar(file: Path, rows: range, label="{}", image=as_png, classes=3) -> None:
    with tarfile.open(file, "w") as archive:
        for number in rows:
            for suffix, content in (("png", image(number)), ("cls", label.format(number % classes).encode())):
                entry = tarfile.TarInfo(f"some/{number:05d}.{suffix}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def test_columns_are_found_by_type_and_two_candidates_need_a_choice():
    split = open_split(make(index=(datasets.Value("int64"), list(range(13)))))
    assert (split.image_column, split.label_column) == ("img", "fine_label")
    assert (split.label_names, split.num_labels, len(split)) == (["cat", "dog", "owl"], 3, 13)
    coarse = (datasets.ClassLabel(names=["a", "b"]), [n % 2 for n in range(13)])
    with pytest.raises(ValueError, match=r"--label-column.*fine_label"):
        open_split(make(coarse_label=coarse))
    assert open_split(make(coarse_label=coarse), label_column="coarse_label").num_labels == 2
    with pytest.raises(ValueError, match="'image'"):
        open_split(make(), image_column="image")


def test_labels_as_text_as_numbers_and_none():
    kinds = datasets.Value("string"), ["b", "a", "c"] * 4 + ["b"]
    text = open_split(make(kind=kinds), label_column="kind")
    assert text.label_names == ["a", "b", "c"]
    assert text.label(text.samples[0]) == 1
    numbers = open_split(make().cast_column("fine_label", datasets.Value("int32")))
    assert (numbers.label_names, numbers.num_labels) == (None, 3)
    without = open_split(make().remove_columns("fine_label"), needs_labels=False)
    assert without.label(without.samples[0]) == -1


def test_image_folder_and_slices(tmp_path):
    write_colors(tmp_path, ("blue", "red"), train=4, test=2)
    assert len(load_split(str(tmp_path), "train")) == 8
    assert len(load_split(str(tmp_path), "train[:30%]")) == 2
    assert open_split(load_split(str(tmp_path), "test")).label_names == ["blue", "red"]
    with pytest.raises(ValueError, match="'validation'"):
        load_split(str(tmp_path), "validation")
    with pytest.raises(ValueError, match="nothing"):
        load_split(str(tmp_path / "nothing"), "train")


def test_parquet_and_webdataset(tmp_path):
    make(5).to_parquet(tmp_path / "some-train-00.parquet")
    assert open_split(load_split(str(tmp_path), "train")).label_names == ["cat", "dog", "owl"]
    assert len(load_split(str(tmp_path / "*.parquet"), "train")) == 5
    (tmp_path / "tars").mkdir()
    write_tar(tmp_path / "tars" / "train-0.tar", range(6))
    split = open_split(load_split(str(tmp_path / "tars"), "train"))
    assert (split.image_column, split.label_column, split.num_labels) == ("png", "cls", 3)
    assert split.label(split.samples[4]) == 1


def test_digits_are_complete():
    train, test = split_digits(1797)
    assert (len(train), len(test)) == (1437, 360)
    assert sorted([*train, *test]) == list(range(1797))
    split = open_split(load_split("digits", "train[:10]+test[-5:]"))
    assert len(split) == 15
    with pytest.raises(ValueError, match="'validation'"):
        load_split("digits", "validation")


def test_mnist_files(shared):
    split = open_split(load_split(str(shared / "data" / "mnist"), "test[:7]"))
    assert [split.label(sample) for sample in split.samples] == [7, 2, 1, 0, 4, 1, 4]  # the file's well-known beginning


def test_idx_file_cut_short(tmp_path):
    file = tmp_path / "a-images-idx3-ubyte"
    file.write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2]) + b"1234567")
    with pytest.raises(ValueError, match=file.name):
        read_idx(file)


@pytest.mark.parametrize("class_sampling", ["natural", "balanced"])
def test_batches_do_not_depend_on_workers_first_step_and_processes(class_sampling):
    split = open_split(make())

    def batches(workers: int = 0, start: int = 0, processes: int = 1, rank: int = 0) -> list[dict]:
        layout = BatchLayout(6, 3, processes, rank)
        return list(make_loader(split, TRANSFORM, 5, layout, range(start, 6), workers, class_sampling))

    alone = batches()
    assert len(alone) == 12
    assert alone[0]["image"].shape == (3, 6, 10, 3)
    torch.testing.assert_close(batches(workers=2), alone, rtol=0, atol=0)
    torch.testing.assert_close(batches(start=4), alone[8:], rtol=0, atol=0)
    halves = [batches(processes=2, rank=rank) for rank in range(2)]
    together = [batch for pair in zip(*halves, strict=True) for batch in pair]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


def test_every_epoch_shows_every_sample_once():
    positions = [p for batch in StepBatchSampler(BatchLayout(6, 3), range(13)) for p in batch]
    assert positions == list(range(78))
    split = open_split(make())
    loader = make_loader(split, TRANSFORM, 5, BatchLayout(13, 13), range(3), 0)
    orders = [loader.dataset.sampler.rows(epoch, np.arange(13)).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(13)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_balanced_sampling_repeats_no_image_before_its_class_is_complete():
    """Counted from the definition, over two epochs and a half of classes of 8, 3 and 1 images and one without label."""
    split = open_split(make(fine_label=(datasets.ClassLabel(names=["cat", "dog", "owl"]), [0] * 8 + [1] * 3 + [2, -1])))
    samples = TrainDataset(split, TRANSFORM, 5, "balanced")
    draws = [samples.sampler.draw(*divmod(position, 13)) for position in range(33)]
    labels = [split.label(split.samples[row]) for row, *_ in draws]
    assert [labels.count(number) for number in range(3)] == [11, 11, 11]
    assert all(sorted(labels[turn : turn + 3]) == [0, 1, 2] for turn in range(0, 33, 3))
    assert len({tuple(labels[turn : turn + 3]) for turn in range(0, 33, 3)}) > 1
    for number, size in enumerate((8, 3, 1)):
        rows = [row for row, *_ in draws if split.label(split.samples[row]) == number]
        assert [visit for row, visit, _ in draws if row in rows] == [n // size for n in range(11)]
        assert all(len({*rows[n : n + size]}) == len(rows[n : n + size]) for n in range(0, 11, size))
    owl = [samples[position]["image"] for position in range(33) if labels[position] == 2]
    assert len({pixels.tobytes() for pixels in owl}) == 11  # an image that comes again is augmented anew
    with pytest.raises(ValueError, match="--class-sampling"):
        TrainDataset(replace(split, label_column=None), TRANSFORM, 5, "balanced")


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_micro_batches_are_the_same_on_any_number_of_processes(processes):
    """A micro-batch has the same images and random numbers as on one process; the batch must divide."""
    with pytest.raises(ValueError, match="--batch-size"):
        BatchLayout(49, 6, processes)
    shares = [BatchLayout(48, 6, processes, rank) for rank in range(processes)]
    forwards = range(shares[0].accumulation)
    found = {share.micro_batch(forward): range(48)[share.samples(forward)] for forward in forwards for share in shares}
    assert found == {number: range(6 * number, 6 * number + 6) for number in range(8)}


@pytest.mark.parametrize("crop", ["inception", "none"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_reduced_decoding_shows_the_same_crops(monkeypatch, crop, orientation):
    """Crops equal those of full decoding up to averaging; small crops and PNGs are equal to the bit.

    Of slow waves, different along each axis and in each channel, so that a shifted or turned crop shows.
    """
    rows, columns = np.mgrid[:606, :810]
    waves = [np.sin(rows / 61 + 1), np.sin(columns / 47), np.cos(rows / 83 + columns / 71)]
    exif, decoded = Image.Exif(), []
    exif[0x0112] = orientation
    levels = (128 + 100 * np.stack(waves, axis=-1)).astype(np.uint8)
    jpeg = encode(Image.fromarray(levels), "JPEG", quality=95, exif=exif)
    pictures = [{"bytes": content, "path": None} for content in [jpeg] * 24 + [as_png(0)]]
    split = open_split(make(25, img=(datasets.Image(), pictures)))
    load = JpegImageFile.load
    monkeypatch.setattr(JpegImageFile, "load", lambda self: (decoded.append(max(self.size)), load(self))[1])
    for size, sides in {(30, 50): {102, 203, 405, 810}, (900, 1000): {810}}.items():
        transform = TrainTransform(size, crop, (0.005, 1.0), antialias=True)
        plain = next(iter(make_loader(split, transform, 0, BatchLayout(25, 25), range(1), 0)))["image"].float()
        decoded.clear()
        reduced = replace(transform, reduced_decoding=True)
        images = next(iter(make_loader(split, reduced, 0, BatchLayout(25, 25), range(1), 0)))["image"].float()
        assert set(decoded) <= sides
        assert crop == "none" or size == (900, 1000) or len(set(decoded)) > 2
        difference = (images - plain).abs().mean(dim=(1, 2, 3))  # levels; of other crops, 40 and more
        assert difference.max() < (9 if size == (30, 50) else 1e-9)
        assert difference.mean() < 4


def test_broken_images_are_replaced_and_counted():
    images = [{"bytes": b"nothing" if number == 2 else as_png(number), "path": None} for number in range(4)]
    split = open_split(make(4, img=(datasets.Image(), images)))
    batch = next(iter(make_loader(split, TRANSFORM, 0, BatchLayout(4, 4), range(1), 0)))
    assert batch["skipped"].sum() == 1
    samples = SplitImages(split, ImageReader(HfViTImageProcessor(size={"height": 6, "width": 10})))
    read, labels = samples.__getitems__([0, 1, 2, 3])
    assert (read.numbers, [*read.unreadable], len(labels)) == ([0, 1, 3], [2], 3)


def test_auto_leaves_a_processor_to_each_training_process(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for processors, processes, expected in ((8, 1, 7), (8, 2, 3), (8, 8, 1), (1, 1, 1), (256, 1, 16)):
        monkeypatch.setattr(workers, "count_processors", lambda processors=processors: processors)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert count_workers("auto") == expected
    assert count_workers(0) == 0
    assert count_workers(40) == 40


@pytest.mark.parametrize(
    "files", [{"cpu.max": "{} 100000"}, {"cpu/cpu.cfs_quota_us": "{}", "cpu/cpu.cfs_period_us": "100000"}]
)
def test_processors_are_limited_by_the_quota_of_a_container(files, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(12), raising=False)
    for quota, expected in ((350_000, 3), (50_000, 1), ("max", 12), (-1, 12), (10**8, 12)):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content.format(quota))
        assert count_processors() == expected


def test_another_thread_makes_batches_a_few_ahead():
    made = []

    def batches():
        for number in itertools.count():
            made.append((number, threading.current_thread()))
            yield number

    ahead = prefetch(batches(), ahead=2)
    assert [next(ahead) for _ in range(5)] == list(range(5))
    time.sleep(0.2)
    assert len(made) <= 5 + 2 + 1
    assert threading.current_thread() not in {thread for _, thread in made}
    ahead.close()
    assert not made[0][1].is_alive()
    assert list(prefetch(iter(range(7)))) == list(range(7))


def test_an_error_of_the_thread_comes_after_the_batches_before_it():
    ahead = prefetch(1 // number for number in (1, 0))
    assert next(ahead) == 1
    with pytest.raises(ZeroDivisionError):
        next(ahead)
