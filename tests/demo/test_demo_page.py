"""The page of `hf-vit demo`: its computations, and the page in a headless browser."""

import ast
import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.conversion import convert
from hf_vit.demo.description import describe
from hf_vit.demo.examples import CREDITS, PHOTOGRAPHS, copy_examples, write_digits
from hf_vit.demo.looking import Demo, highlight
from hf_vit.demo.space import write_space
from hf_vit.loading import save_folder
from hf_vit.prediction import classify, predict

from ..tiny_models import TINY

BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chromium-browser")


def saved(folder, **changes):
    """Classifier with a certain answer."""
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


def test_classes_and_attention_picture(tmp_path, picture):
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


def test_one_layer_and_one_head(tmp_path, picture):
    """Judged by the attentions that the model returns."""
    folder = saved(tmp_path / "folder")
    model, processor = hf_vit.load(folder)
    pixel_values = processor(str(picture), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        attentions = model(pixel_values, output_attentions=True).attentions[1][0]  # (heads, tokens, tokens)
    patches = attentions[:, 0, 1:].unflatten(-1, (5, 9)).numpy()
    seen = (pixel_values[0].permute(1, 2, 0).numpy() + 1) / 2
    for head, expected in ((1, patches[1]), (None, patches.mean(axis=0))):
        shown = np.asarray(Demo(folder).show(picture, 1, head), np.int16)
        assert abs(shown - np.asarray(highlight(seen, expected), np.int16)).max() <= 1


def test_two_classes_of_one_name(tmp_path, picture):
    folder = saved(tmp_path / "folder", id2label=dict.fromkeys(range(11), "crane"), label2id={"crane": 10})
    classes, _ = Demo(folder).look(picture)
    assert len(classes) == 5
    assert sum("(class" in label for label in classes) == 4


def test_picture_is_dark_where_attention_is_low():
    shown = np.asarray(highlight(np.ones((8, 12)), np.array([[0.3, 0.1, 0.1], [0.1, 0.1, 0.1]])))
    assert shown.shape == (448, 672, 3)
    assert shown[0, 0].tolist() == [255] * 3
    assert shown[-1, -1].tolist() == [38] * 3  # 15 %
    assert (np.asarray(highlight(np.ones((8, 12, 3)), np.full((2, 3), 0.2))) == 255).all()


def test_attention_to_few_patches_leaves_the_others_visible():
    """One patch with 25 times the attention of the rest of the object: this is at a fifth of the scale, not 4 %."""
    attention = np.zeros((4, 6))
    attention[0, 0], attention[2:] = 1, 0.04
    shown = np.asarray(highlight(np.ones((8, 12)), attention))
    assert shown[-1, -1, 0] == pytest.approx(255 * (0.15 + 0.85 * 0.2), abs=1)


def test_models_without_attention_are_refused(tmp_path):
    folder = saved(tmp_path / "folder", pooling="none")
    with pytest.raises(ValueError, match="classifies every patch"):
        Demo(folder)
    resnet = hf_vit.HfBiTForImageClassification(hf_vit.HfBiTConfig(embedding_size=32, depths=[1], image_size=20))
    save_folder(tmp_path / "resnet", resnet, hf_vit.HfViTImageProcessor(size=20))
    with pytest.raises(ValueError, match="ResNet"):
        Demo(tmp_path / "resnet")


def test_description_has_the_cards_facts_without_markup(tmp_path):
    folder = saved(tmp_path / "folder")
    front = "license: <b>mine</b>\ndatasets: ['![x](https://evil.example/x.png)']"
    (folder / "README.md").write_text(f"---\n{front}\n---\n<script>alert(1)</script> Buy at https://evil.example\n")
    model, _ = hf_vit.load(folder)
    html = describe(folder, "<i>name</i>", model)
    assert f"<dt>parameters</dt><dd>{model.num_parameters():,}</dd>" in html
    assert "<dt>licence</dt><dd>&lt;b&gt;mine&lt;/b&gt;</dd>" in html
    assert not {"script", "Buy", "evil", "<i>", "<b>", "<img"} & set(re.findall(r"<?\w+>?", html))
    (folder / "README.md").write_text("---\n[: {broken\n---\n")
    assert "<dt>classes</dt><dd>11</dd>" in describe(folder, "name", model)


def test_the_digits_are_recognised_by_the_embedded_model(tmp_path):
    """Judged by scikit-learn's labels, read off the first held-out digits."""
    with as_file(files("hf_vit.demo") / "digits.npz") as checkpoint:
        model, processor = convert(checkpoint, labels=[str(digit) for digit in range(10)])
    examples = write_digits(tmp_path)
    found = [entry[0].label for entry in classify(model.eval(), processor, [str(file) for file in examples])]
    assert found == ["0", "8", "8", "9", "8", "3"]


def test_the_photographs_have_credits(tmp_path):
    """Each is small, and named with its license in the file beside it and on the page."""
    license = (PHOTOGRAPHS / "LICENSE.txt").read_text(encoding="utf-8")
    for file in copy_examples(PHOTOGRAPHS, tmp_path):
        assert file.stat().st_size < 40_000
        (address,) = re.findall(rf"{file.name[3:]} .*(https://\S+)", license)
        assert address in CREDITS
    assert "https://creativecommons.org/licenses/by/2.0/" in license + CREDITS


def test_examples_of_a_folder(tmp_path, picture):
    for number in range(14):
        shutil.copyfile(picture, tmp_path / f"{number:02d}.png")
    (tmp_path / "00.png").write_bytes(b"no picture")
    Image.open(picture).save(tmp_path / "000.tif")  # no browser shows it
    (tmp_path / "examples").mkdir()
    names = [file.name for file in copy_examples(tmp_path, tmp_path / "examples")]
    assert names == [f"{number:02d}-{number:02d}.png" for number in range(1, 13)]
    picture.write_bytes(b"")
    (tmp_path / "none").mkdir()
    shutil.copyfile(picture, tmp_path / "none" / "a.png")
    with pytest.raises(ValueError, match=r"none of the images in .*none can be read and shown"):
        copy_examples(tmp_path / "none", tmp_path / "examples")


@pytest.mark.parametrize("name", ['x"; print(1); "y', "x'+print(1)+'", "x\nprint(1)", "x\\", "{print(1)}"])
def test_a_folders_name_is_no_code_of_a_space(tmp_path, name):
    folder = saved(tmp_path / name)
    write_space(tmp_path / "space", [str(folder), name])
    tree = ast.parse((tmp_path / "space" / "app.py").read_text(encoding="utf-8"))
    assert {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)} == {"Path", "serve"}
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {f"models/{name}", name} <= constants


@pytest.fixture
def address(tmp_path):
    """Address of the page of two models, served by the command."""
    pytest.importorskip("gradio")
    folders = [saved(tmp_path / "folder"), saved(tmp_path / "other", num_hidden_layers=2)]
    root = str(Path(hf_vit.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "GRADIO_TEMP_DIR": str(tmp_path / "page")}
    command = [sys.executable, "-m", "hf_vit.cli", "demo", *map(str, folders)]
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
def test_two_models_classify_a_picture_and_a_folder_in_a_browser(tmp_path, address, browser, picture):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_default_timeout(60_000)
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(address)
    page.set_input_files("input[type=file]", str(picture))
    looks = page.locator(".image-frame img")
    for number, name in enumerate(("folder", "other"), start=1):
        classes, shown = Demo(tmp_path / name).look(picture)
        (likeliest, score), *_ = classes.items()
        page.get_by_role("heading", name=likeliest).first.wait_for()
        assert f"{score:.0%}" in page.locator("body").inner_text().replace("\n%", "%")
        assert_shows(page, looks.nth(number), shown)  # the first is the picture itself
    choose(page, "Attention", "Layer 2 of 3")
    choose(page, "Head", "Head 1 of 2")
    assert_shows(page, looks.nth(1), Demo(tmp_path / "folder").show(picture, 1, 0))
    assert page.evaluate("document.documentElement.scrollWidth") == 390

    (tmp_path / "broken.png").write_bytes(picture.read_bytes()[:500])
    page.get_by_label("Remove Image").click()
    page.wait_for_function("!document.querySelector('.image-frame img')")
    page.set_input_files("input[type=file]", str(tmp_path / "broken.png"))
    page.get_by_text("cannot read broken.png: ").wait_for()
    page.locator(".toast-close").click()
    assert "Traceback" not in page.content()

    page.get_by_role("tab", name="A folder of pictures").click()
    (tmp_path / "pictures" / "inside").mkdir(parents=True)
    for place in (picture.name, "inside/again.png"):
        shutil.copyfile(picture, tmp_path / "pictures" / place)
    shutil.copyfile(tmp_path / "broken.png", tmp_path / "pictures" / "broken.png")
    (tmp_path / "pictures" / "notes.txt").write_text("none")
    page.set_input_files("input[webkitdirectory]", str(tmp_path / "pictures"))
    sentence = "Pictures classified: 2. Other files, not used: 1. Pictures that cannot be read: 1 (broken.png)."
    page.get_by_text(sentence).wait_for()
    with page.expect_download() as download:
        page.locator("a[download='predictions-other.csv']").click()
    rows = list(csv.DictReader(download.value.path().read_text().splitlines()))
    assert [(row["image"], row["rank"]) for row in rows[:6]] == [
        *(("again.png", str(rank)) for rank in range(1, 6)), ("picture.png", "1")
    ]  # fmt: skip
    (expected,) = predict(tmp_path / "other", [picture], top_k=1)
    assert page.locator(".predictions td").all_inner_texts()[-2:] == [
        rows[5]["label"],
        f"{100 * expected[0].score:.1f}",
    ]
    strangers = [url for url in requested if not url.startswith((address, "data:", "blob:"))]
    assert not strangers, strangers


def choose(page, label: str, option: str) -> None:
    """Choose an entry in the first list of this name."""
    page.get_by_label(label).first.click()
    page.get_by_role("option", name=option).click()


def assert_shows(page, image, expected) -> None:
    """Wait until a picture of the page is as expected, pixel by pixel."""
    image.wait_for()
    for _ in range(100):
        answer = page.request.get(image.get_attribute("src"))
        if np.array_equal(np.asarray(Image.open(io.BytesIO(answer.body())).convert("RGB")), np.asarray(expected)):
            return
        page.wait_for_timeout(100)
    raise AssertionError("another picture is shown")
