"""`NpzReader` and `write_npz` against NumPy's own reader, and against damaged files."""

import io
import os
import platform
import random
import resource
import weakref
import zipfile

import numpy as np
import pytest
import torch

from hf_vit.files.npz import BFLOAT16, SUPPORTED_DTYPES, NpzError, NpzReader, write_npz

from ..comparing import assert_same_file, read_arrays
from ..paths import GOLDENS
from ..processes import finish, start

CHECKPOINTS = [
    path for path in sorted(GOLDENS.glob("*.npz")) if not path.stem.startswith("jpeg") and "expected" not in path.name
]
DTYPES = sorted(dtype.name for dtype in SUPPORTED_DTYPES - {BFLOAT16})


def read_all(path):
    with NpzReader(path) as reader:
        return {name: reader.read(name) for name in reader.arrays}


def assert_same(tensors, arrays):
    assert list(tensors) == list(arrays)
    for name, tensor in tensors.items():
        assert tensor.numpy().dtype == arrays[name].dtype.newbyteorder("=")
        assert np.array_equal(tensor.numpy(), arrays[name])
        assert tensor.is_contiguous()


def small_arrays():
    """Arrays of different sizes; the last is longer than a few headers."""
    generator = np.random.default_rng(11)
    return {
        "cls": generator.normal(size=(1, 1, 7)).astype("f4"),
        "head/bias": generator.integers(0, 5, size=3),
        "head/kernel": generator.normal(size=(7, 13)).astype("f4"),
    }


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_checkpoints_survive_reading_and_writing(path, tmp_path):
    write_npz(tmp_path / "copy.npz", read_all(path).items())
    assert_same_file(tmp_path / "copy.npz", path)
    assert list(read_arrays(tmp_path / "copy.npz")) == list(read_arrays(path))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_order_and_layout(save, byte_order, dtype, tmp_path):
    dtype = np.dtype(dtype).newbyteorder(byte_order)
    array = np.random.default_rng(3).integers(0, 2**15, size=(2, 3, 5)).astype(dtype)
    arrays = {"c": array, "fortran": np.asfortranarray(array), "scalar": array[1, 2, 3], "none": array[:0]}
    save(tmp_path / "a.npz", **arrays)
    assert_same(read_all(tmp_path / "a.npz"), read_arrays(tmp_path / "a.npz"))


def test_bfloat16_is_the_upper_half_of_float32(tmp_path):
    values = torch.tensor([[1.0, -2.5, 3.0e38], [float("inf"), 1e-40, 0.1]])
    write_npz(tmp_path / "a.npz", [("x", values.to(torch.bfloat16))])
    stored = read_arrays(tmp_path / "a.npz")["x"]
    assert stored.dtype.str == "|V2"
    upper_half = (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(upper_half, values.to(torch.bfloat16).float().numpy())
    assert torch.equal(read_all(tmp_path / "a.npz")["x"], values.to(torch.bfloat16))


def test_arrays_do_not_share_memory(tmp_path):
    np.savez(tmp_path / "a.npz", **small_arrays())
    with NpzReader(tmp_path / "a.npz") as reader:
        reader.read("cls").zero_()
        np.testing.assert_array_equal(reader.read("cls"), small_arrays()["cls"])


GROWTH = """\
from hf_vit.files.npz import NpzReader
from tests.processes import growth_of

with NpzReader({file!r}) as reader:
    reader.read("large0")  # loads the code of libraries, whose pages count as memory
    print(growth_of(lambda: [reader.read(name).shape for name in reader.arrays]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_reading_takes_the_memory_of_one_array(tmp_path):
    large = np.zeros(10 << 20, "f4")  # above 32 MiB, malloc gives freed memory back at once
    np.savez(tmp_path / "a.npz", large0=large, large1=large, large2=large)
    measuring = start(GROWTH.format(file=str(tmp_path / "a.npz")))  # this process may keep freed memory
    assert 0.9 <= int(finish(measuring).stdout) / large.nbytes <= 1.25


def test_writing_frees_an_array_before_the_next_is_made(tmp_path):
    made = []

    def arrays():
        for name in "abc":
            assert all(one() is None for one in made), "an array that was written is still in memory"
            array = np.ones(3, "f4")
            made.append(weakref.ref(array))
            yield name, array
            del array

    write_npz(tmp_path / "out.npz", arrays())
    assert len(made) == 3


def saved(save=np.savez, **arrays):
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def zipped(members):
    """Return the bytes of a zip file; each member has the right checksum."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


WHOLE = saved(**small_arrays(), long=np.arange(5000))
LONG_COMMENT = bytearray(WHOLE)
LONG_COMMENT[WHOLE.index(b"PK\1\2") + 33] = 0xFF  # which the directory says to follow the first name
with zipfile.ZipFile(io.BytesIO(WHOLE)) as whole:
    MEMBERS = [(name, whole.read(name)) for name in whole.namelist()]
NPY = dict(MEMBERS)["cls.npy"]
DAMAGED = {  # kind: bytes of the file, and what the error names
    "flipped bit far in": (WHOLE.replace(np.int64(3000).tobytes(), np.int64(3004).tobytes()), "'long'"),
    "hidden array": (bytes(LONG_COMMENT), "broken.npz"),
    "strings": (saved(labels=np.array(["cat", "dog"])), "'labels'"),
    "no arrays": (zipped([]), "broken.npz"),
}
CHANGED = {  # kind: the array "cls"
    "new version": NPY[:6] + b"\7\0" + NPY[8:],
    "negative": NPY.replace(b"(1, 1, 7)", b"(-1,-1,7)"),
    "one petabyte": NPY.replace(b"(1, 1, 7), }", b"(%d,),}" % 2**48),
}
DAMAGED |= {kind: (zipped([("cls.npy", data), *MEMBERS[1:]]), "'cls'") for kind, data in CHANGED.items()}
with pytest.warns(UserWarning, match="Duplicate"):
    DAMAGED["twice"] = (zipped([*MEMBERS, MEMBERS[0]]), "'cls'")


@pytest.mark.parametrize("kind", DAMAGED)
def test_error_messages_of_damaged_files(kind, tmp_path):
    path, (content, message) = tmp_path / "broken.npz", DAMAGED[kind]
    path.write_bytes(content)
    with pytest.raises(NpzError, match=message) as caught:
        read_all(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_shrinks_while_it_is_open(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20_000))
    with NpzReader(tmp_path / "a.npz") as reader:
        os.truncate(tmp_path / "a.npz", 100_000)
        with pytest.raises(NpzError, match="'x'"):
            reader.read("x")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickles_are_refused_and_never_run(tmp_path):
    fuse = tmp_path / "exploded"
    np.savez(tmp_path / "a.npz", fine=np.zeros(3), step=np.array([Bomb(str(fuse))], dtype=object))
    with pytest.raises(NpzError, match=r"a\.npz"):
        NpzReader(tmp_path / "a.npz")
    assert not fuse.exists()


def test_false_sizes_in_the_zip_directory_are_refused_before_allocation(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros(100, "f4"))
    data = bytearray(path.read_bytes())
    size = data.rindex(b"PK\1\2") + 24  # the uncompressed size in the directory entry (zip APPNOTE 4.3.12)
    data[size : size + 4] = (2**27).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(NpzError, match="'x'"):
        NpzReader(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_fuzz_gives_the_right_data_or_an_error(save, tmp_path):
    arrays, path = small_arrays(), tmp_path / "a.npz"
    whole = saved(save, **arrays)
    pick = random.Random(5)
    damaged = [whole[:length] for length in range(len(whole))]
    damaged += [whole[:p] + bytes([whole[p] ^ pick.randrange(1, 256)]) + whole[p + 1 :] for p in range(len(whole))]
    damaged += [bytes(byte if pick.random() > 0.01 else pick.randrange(256) for byte in whole) for _ in range(200)]
    errors = 0
    for data in damaged:
        path.unlink(missing_ok=True)  # ext4 writes a file that is truncated and filled again straight to the disk
        path.write_bytes(data)
        try:
            assert_same(read_all(path), arrays)
        except NpzError:
            errors += 1
    assert len(damaged) * 0.8 < errors < len(damaged)  # the rest hits time stamps and the like


def test_numpy_reads_written_arrays_and_tensors_of_any_layout(tmp_path):
    arrays = {**small_arrays(), "scalar": np.array(5), "none": np.zeros((0, 3))}
    arrays["fortran"] = np.arange(15.0, dtype="f4").reshape(5, 3).T
    parameter = torch.nn.Parameter(torch.arange(15.0).reshape(3, 5))
    arrays |= {"kernel": parameter.detach().numpy().T, "part": parameter.detach().numpy()[:, 1:4]}
    for name in ("a.npz", "b.npz"):
        write_npz(tmp_path / name, {**arrays, "kernel": parameter.T, "part": parameter[:, 1:4]}.items())
    assert_same(read_all(tmp_path / "a.npz"), arrays)
    assert_same(read_all(tmp_path / "a.npz"), read_arrays(tmp_path / "a.npz"))
    assert zipfile.ZipFile(tmp_path / "a.npz").testzip() is None
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert zipfile.ZipFile(tmp_path / "a.npz").infolist()[0].date_time == (1980, 1, 1, 0, 0, 0)


def interrupted():
    yield "x", np.zeros(3)
    raise KeyboardInterrupt  # Ctrl-C while the second array is made


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ([("x", np.array(["cat"]))], NpzError, "'x'"),
        ([("x", np.array([None]))], NpzError, "'x'"),
        ([("x", torch.zeros(3, dtype=torch.float8_e5m2))], NpzError, "torch.float8_e5m2"),
        (interrupted(), KeyboardInterrupt, None),
    ],
)
def test_a_failed_write_keeps_the_old_file(arrays, error, message, tmp_path):
    (tmp_path / "a.npz").write_text("old")
    with pytest.raises(error, match=message):
        write_npz(tmp_path / "a.npz", arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert (tmp_path / "a.npz").read_text() == "old"


def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the file size simulates a full disk: the write fails in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match=r"a\.npz"):
            write_npz(tmp_path / "a.npz", [("x", np.zeros(1_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
