"""Work in parts: every image once, whatever is killed; refused where it would mix two jobs."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hf_vit
from hf_vit import Predictor
from hf_vit.cli import main
from hf_vit.inference.feature_files import Features
from hf_vit.inference.parts import Job

from ..tiny_models import save_tiny, write_images

IMAGES = 41  # no unit and no batch divides it


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = write_images(tmp_path_factory.mktemp("data") / "images", IMAGES)
    (folder / "07.png").write_text("no picture")
    return folder


def embed(model, images, output, *options):
    return main(["embed", str(model), str(images), "--output", f"{output}/", "--batch-size", "4", *options])


def read_parts(folder):
    """The rows of all parts, sorted; no two parts overlap."""
    table = pa.concat_tables(pq.read_table(file) for file in sorted(folder.glob("part-*.parquet")))
    return table.replace_schema_metadata(None)


def test_parts_have_every_image_once(tiny, images, tmp_path, capsys):
    assert embed(tiny, images, tmp_path / "out", "--unit-size", "10") == 0
    assert "41 images, 1 of them unreadable, 4 parts" in capsys.readouterr().out
    table = read_parts(tmp_path / "out")
    assert table["index"].to_pylist() == list(range(IMAGES))
    assert table["file"].to_pylist() == sorted(map(str, images.iterdir()))
    assert table["error"].is_valid().to_pylist() == [number == 7 for number in range(IMAGES)]
    assert "07.png" in table["error"][7].as_py()
    readable = [file for file in table["file"].to_pylist() if not file.endswith("07.png")]
    found = np.stack(table["features"].drop_null().to_pylist())
    np.testing.assert_allclose(found, hf_vit.embed(tiny, readable), rtol=1e-6, atol=1e-6)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["images"], manifest["unreadable"]) == (IMAGES, 1)
    assert manifest["parts"] == sorted(file.name for file in (tmp_path / "out").glob("part-*"))
    assert manifest["fingerprints"].keys() == {"model", "preprocessing", "settings", "software"}


def test_classes_in_parts(tiny, images, tmp_path):
    command = ["predict", str(tiny), str(images), "--output", f"{tmp_path}/out/", "--top-k", "2"]
    assert main(command) == 0
    table = read_parts(tmp_path / "out")
    good = [file for file in sorted(map(str, images.iterdir())) if not file.endswith("07.png")]
    expected = hf_vit.predict(tiny, good, top_k=2)
    assert table["labels"].drop_null().to_pylist() == [[one.label for one in its] for its in expected]
    scores = np.array(table["scores"].drop_null().to_pylist())
    np.testing.assert_allclose(scores, [[one.score for one in its] for its in expected], rtol=1e-5)


def test_values_do_not_depend_on_units_and_restarts(tiny, images, tmp_path, monkeypatch):
    """To the bit: units are cut between batches, and the last batch of a unit has as many rows as the others."""
    assert embed(tiny, images, tmp_path / "one", "--unit-size", "41", "--num-workers", "0") == 0
    folder = tmp_path / "two"
    assert embed(tiny, images, folder, "--part", "2/3", "--unit-size", "8") == 0
    kept = {file.name: file.stat().st_mtime_ns for file in folder.glob("part-*")}
    assert not (folder / "manifest.json").exists()
    assert embed(tiny, images, folder, "--unit-size", "12", "--num-workers", "2") == 0
    assert kept.items() <= {file.name: file.stat().st_mtime_ns for file in folder.glob("part-*")}.items()
    assert read_parts(folder).equals(read_parts(tmp_path / "one"))


def test_slices_of_an_array_make_one_result(tiny, images, tmp_path):
    folder = tmp_path / "out"
    for number in (3, 1, 2):
        assert not (folder / "manifest.json").exists()
        assert embed(tiny, images, folder, "--part", f"{number}/3") == 0
    assert (folder / "manifest.json").exists()
    assert read_parts(folder)["index"].to_pylist() == list(range(IMAGES))


def test_later_images_are_a_line_and_added_when_asked(tiny, tmp_path, capsys):
    images = write_images(tmp_path / "images", 6)
    folder = tmp_path / "out"
    assert embed(tiny, images, folder) == 0
    for name in ("00a.png", "99.png"):
        (images / name).write_bytes((images / "03.png").read_bytes())
    assert embed(tiny, images, folder) == 0
    assert "2 images" in capsys.readouterr().err
    assert len(read_parts(folder)) == 6
    before = read_parts(folder)
    assert embed(tiny, images, folder, "--extend") == 0
    table = read_parts(folder)
    assert table.slice(0, 6).equals(before)
    assert [Path(file).name for file in table["file"].to_pylist()[6:]] == ["00a.png", "99.png"]
    assert json.loads((folder / "manifest.json").read_text())["images"] == 8
    assert embed(tiny, images, folder, "--extend") == 0
    assert len(read_parts(folder)) == 8


def other_model(tiny, images, tmp_path):
    return [save_tiny(tmp_path / "other", patch_size=4, representation_size=10, layer_norm_eps=1e-3), images], "model"


def other_preprocessing(tiny, images, tmp_path):
    model, processor = hf_vit.load(tiny)
    processor.update(jpeg_dct="accurate" if processor.jpeg_dct == "fast" else "fast")
    model.save_pretrained(tmp_path / "other")
    processor.save_pretrained(tmp_path / "other")
    return [tmp_path / "other", images], "preprocessing"


def other_settings(tiny, images, tmp_path):
    return [tiny, images, "--normalize"], "settings"


def other_images(tiny, images, tmp_path):
    return [tiny, write_images(tmp_path / "more", 3)], "other images"


@pytest.mark.parametrize("other", [other_model, other_preprocessing, other_settings, other_images])
def test_another_job_is_refused_and_nothing_is_lost(other, tiny, images, tmp_path, capsys):
    folder = tmp_path / "out"
    assert embed(tiny, images, folder, "--part", "1/3") == 0
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    arguments, about = other(tiny, images, tmp_path)
    command = ["embed", *map(str, arguments), "--output", str(folder), "--batch-size", "4"]
    assert main(command) == 2
    assert about in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_foreign_folders_and_parts_are_refused(tiny, images, tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert embed(tiny, images, folder) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert [file.name for file in folder.iterdir() if not file.name.startswith(".")] == ["notes.txt"]
    assert embed(tiny, images, tmp_path / "out", "--unit-size", "8") == 0
    assert embed(tiny, write_images(tmp_path / "images", 9), tmp_path / "other", "--unit-size", "8") == 0
    part = min((tmp_path / "other").glob("part-*"))
    (tmp_path / "out" / part.name).write_bytes(part.read_bytes())
    assert embed(tiny, images, tmp_path / "out") == 2
    assert part.name in capsys.readouterr().err


def test_images_that_vanish(tiny, tmp_path, capsys):
    """One file is a row with the reason; the whole folder, perhaps a disk that is not mounted, ends the job."""
    images = write_images(tmp_path / "images", 9)
    folder = tmp_path / "out"
    assert embed(tiny, images, folder, "--part", "1/2") == 0
    (images / "05.png").unlink()
    assert embed(tiny, images, folder) == 0
    assert read_parts(folder)["error"].is_valid().to_pylist() == [number == 5 for number in range(9)]
    second = tmp_path / "second"
    assert embed(tiny, images, second, "--part", "1/2") == 0
    images.rename(tmp_path / "elsewhere")
    assert main(["embed", str(tiny), str(images), "--output", str(second)]) == 2
    assert "images" in capsys.readouterr().err
    assert len(read_parts(second)) == 4


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KB, and a function that mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]

    def mount(options):
        command = [*as_root, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    try:
        if mount("size=64k,mode=1777"):
            pytest.skip("only root can mount a disk")
    except FileNotFoundError:
        pytest.skip("this system has no mount or sudo")
    yield folder, mount
    subprocess.run([*as_root, "umount", str(folder)], check=True)


def test_a_full_and_a_read_only_disk_are_one_sentence_and_the_job_goes_on_later(tiny, images, small_disk, capsys):
    disk, mount = small_disk
    folder = disk / "out"
    assert embed(tiny, images, folder, "--unit-size", "4") == 2
    [message] = capsys.readouterr().err.splitlines()
    assert "No space left" in message
    before = {file.name: file.read_bytes() for file in folder.glob("part-*")}
    assert 0 < len(before) < 11
    assert os.listdir(folder / "claims") == []
    assert mount("remount,size=64k,ro") == 0
    assert embed(tiny, images, folder, "--unit-size", "4") == 2
    [message] = capsys.readouterr().err.splitlines()
    assert "Read-only" in message
    assert mount("remount,size=1m,rw") == 0
    assert embed(tiny, images, folder, "--unit-size", "4") == 0
    assert before.items() <= {file.name: file.read_bytes() for file in folder.glob("part-*")}.items()
    assert read_parts(folder)["index"].to_pylist() == list(range(IMAGES))


def test_a_claim_of_the_living_is_left_and_one_of_the_dead_is_taken(tiny, images, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    assert embed(tiny, images, folder, "--part", "1/3", "--unit-size", "8") == 0
    here, elsewhere, dead = Job(folder), Job(folder), Job(folder)
    elsewhere._token = "another_machine 1 0.0 abc"
    dead._token = f"{os.uname().nodename} {2**30} 0.0 abc"
    assert dead._take(range(IMAGES), 8) == range(12, 20)
    assert here._take(range(IMAGES), 8) == range(12, 20)
    assert elsewhere._take(range(IMAGES), 8) == range(20, 28)
    assert here._take(range(IMAGES), 12) == range(28, 40)
    claim = folder / "claims" / "000000000020-000000000028"
    os.utime(claim, (time.time() - 1000, time.time() - 1000))
    assert here._take(range(IMAGES), 4) == range(20, 24)
    predictor = Predictor(tiny, "embed")
    columns = predictor.join([], range(20, 28))
    elsewhere._finish(range(20, 28), columns)  # it was only slow: its work is discarded
    assert len(read_parts(folder)) == 12


OPTIONS = [["--part", "1/2"], ["--unit-size", "5"], ["--extend"], ["--dry-run"]]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options[0])
def test_options_of_parts_need_a_folder(options, tiny, images, tmp_path, capsys):
    assert main(["embed", str(tiny), str(images), "--output", str(tmp_path / "f.npz"), *options]) == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0/3", "4/3", "2", "a/b"])
def test_a_wrong_slice_is_refused(wrong, tiny, images, tmp_path, capsys):
    assert embed(tiny, images, tmp_path / "out", "--part", wrong) == 2
    assert wrong in capsys.readouterr().err


def test_several_processes_need_a_folder(tiny, images, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["embed", str(tiny), str(images), "--output", str(tmp_path / "f.npz")]) == 2
    assert "FOLDER/" in capsys.readouterr().err


def test_a_dry_run_counts_and_writes_nothing(tiny, images, tmp_path, capsys):
    assert embed(tiny, images, tmp_path / "out", "--dry-run", "--unit-size", "8") == 0
    assert "41 in 6 parts of 8" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_parts_are_searched_as_a_file(tiny, images, tmp_path, capsys):
    assert embed(tiny, images, tmp_path / "parts", "--unit-size", "8") == 0
    assert main(["embed", str(tiny), str(images), "--output", str(tmp_path / "one.parquet"), "--batch-size", "4"]) == 1
    parts, one = Features(tmp_path / "parts"), Features(tmp_path / "one.parquet")
    assert parts.names() == one.names()
    assert parts.names(np.array([3, 7, 39])) == {number: one.names()[number] for number in (3, 7, 39)}
    np.testing.assert_allclose(np.concatenate(list(parts.chunks())), np.concatenate(list(one.chunks())), atol=1e-6)
    np.testing.assert_allclose(parts.rows(np.array([0, 8, 39])), one.rows(np.array([0, 8, 39])), atol=1e-6)
    capsys.readouterr()
    found = []
    for features in ("parts", "one.parquet"):
        assert main(["search", str(tmp_path / features), str(images / "11.png"), "--json", "--group"]) == 0
        found.append([json.loads(line)["image"] for line in capsys.readouterr().out.splitlines()])
    assert found[0] == found[1]
    assert found[0][0] == str(images / "11.png")


PROCESS = """
import sys
from hf_vit.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_kills_at_any_moment_lose_nothing(processes, tiny, tmp_path):
    """20 moments, with other lengths of units in between; then one more run ends the job."""
    images = write_images(tmp_path / "images", 400)
    assert embed(tiny, images, tmp_path / "one", "--unit-size", "400", "--num-workers", "0") == 0
    folder = tmp_path / "out"
    rng = random.Random(processes)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for kill in range(20):
        length = rng.choice(["4", "8", "12", "20", "32"])
        arguments = ["embed", str(tiny), str(images), "--output", f"{folder}/", "--batch-size", "4"]
        arguments += ["--unit-size", length, "--num-workers", rng.choice(["0", "1"])]
        code = PROCESS.format(arguments=arguments)
        group = [
            subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)
            for _ in range(processes)
        ]
        count = len(list(folder.glob("part-*")))
        deadline = time.monotonic() + 300
        while len(list(folder.glob("part-*"))) == count and time.monotonic() < deadline:
            if all(process.poll() is not None for process in group):
                break
            time.sleep(0.01)
        time.sleep(rng.random() / 5)
        for process in group:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert all(file.stat().st_size for file in folder.glob("part-*")), kill
    assert embed(tiny, images, folder, "--unit-size", "16") == 0
    assert read_parts(folder).equals(read_parts(tmp_path / "one"))
    assert json.loads((folder / "manifest.json").read_text())["images"] == 400
    assert not list(folder.glob(".*incomplete*"))
    assert os.listdir(folder / "claims") == []
