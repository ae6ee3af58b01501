"""Shards: every row once on any number of processes and workers, exact resume, and no more read than is needed."""

import gzip
import io
import multiprocessing
import os
import signal
import tarfile
from collections import Counter
from itertools import chain, pairwise

import datasets
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from torch._utils import ExceptionWrapper

from hf_vit.data import shards as module
from hf_vit.data.labels import state_classes
from hf_vit.data.samplers import BatchLayout
from hf_vit.data.shards import ShardedDataset, divide_tars, plan_blocks
from hf_vit.data.sources import load_digits, load_split
from hf_vit.data.splits import open_named, open_split
from hf_vit.files.messages import format_error
from hf_vit.inference.batches import ImageReader
from hf_vit.inference.predictions import SplitImages, eval_loader
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.settings.fields import EvaluateSettings

from ..photographs import encode
from ..processes import DIGITS, history, launch, weights
from .test_loaders import TRANSFORM, make, make_loader, write_tar

ROWS = 75
READS: Counter[str] = Counter()


class Reader(io.BytesIO):
    """A file of fsspec's file system in memory, which counts the bytes and requests of reads."""

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(size)
        READS.update(requests=1, bytes=len(content))
        return content


@pytest.fixture
def memory(monkeypatch):
    """Files at the address memory://, each opened for itself."""
    open_shared = MemoryFileSystem._open

    def open_alone(self, path, mode="rb", **options):
        return Reader(self.store[path].getvalue()) if mode == "rb" else open_shared(self, path, mode, **options)

    monkeypatch.setenv("HF_VIT_ALLOW", "private")
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "_open", open_alone)
    return MemoryFileSystem()


def numbered(number: int) -> bytes:
    return encode(Image.new("RGB", (4, 4), (number, 7, 9)))


@pytest.fixture(params=["tar", "parquet", "remote tar", "remote parquet"])
def place(request, tmp_path, memory):
    """Address of 75 rows in 4 shards; the red of image n is n."""
    kind = request.param.split()[-1]
    for number, (begin, end) in enumerate(pairwise([0, 30, 31, 60, ROWS])):
        file = tmp_path / f"train-{number:04d}.{kind}"
        if kind == "tar":
            write_tar(file, range(begin, end), image=numbered)
        else:
            images = [{"bytes": numbered(n), "path": None} for n in range(begin, end)]
            make(end - begin, img=(datasets.Image(), images)).to_parquet(file, batch_size=4)
    if "remote" not in request.param:
        return str(tmp_path)
    for file in tmp_path.iterdir():
        memory.pipe_file(f"/bucket/{file.name}", file.read_bytes())
    return f"memory://bucket/train-{{0000..0003}}.{kind}"


def open_shards(place: str):
    split = open_split(load_split(place, "train", streaming=True))
    shards = split.samples
    assert isinstance(shards, ShardedDataset)
    assert len(split) == ROWS
    plan = plan_blocks(shards.index)._replace(lanes=6, window=2)
    if shards.index.is_tar:
        first_rows = divide_tars(shards.index, 5)
        plan = plan._replace(first_rows=first_rows, lengths=np.diff(np.append(first_rows, ROWS)))
    else:
        assert plan.lengths.max() == 4
    split.samples = ShardedDataset(shards.index, plan)
    return split


def shown(batches) -> list[list[int]]:
    return [batch["image"][:, 0, 0, 0].tolist() for batch in batches]


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_every_image_once_an_epoch_on_any_number_of_processes_and_workers(place, processes, workers):
    split = open_shards(place)
    sampler = split.samples.sampler(3)
    positions = [sampler.draw(*divmod(p, ROWS)).row for p in range(2 * ROWS)]
    shares = [BatchLayout(30, 5, processes, rank) for rank in range(processes)]
    ranks = [shown(make_loader(split, TRANSFORM, 3, share, range(5), workers)) for share in shares]
    for step in range(5):  # 150 images: two epochs
        forwards = range(step * 6 // processes, (step + 1) * 6 // processes)
        seen = [image for rank in ranks for forward in forwards for image in rank[forward]]
        assert sorted(seen) == sorted(positions[30 * step : 30 * step + 30])
    assert sorted(positions[:ROWS]) == sorted(positions[ROWS:]) == list(range(ROWS))


def test_batches_do_not_depend_on_workers_and_go_on_where_they_were(place):
    split = open_shards(place)
    alone = list(make_loader(split, TRANSFORM, 1, BatchLayout(12, 6, 2, 1), range(20), 0))
    for start, workers in ((0, 2), (17, 0)):
        loader = make_loader(split, TRANSFORM, 1, BatchLayout(12, 6, 2, 1), range(start, 20), workers)
        torch.testing.assert_close(list(loader), alone[start:], rtol=0, atol=0)


@pytest.mark.parametrize("place", ["parquet", "remote tar", "remote parquet"], indirect=True)
@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 0), (3, 0)])
def test_a_row_is_read_once_over_all_processes_and_workers(place, processes, workers, memory, monkeypatch):
    splits = [open_shards(place) for _ in range(processes)]
    rows_read, read_group = [], pq.ParquetFile.read_row_group

    def read_and_count(*arguments, **options):
        table = read_group(*arguments, **options)
        rows_read.append(len(table))
        return table

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_and_count)
    READS.clear()
    steps, seen = range(ROWS // processes // 15), []
    for rank, split in enumerate(splits):
        batches = make_loader(split, TRANSFORM, 3, BatchLayout(15 * processes, 15, processes, rank), steps, workers)
        seen += chain(*shown(batches))
    assert len(seen) == len(set(seen)) == 15 * processes * len(steps)
    if splits[0].samples.index.is_tar:
        assert READS["bytes"] <= sum(len(file.getbuffer()) for file in memory.store.values())
    else:  # a row group that two lanes share comes twice
        assert len(seen) <= sum(rows_read) <= ROWS + 5 * 4


@pytest.mark.parametrize("place", ["remote tar"], indirect=True)
def test_late_start_reads_few_blocks(place):
    split = open_shards(place)
    READS.clear()
    next(iter(make_loader(split, TRANSFORM, 1, BatchLayout(6, 6), range(10**9, 10**9 + 1), 0)))
    assert 6 <= READS["requests"] <= 12  # a block of each of six lanes, and perhaps the next one
    READS.clear()
    open_shards(place)
    assert READS["requests"] <= 1  # the index is in the cache; it checks for one next to the shards


def test_evaluation_sees_every_row_once_in_order(place):
    split = open_shards(place)
    samples = SplitImages(split, ImageReader(HfViTImageProcessor(size={"height": 6, "width": 10})))
    for processes, workers in ((1, 0), (3, 0), (2, 2)):
        loaders = [eval_loader(samples, 4, processes, rank, workers) for rank in range(processes)]
        seen = [[i for read, _ in loader for i in read.numbers] for loader in loaders]
        assert sorted(chain(*seen)) == list(range(ROWS))
        assert workers or list(chain(*seen)) == list(range(ROWS))
    assert split.num_labels == 3
    if split.samples.index.is_tar:
        labels = [label for _, labels in eval_loader(samples, 4, 1, 0, 0) for label in labels]
        assert labels[:ROWS] == [row % 3 for row in range(ROWS)]


@pytest.mark.parametrize("place", ["tar", "remote tar"], indirect=True)
def test_workers_are_spawned_with_an_event_loop(place, monkeypatch):
    """A forked one breaks the connections of this process, which then waits for ever."""
    monkeypatch.setattr(MemoryFileSystem, "async_impl", True)
    loader = make_loader(open_shards(place), TRANSFORM, 1, BatchLayout(6, 6), range(2), 1)
    context = loader.multiprocessing_context
    assert (context is not None and context.get_start_method() == "spawn") == place.startswith("memory")


def test_workers_end_with_a_killed_process_that_was_sending_them_a_batch(tmp_path):
    """A worker that waits for the rest of a batch does not look for its parent."""
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)  # 180 kB: more than a pipe holds
    image = {"bytes": encode(Image.fromarray(noise)), "path": None}
    make(40, img=(datasets.Image(), [image] * 40)).to_parquet(tmp_path / "train-0.parquet")

    def train(pipe):
        split = open_split([str(tmp_path / "train-0.parquet")], label_column="fine_label")
        batches = iter(make_loader(split, TRANSFORM, 0, BatchLayout(40, 40), range(100), 2))
        next(batches)
        pipe.send([worker.pid for worker in multiprocessing.active_children()])
        os.kill(os.getpid(), signal.SIGKILL)

    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=train, args=(theirs,)).start()
    assert ours.poll(60)
    running = [psutil.Process(pid) for pid in ours.recv() if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(running, timeout=20)
    for process in left:
        process.kill()
    assert not left


def test_an_index_is_made_once_and_continued(tmp_path, monkeypatch):
    """Where it was killed, and where a shard has changed."""
    for number in range(4):
        write_tar(tmp_path / f"train-{number}.tar", range(number + 1))
    files, scanned, scan = load_split(str(tmp_path), "train", streaming=True), [], module.scan_tar

    def scan_two(file, columns):
        if len(scanned) == 2:
            raise KeyboardInterrupt
        scanned.append(file)
        return scan(file, columns)

    monkeypatch.setattr(module, "_THREADS", 1)
    monkeypatch.setattr(module, "scan_tar", scan_two)
    with pytest.raises(KeyboardInterrupt):
        open_split(files)
    monkeypatch.setattr(module, "scan_tar", lambda *arguments: scanned.append(arguments[0]) or scan(*arguments))
    for _ in range(2):
        assert len(open_split(files)) == 10
        assert sorted(scanned) == files
    assert len(list(tmp_path.glob("hf_vit_index-*.arrow"))) == 1
    write_tar(tmp_path / "train-1.tar", range(9))
    assert len(open_split(files)) == 17


DAMAGES = {
    "cut": lambda content: content[:3000],
    "garbage": lambda content: content[:10240] + b"?" * 5000 + content[15240:],
    "gz": gzip.compress,
    "parquet": lambda content: content[:-9],
    "changed": lambda content: content[:600] + bytes(len(content) - 600),
    "changed parquet": lambda content: content[:600] + bytes(len(content) - 600),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_shard_is_one_sentence_with_its_name(kind, tmp_path):
    file = tmp_path / f"train-0.{'parquet' if 'parquet' in kind else 'tar'}"
    if "parquet" in kind:
        make(20).to_parquet(file)
    else:
        write_tar(file, range(20))
    split = open_split([str(file)]) if "changed" in kind else None
    file.write_bytes(DAMAGES[kind](file.read_bytes()))
    with pytest.raises(ValueError, match=file.name) as caught:
        split.samples[7] if split else open_split([str(file)])
    wrapped = ExceptionWrapper(caught._excinfo, where="in DataLoader worker process 0")  # as from a worker
    with pytest.raises(ValueError, match="Original Traceback") as again:
        wrapped.reraise()
    assert format_error(again.value) == format_error(caught.value)


def test_unreadable_images_are_replaced_by_one_of_the_same_lane(tmp_path):
    write_tar(tmp_path / "train-0.tar", range(40), image=lambda number: b"no" if number % 2 else numbered(number))
    split = open_split(load_split(str(tmp_path), "train", streaming=True))
    (batch,) = make_loader(split, TRANSFORM, 0, BatchLayout(40, 40), range(1), 0)
    assert (batch["skipped"] > 0).sum() == 20
    assert all(number % 2 == 0 for number in batch["image"][:, 0, 0, 0].tolist())


@pytest.mark.usefixtures("memory")
def test_wrong_names_are_one_sentence(tmp_path):
    write_tar(tmp_path / "train-0.tar", range(3))
    for name, split, reason in (
        (tmp_path, "test", "'test' .* train"),
        (tmp_path, "train[:50%]", "train"),
        ("memory://nothing/*.tar", "train", "nothing"),
        ("unknown-protocol://nothing/*.tar", "train", "unknown-protocol"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_split(str(name), split, streaming=True)


def test_whole_numbers_and_words_are_classes_of_tars_and_can_be_stated(tmp_path):
    write_tar(tmp_path / "train-0.tar", range(6), label="n{}")
    write_tar(tmp_path / "test-0.tar", range(6))
    (tmp_path / "names.txt").write_text("n2\nother\nn0\nn1\n")
    names = str(tmp_path / "names.txt")
    words, numbers = (open_split(load_split(str(tmp_path), split, streaming=True)) for split in ("train", "test"))
    stated = state_classes(words, None, names)
    for split, label_names, labels in (
        (words, ["n0", "n1", "n2"], [0, 1, 2, 0, 1, 2]),
        (stated, ["n2", "other", "n0", "n1"], [2, 3, 0, 2, 3, 0]),
        (numbers, None, [0, 1, 2, 0, 1, 2]),
    ):
        assert (split.label_names, split.num_labels) == (label_names, len(label_names or range(3)))
        assert [split.label(split.samples[row]) for row in range(6)] == labels
    assert (numbers.image_column, numbers.label_column) == ("png", "cls")
    assert state_classes(numbers, 9, None).num_labels == 9
    assert state_classes(numbers, None, names).label_names == ["n2", "other", "n0", "n1"]
    (tmp_path / "names.txt").write_text("n2\nn0\n")
    for split, count, file, named in (
        (numbers, 2, None, r"3 .* 2"),
        (words, None, names, "names.txt"),
        (numbers, 3, names, "--num-labels"),
    ):
        with pytest.raises(ValueError, match=named):
            state_classes(split, count, file)


def test_classes_of_parquet_files_are_counted_unless_stated(tmp_path, monkeypatch):
    make(7).cast_column("fine_label", datasets.Value("int32")).to_parquet(tmp_path / "train-0.parquet")
    files = load_split(str(tmp_path), "train", streaming=True)
    assert open_split(files).num_labels == 3
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    settings = EvaluateSettings(dataset=str(tmp_path), streaming=True, num_labels=11)
    split = open_named(settings, "train")
    assert (split.num_labels, split.label(split.samples[4])) == (11, 1)


WITHOUT_CLASSES = {  # the type of a column and its values
    "numbers": (datasets.Value("float64"), [0.5, 1.5]),
    "times": (datasets.Value("timestamp[s]"), [1, 2]),
    "records": ({"kind": datasets.Value("int64")}, [{"kind": 0}, {"kind": 1}]),
    "a large number": (datasets.Value("int64"), [0, 10**9]),
    "lists of numbers": (datasets.List(datasets.Value("float32")), [[0.5], [1.5]]),
}


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_without_classes_or_images_are_refused(tmp_path, streaming):
    for number, column in enumerate(WITHOUT_CLASSES.values()):
        file = tmp_path / f"{number}" / "train-0.parquet"
        file.parent.mkdir()
        make(2, other=column).to_parquet(file)
        with pytest.raises(ValueError, match="other"):
            open_split(load_split(str(file.parent), "train", streaming=streaming), label_column="other")
    for column in ("fine_label", "other"):
        with pytest.raises(ValueError, match="--image-column"):
            open_split(load_split(str(tmp_path / "0"), "train", streaming=streaming), column, "fine_label")
    for number in (10**7, 10**40):
        write_tar(tmp_path / "train-0.tar", range(2), label=f"{number}{{}}")
        with pytest.raises(ValueError, match=r"cls|train-0\.tar|split 'train'"):
            open_split(load_split(str(tmp_path / "train-0.tar"), "train", streaming=streaming))


@pytest.mark.parametrize("streaming", [False, True])
def test_paths_of_a_plain_column_are_checked_too(tmp_path, streaming):
    """A column with the content of images, but without their type, could name any file of this machine."""
    image, struct = tmp_path / "elsewhere.png", {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    image.write_bytes(numbered(1))
    make(2, plain=(struct, [{"bytes": None, "path": str(image)}] * 2)).to_parquet(tmp_path / "data/train-0.parquet")
    with pytest.raises(ValueError, match="elsewhere"):
        open_split(load_split(str(tmp_path / "data"), "train", streaming=streaming), "plain").samples[0]


def test_lists_of_names_need_a_copy(tmp_path):
    """The labels of shards are not read in advance."""
    tags = (datasets.List(datasets.Value("string")), [["a", "b"], ["b"]])
    make(2, tags=tags).to_parquet(tmp_path / "train-0.parquet")
    assert open_split(load_split(str(tmp_path), "train"), label_column="tags").label_names == ["a", "b"]
    with pytest.raises(ValueError, match="tags"):
        open_split(load_split(str(tmp_path), "train", streaming=True), label_column="tags")


def test_links_in_a_tar_are_named(tmp_path, caplog):
    write_tar(tmp_path / "train.tar", range(3), image=numbered)
    with tarfile.open(tmp_path / "train.tar", "a") as archive:
        for name, kind in (("x.png", tarfile.LNKTYPE), ("y.png", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(name)
            link.type = kind
            link.linkname = archive.getnames()[0]
            archive.addfile(link)
    assert len(open_split(load_split(str(tmp_path), "train", streaming=True))) == 3
    assert "train.tar: 2" in caplog.text


def test_shards_on_the_hub(hub, client):
    output = client("""
    from tests.data.test_loaders import make
    make(40).push_to_hub("alice/animals", max_shard_size="3KB")
    from hf_vit.data.sources import load_split
    from hf_vit.data.splits import open_split
    files = load_split("alice/animals", "train", streaming=True)
    split = open_split(files)
    labels = [split.label(split.samples[row]) for row in range(40)]
    print(len(files) > 1, "@" in files[0], split.label_names, labels == [row % 3 for row in range(40)])
    print(len(open_split(load_split("hf://datasets/alice/animals/data", "train"))))
    """)
    assert output.splitlines() == ["True True ['cat', 'dog', 'owl'] True", "40"]


def test_training_on_shards_is_independent_of_the_number_of_processes(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(480), 3)):
        load_digits()["train"].select(rows).to_parquet(shards / f"train-{number}.parquet", batch_size=10)
    settings = {**DIGITS, "dataset": shards, "streaming": "true", "schedule": "constant", "save_every": 20}
    settings |= {"eval_every": 1000, "steps": 25, "eval_split": "none"}
    launch("pretrain", **settings, output_dir=tmp_path / "alone")
    launch("pretrain", processes=2, **{**settings, "steps": 22}, output_dir=tmp_path / "moved")
    launch("pretrain", **{**settings, "num_workers": 2}, resume="true", output_dir=tmp_path / "moved")
    alone, moved = (weights(tmp_path / name) for name in ("alone", "moved"))
    torch.testing.assert_close(moved, alone, rtol=1e-5, atol=1e-5)
    losses = [[entry["loss"] for entry in history(tmp_path / name)] for name in ("alone", "moved")]
    assert np.allclose(losses[0], losses[1], atol=1e-4)
