"""The page of `hf-vit demo`: its examples, its server and its end; tests/conversion/test_web.py opens it."""

import os
import re
import shutil
import signal
import time
import urllib.request
from importlib.resources import as_file, files

import pytest
from PIL import Image

from hf_vit.conversion import convert
from hf_vit.demo import page
from hf_vit.inference.predictor import predict

from ..processes import start

DEMO = """
import tempfile
import hf_vit.demo.page
from hf_vit.cli import main
def write(models, output, **_):
    output.mkdir()
    (output / "index.html").write_text(" ".join(models))
tempfile.tempdir = {folder!r}
hf_vit.demo.page.write_static_page = write
raise SystemExit(main({arguments!r}))
"""


def address_of(demo) -> str:
    """Wait until the page is served; return its address."""
    output = demo.folder / "output"
    while not (found := re.search(r"http://\S+", output.read_text() if output.exists() else "")):
        assert demo.is_running(), (demo.folder / "error").read_text()
        time.sleep(0.01)
    return found[0]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_page_is_served_until_a_signal_and_then_deleted(tmp_path, number, status):
    (demo,) = start(DEMO.format(folder=str(tmp_path), arguments=["demo", "one", "two"]))
    with urllib.request.urlopen(address_of(demo)) as answer:
        assert answer.read() == b"one two"
        assert answer.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
        assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert list(tmp_path.iterdir())
    os.kill(demo.pid, number)
    demo.wait()
    assert demo.status == status
    assert not list(tmp_path.iterdir())


def test_a_written_page_is_served_at_a_free_port_and_stays(tmp_path):
    (shown := tmp_path / "shown").mkdir()
    for name in ("index.html", "page.json", "worker.mjs"):
        (shown / name).write_text("mine")
    (tmp_path / "secret.txt").write_text("secret")
    running = [start(DEMO.format(folder=str(tmp_path), arguments=["demo", str(shown)]))[0] for _ in range(2)]
    first, second = map(address_of, running)
    assert first != second
    with urllib.request.urlopen(f"{second}/worker.mjs") as answer:
        assert answer.headers["Content-Type"] == "text/javascript"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{second}/..%2fsecret.txt")
    for demo in running:
        os.kill(demo.pid, signal.SIGINT)
        demo.wait()
    assert (shown / "index.html").read_text() == "mine"


def test_the_digits_are_recognized_by_the_embedded_model(tmp_path):
    """Judged by scikit-learn's labels, read off the first held-out digits."""
    with as_file(files("hf_vit.demo") / "digits.npz") as checkpoint:
        model, processor = convert(checkpoint, labels=[str(digit) for digit in range(10)])
    examples = page.write_digits(tmp_path)
    found = [entry[0].label for entry in predict((model.eval(), processor), examples)]
    assert found == ["0", "8", "8", "9", "8", "3"]


def test_examples_are_the_readable_images_that_browsers_show(tmp_path):
    Image.new("RGB", (9, 7)).save(tmp_path / "b.png")
    shutil.copyfile(tmp_path / "b.png", tmp_path / "c.PNG")
    (tmp_path / "a.png").write_bytes(b"no picture")
    Image.new("RGB", (9, 7)).save(tmp_path / "d.tif")
    assert [file.name for file in page.displayed_images(tmp_path)] == ["b.png", "c.PNG"]
