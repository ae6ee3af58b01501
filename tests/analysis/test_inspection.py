"""The report: content, self-contained page, and errors that leave the other parts."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.analysis.inspection import visible_image
from hf_vit.cli import main
from hf_vit.loading import save_folder
from hf_vit.models.configuration_hf_bit import HfBiTConfig
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.modeling_hf_bit import HfBiTForImageClassification

from ..html_pages import Page
from ..paths import BROWSER
from ..tiny_models import VARIANTS, tiny


def make_image(path, seed=0):
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (31, 45, 3), np.uint8)).save(path)
    return path


def inspect(root, model, *arguments, images=(), preset="vit_jax", status=0):
    """Save a model and inspect it, by default with one image; return the folder of the report."""
    save_folder(root / "model", model, HfViTImageProcessor.for_model(model.config, preset=preset))
    images = images or [make_image(root / "image.png")]
    command = ["inspect", root / "model", "--image", *images, "--output", root / "report", *arguments]
    assert main(list(map(str, command))) == status
    return root / "report"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of `hf-vit inspect` for a model with a label that needs escaping, two images and a broken one."""
    root = tmp_path_factory.mktemp("inspect")
    model = tiny()
    model.config.id2label = {index: f"<b>class</b> & {index}" for index in range(11)}
    images = [make_image(root / "a b.png"), root / "broken.png", make_image(root / "c.png", seed=1)]
    (root / "broken.png").write_text("no image")
    return inspect(root, model, images=images, status=2)


def test_the_folder_has_the_figures_and_the_report(report):
    assert names_of(report) == {
        "report.html",
        "filters.png",
        "position_similarity.png",
        "attention_distance.png",
        *(f"{image}.{kind}.png" for image in ("01-a_b", "03-c") for kind in ("rollout", "heads")),
    }
    for path in report.glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 150
            assert np.asarray(picture.convert("L")).std() > 10  # something is drawn
    assert not list(report.parent.glob(".*"))


def test_the_page_is_complete_and_self_contained(report):
    html = (report / "report.html").read_text()
    page = Page(html)
    names = ("src", "href", "srcset", "data", "action")
    links = [value for _, attributes in page.elements for name, value in attributes.items() if name in names]
    assert page.tags.count("img") == len(links) == 7
    assert all(link.startswith("data:image/") for link in links)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "url(" not in html
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"|base64,[A-Za-z0-9+/=]+', "", html)
    for name in ("a b.png", "broken.png", "<b>class</b> & "):
        assert name in page.text
    assert "<b>" not in page.tags


def names_of(report) -> set[str]:
    return {path.name for path in report.glob("[!.]*")}


def test_weights_that_are_nan_leave_the_other_figures(tmp_path, capsys):
    model = tiny()
    model.vit.layers[1].mlp.fc1.weight.data[0, 0] = torch.nan
    report = inspect(tmp_path, model, status=2)
    assert "vit.layers.1.mlp.fc1.weight" in capsys.readouterr().err
    assert names_of(report) == {"report.html", "filters.png", "position_similarity.png"}
    assert "NaN" in (report / "report.html").read_text()


MODELS = {
    **{name: (VARIANTS[name], "vit_jax") for name in ("mean", "map", "none", "hybrid", "no positions", "axial")},
    "native": ({"image_size": (24, 36)}, "native"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "preset"), MODELS.values(), ids=MODELS)
def test_every_kind_of_model(fields, preset, tmp_path):
    names = names_of(inspect(tmp_path, tiny(**fields), preset=preset))
    assert ("position_similarity.png" in names) == (fields.get("position_embedding_type") != "none")
    assert {"01-image.rollout.png", "attention_distance.png"} <= names


def test_a_resnet_has_no_attention(tmp_path):
    torch.manual_seed(0)
    config = HfBiTConfig(depths=[1, 2], embedding_size=32, image_size=(24, 36), num_labels=7)
    report = inspect(tmp_path, HfBiTForImageClassification(config))
    assert names_of(report) == {"report.html", "filters.png"}
    assert "14.3%" in Page((report / "report.html").read_text()).text  # each of 7 classes


@pytest.mark.parametrize("channels", [3, 1])
def test_shown_images_equal_the_original_pixels(channels):
    levels = torch.randint(0, 256, (channels, 5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    processor = HfViTImageProcessor("timm", size={"height": 5, "width": 7}, num_channels=channels, do_resize=False)
    processor.update(do_center_crop=False, image_mean=[0.4] * channels, image_std=[0.2] * channels)
    seen = visible_image(processor(levels, return_tensors="pt")["pixel_values"][0], processor)
    expected = levels.numpy().transpose(1, 2, 0) if channels == 3 else levels[0].numpy()
    np.testing.assert_allclose(seen, expected / 255, atol=1e-6)


BROKEN_WORDS = """() => {
  const broken = [], range = document.createRange();
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const word of texts.currentNode.data.matchAll(/[\\p{L}\\d]+/gu)) {
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) broken.push(word[0]);
    }
  }
  return broken;
}"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_the_page_without_a_network(report, width):
    """Also on a phone: nothing is wider than the screen, and no word is broken."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme="dark", offline=True)
        page.goto((report / "report.html").as_uri())
        assert page.evaluate("[...document.images].filter(one => one.complete && one.naturalWidth > 100).length") == 9
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(BROKEN_WORDS) == []
        browser.close()
