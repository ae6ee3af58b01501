"""The code of docs/scale.md runs in each engine for data, and gives the features of `hf_vit.embed`."""

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import numpy as np
import pyarrow.parquet as pq
import pytest

import hf_vit

from ..paths import ROOT
from ..tiny_models import save_tiny, write_images

PAGE = (ROOT / "docs" / "scale.md").read_text()
ENGINES = {  # section of the page -> its package, and what its code writes
    "datasets": ("datasets", "features_of_datasets.parquet"),
    "Ray Data": ("ray", "features_of_ray"),
    "Daft": ("daft", "features_of_daft"),
    "Spark": ("pyspark", "features_of_spark"),
}
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_TRAIN_V2_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
PORT = "8000"


def code_of(section: str) -> str:
    """The first Python block of a section."""
    _, _, text = PAGE.partition(f"\n### {section}\n")
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]


@pytest.fixture
def place(tmp_path):
    """A folder with what the page names."""
    save_tiny(tmp_path / "ti16")
    write_images(tmp_path / "photographs", 21)
    return tmp_path


def start(code: str, folder: Path) -> subprocess.Popen:
    variables = os.environ | VARIABLES | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    (folder / "engine.py").write_text(code)
    command = [sys.executable, "-W", "ignore", "engine.py"]
    return subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("section", ENGINES)
def test_an_engine_gives_the_features_of_embed(section, place):
    package, output = ENGINES[section]
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    process = start(code_of(section), place)
    try:
        assert process.wait(timeout=900) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = np.array(pq.read_table(place / output)["features"].to_pylist(), np.float32)
    expected = hf_vit.embed(place / "ti16", place / "photographs")
    order = [np.lexsort(features.round(3).T) for features in (found, expected)]  # engines keep no order
    np.testing.assert_allclose(found[order[0]], expected[order[1]], atol=1e-4)


@pytest.mark.slow
def test_litserve_answers_requests(place):
    pytest.importorskip("litserve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
    process = start(code_of("LitServe").replace(PORT, str(free_port)), place)
    file = place / "photographs" / "03.png"
    body = json.dumps({"image": base64.b64encode(file.read_bytes()).decode()}).encode()
    request = Request(f"http://127.0.0.1:{free_port}/predict", body, {"Content-Type": "application/json"})
    try:
        answer = None
        end = time.monotonic() + 600
        while answer is None and time.monotonic() < end and process.poll() is None:
            try:
                with urlopen(request, timeout=60) as response:
                    answer = json.loads(response.read())
            except (URLError, ConnectionError, TimeoutError) as error:
                if isinstance(error, HTTPError):
                    error.close()
                time.sleep(1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    [expected] = hf_vit.predict(place / "ti16", file, top_k=3)
    assert answer is not None
    assert answer["labels"] == [one.label for one in expected]
    np.testing.assert_allclose(answer["scores"], [one.score for one in expected], atol=1e-5)
