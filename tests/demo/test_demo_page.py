"""The page of `hf-vit demo`: what it computes, and the page itself in a browser that has no window."""

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.demo.page import Demo, highlight
from hf_vit.models.loading import save_folder
from hf_vit.models.prediction import predict

from ..models import TINY

BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chromium-browser")


def saved(folder, **changes):
    """A classifier whose answer is not in doubt."""
    torch.manual_seed(2)
    labels = [f"kind {index}" for index in range(11)]
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
    model = hf_vit.HfViTForImageClassification(hf_vit.HfViTConfig(**{**TINY, "patch_size": 4, **names, **changes}))
    torch.nn.init.normal_(model.classifier.weight)
    save_folder(folder, model, hf_vit.HfViTImageProcessor(size={"height": 20, "width": 36}, patch_size=4))
    return folder


@pytest.fixture
def picture(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 255, (31, 45, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_classes_and_what_the_model_saw(tmp_path, picture):
    folder = saved(tmp_path / "folder")
    classes, shown = Demo(folder).look(picture)
    (expected,) = predict(folder, [picture])
    assert list(classes.items()) == [(label, pytest.approx(score, rel=1e-5)) for label, score in expected]
    assert shown.size == (36 * 22, 20 * 22)
    squashed = Image.open(picture).resize((36, 20), Image.Resampling.BILINEAR).resize(shown.size)
    share = np.asarray(shown).mean() / np.asarray(squashed).mean()
    assert 0.15 < share < 1  # darker, but for the patch that counts most


def test_pictures_of_any_shape(tmp_path, picture):
    """With the preset "native" the picture keeps its shape."""
    folder = saved(tmp_path / "folder")
    hf_vit.HfViTImageProcessor(preset="native", patch_size=4, max_num_patches=60).save_pretrained(folder)
    _, shown = Demo(folder).look(picture)
    rows, columns = 6, 9  # of 31 x 45 pixels in at most 60 patches of 4
    assert shown.size == (columns * 4 * 19, rows * 4 * 19)


def test_two_classes_of_one_name(tmp_path, picture):
    folder = saved(tmp_path / "folder", id2label=dict.fromkeys(range(11), "crane"), label2id={"crane": 10})
    classes, _ = Demo(folder).look(picture)
    assert len(classes) == 5
    assert sum("(class" in label for label in classes) == 4


def test_dark_where_the_model_does_not_look():
    shown = np.asarray(highlight(np.ones((8, 12)), np.array([[0.3, 0.1, 0.1], [0.1, 0.1, 0.1]])))
    assert shown.shape == (448, 672, 3)
    assert shown[0, 0].tolist() == [255] * 3
    assert shown[-1, -1].tolist() == [38] * 3  # 15 %
    assert (np.asarray(highlight(np.ones((8, 12, 3)), np.full((2, 3), 0.2))) == 255).all()


def test_models_without_anything_to_show_are_refused(tmp_path):
    folder = saved(tmp_path / "folder", pooling="none")
    with pytest.raises(ValueError, match="classifies every patch"):
        Demo(folder)
    resnet = hf_vit.HfBiTForImageClassification(hf_vit.HfBiTConfig(embedding_size=32, depths=[1], image_size=20))
    save_folder(tmp_path / "resnet", resnet, hf_vit.HfViTImageProcessor(size=20))
    with pytest.raises(ValueError, match="holds a ResNet, which has no attention to show"):
        Demo(tmp_path / "resnet")


@pytest.fixture
def address(tmp_path):
    """Of the page, shown by the command itself."""
    pytest.importorskip("gradio")
    folder = saved(tmp_path / "folder")
    root = str(Path(hf_vit.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "GRADIO_TEMP_DIR": str(tmp_path / "page")}
    command = [sys.executable, "-m", "hf_vit.cli", "demo", str(folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert "is shown at http://127.0.0.1:" in line, line
            yield line.split(" is shown at ")[1].split()[0]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()


@pytest.fixture
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    with playwright.sync_playwright() as driver:
        if found is None and not Path(driver.chromium.executable_path).exists():
            pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}, and none of playwright's own")
        yield driver.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.mark.browser
def test_a_picture_is_classified_in_a_browser(tmp_path, address, browser, picture):
    page = browser.new_page()
    page.set_default_timeout(120_000)
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(address)
    page.set_input_files("input[type=file]", str(picture))
    classes, shown = Demo(tmp_path / "folder").look(picture)
    (likeliest, score), *_ = classes.items()
    page.get_by_role("heading", name=likeliest).wait_for()
    assert f"{score:.0%}" in page.locator("body").inner_text().replace("\n%", "%")
    image = page.locator("img[src*='/file=']").nth(1)  # the first is the picture itself
    image.wait_for()
    answer = page.request.get(image.get_attribute("src"))
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(answer.body())).convert("RGB")), np.asarray(shown))
    strangers = [url for url in requested if not url.startswith((address, "data:", "blob:"))]
    assert not strangers, strangers
