"""The static page: its files, and in a headless browser against Python's logits."""

import json
import os
import re
import shutil
import threading
from functools import partial
from http.server import ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit import HfViTImageProcessor
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, export
from hf_vit.demo.page import PHOTOGRAPHS, PageHandler
from hf_vit.inference.predictor import predict
from hf_vit.loading import save_folder
from hf_vit.runtimes import web

from ..paths import BROWSER, ROOT
from ..photographs import write_pictures
from ..tiny_models import tiny

CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
EVIL = "<img src=x onerror=document.title='run'>"
CONTROLS = "main :is(button, input, select, summary, a), dialog[open] button"
OUTLINE = """() => {
  const focused = document.activeElement;
  const shown = getComputedStyle(focused).opacity === "0" ? focused.parentElement : focused;
  const { outlineStyle, outlineWidth } = getComputedStyle(shown);
  return outlineStyle === "none" ? 0 : parseFloat(outlineWidth);
}"""
CLASSIFY = """async ([name, file]) => {
  const { models: [model] } = await (await fetch("page.json")).json();
  window.worker ??= new Worker("worker.js", { type: "module" });
  window.worker.postMessage({ model, file });
  const picture = await (await fetch(name)).blob();
  return new Promise((resolve) => {
    window.worker.onmessage = ({ data }) => "id" in data && resolve(data.error ?? Array.from(data.logits));
    window.worker.postMessage({ id: 0, picture });
  });
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A calibrated model with a crop, and markup in the names of its classes."""
    folder = tmp_path_factory.mktemp("web") / "kinds"
    model = tiny(num_hidden_layers=1)
    model.config.id2label = {index: f"kind {index} {EVIL}" for index in range(11)}
    model.config.coverage_thresholds = {"0.9": 0.01, "0.95": 1e-9}
    model.config.rejection_thresholds = [1e3] * 11
    save_folder(folder, model, HfViTImageProcessor("augreg", size=(20, 36), background=[200, 30, 90]))
    return folder


@pytest.mark.slow
def test_the_programs_agree_with_the_model(folder, web_runtime, onnxruntime, tmp_path):
    output = tmp_path / "page"
    command = ["demo", str(folder), "--static", str(output), "--runtime", str(web_runtime)]
    assert main(command) == 0
    assert (output / "runtime" / "ort-wasm-simd-threaded.wasm").read_text() == "ort-wasm-simd-threaded.wasm"
    assert "sdk: static" in (output / "README.md").read_text()
    assert json.loads((output / "config.json").read_text())["model_type"] == "vit"
    assert {file.name for file in (output / "examples").iterdir()} == {"china.jpg", "flower.jpg"}
    page, license = json.loads((output / "page.json").read_text()), (PHOTOGRAPHS / "LICENSE.txt").read_text()
    credits = {name: re.findall(rf"{name} .*https://www\.(\S+)/", license) for name in ("china.jpg", "flower.jpg")}
    assert all(address in page["credits"] for (address,) in credits.values())
    (entry,) = page["models"]
    assert entry["thresholds"] == {"auto": 0.5, "coverage": {"0.9": 0.01, "0.95": 1e-9}, "rejection": [1e3] * 11}
    model, processor = hf_vit.load(folder)
    levels = torch.randint(0, 256, (5, 3, 31, 77), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(**processor(levels.byte(), return_tensors="pt")).logits.numpy()
    for program in entry["programs"]:
        file = output / program["file"]
        assert program["bytes"] == file.stat().st_size
        assert str(ROOT).encode() not in file.read_bytes()  # paths of this machine
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        logits, attention = session.run(None, {"pixel_values": levels.float().numpy()})
        tolerance = {"float32": 1e-5, "float16": 1e-2, "int8": 0.1}[program["name"]]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance * np.abs(expected).max())
        assert attention.shape == (5, 5, 6)
    again = [*command, "--overwrite"]
    assert main(again) == 0
    export(model, output, "web", processor=processor, runtime=web_runtime, overwrite=True)
    assert main(again) == 0
    (output / "README.md").write_text("my own words")
    assert main(again) == 2
    assert main(command) == 2
    assert (output / "README.md").read_text() == "my own words"


def test_bad_input_is_refused(folder, web_runtime, tmp_path):
    model, processor = hf_vit.load(folder)
    with pytest.raises(ConversionError, match="runtime"):
        export(model, tmp_path / "page", "onnx", processor=processor, runtime=web_runtime)
    with pytest.raises(ConversionError, match="5 channels"):
        export(tiny(num_channels=5), tmp_path / "page", "web", processor=processor, runtime=web_runtime)
    (web_runtime / "dist" / "ort-wasm-simd-threaded.wasm").unlink()
    with pytest.raises(ConversionError, match="onnxruntime-web"):
        export(model, tmp_path / "page", "web", processor=processor, runtime=web_runtime)
    assert not (tmp_path / "page").exists()


class Handler(PageHandler):
    """A server that sends the policy of the page with every file, so that it holds in the workers too."""

    def end_headers(self):
        self.send_header("Content-Security-Policy", self.server.policy)
        super().end_headers()


def wait_for_status(page, text):
    page.get_by_role("status").filter(has_text=text).wait_for()


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    """The page in a browser; its attribute `foreign` lists the requests to other origins."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no browser is installed")
    try:
        runtime = os.environ.get("HF_VIT_WEB_RUNTIME") or web.find_runtime()
    except ConversionError as error:
        pytest.skip(f"set HF_VIT_WEB_RUNTIME to the npm package onnxruntime-web, which cannot be downloaded: {error}")
    output = tmp_path_factory.mktemp("page") / "page"
    several = tiny(num_hidden_layers=1, problem_type="multi_label_classification", label_thresholds=[0.3] * 10 + [0.9])
    models = {"kinds": hf_vit.load(folder), "several": (several, HfViTImageProcessor(size=(20, 36)))}
    web.write_web_page(output, models, examples=[PHOTOGRAPHS / "flower.jpg"], runtime=runtime)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(output)))
    (server.policy,) = re.findall(r'content="(default-src[^"]*)"', (output / "index.html").read_text())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", *CAMERA])
        page = chromium.new_page(viewport={"width": 390, "height": 844})
        page.set_default_timeout(60_000)
        page.folder, page.models, page.foreign = output, models, []
        page.on("request", lambda request: request.url.startswith((address, "data:")) or page.foreign.append(request))
        page.goto(address)
        wait_for_status(page, "Ready")
        yield page
        chromium.close()
    server.shutdown()
    server.server_close()


# Of pictures with alpha or 16 bits, a browser makes other levels than Python.
TOLERANCES = {"transparent.png": 0.02, "gray_transparent.png": 0.02, "palette.png": 0.02, "sixteen_bits.png": 0.02}


@pytest.mark.browser
def test_logits_in_a_browser_are_those_of_python(page, folder, tmp_path):
    model, processor = hf_vit.load(folder)
    write_pictures(tmp_path)
    for name in (path.name for path in tmp_path.glob("*.*g") if path.name != "cmyk.jpg"):
        shutil.copy(tmp_path / name, page.folder / name)
        with torch.no_grad():
            expected = model(**processor(str(tmp_path / name), return_tensors="pt")).logits[0]
        logits = page.evaluate(CLASSIFY, [name, "onnx/model.onnx"])
        np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCES.get(name, 1e-4), err_msg=name)
    Image.open(page.folder / "color.jpg").save(page.folder / "decoded.png")
    for program in json.loads((page.folder / "page.json").read_text())["models"][0]["programs"]:
        decoded, jpeg = (page.evaluate(CLASSIFY, [name, program["file"]]) for name in ("decoded.png", "color.jpg"))
        np.testing.assert_allclose(jpeg, decoded, rtol=0, atol=1e-5, err_msg=program["name"])  # decodes as Pillow
    assert not page.foreign


@pytest.mark.browser
def test_a_visitor_classifies_pictures_without_a_network(page, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    Image.new("RGB", (50, 40), "green").save(tmp_path / "green.png")
    page.evaluate("() => navigator.serviceWorker.ready.then(() => true)")
    page.context.set_offline(True)
    page.reload()
    wait_for_status(page, "Ready")
    page.set_input_files("#files", [tmp_path / "broken.png", tmp_path / "green.png"])
    page.wait_for_function("() => document.querySelectorAll('article:not(.waiting)').length === 2")
    assert [heading.text_content() for heading in page.query_selector_all("h2")] == ["green.png", "broken.png"]
    assert EVIL in page.text_content("article li")
    assert page.title() != "run"
    assert len(page.query_selector_all("article.error")) == 1
    assert page.evaluate("() => crossOriginIsolated")  # the runtime may use several threads
    assert page.evaluate("() => document.documentElement.scrollWidth") == 390
    page.locator("#programs").select_option(index=5)  # was not downloaded while there was a network
    wait_for_status(page, "model2/config.json")
    page.locator("#programs").select_option(index=0)
    wait_for_status(page, "green.png: kind")
    page.get_by_label("Download", exact=True).wait_for(state="hidden")
    page.context.set_offline(False)
    assert not page.foreign


def walk_with_tab(page):
    """Press Tab to the end of the page, or of its open dialog; return (role, name) of each focused element."""
    accessibility = page.context.new_cdp_session(page)
    found = []
    while len(found) < 50:
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement === document.body"):
            break
        focused = accessibility.send("Runtime.evaluate", {"expression": "document.activeElement"})["result"]["objectId"]
        about = {"objectId": focused, "fetchRelatives": False}
        node = accessibility.send("Accessibility.getPartialAXTree", about)["nodes"][0]
        found.append((node["role"]["value"], node["name"]["value"]))
        assert page.evaluate(OUTLINE) >= 2, found[-1]
    accessibility.detach()
    return found


@pytest.mark.browser
def test_thresholds_and_the_choice_of_a_model(page):
    """The shown classes are those of `hf_vit.predict` with a coverage, and with the thresholds of several labels."""
    page.reload()
    wait_for_status(page, "Ready")
    page.locator("#programs").select_option(index=2)  # in float32
    page.get_by_role("button", name="flower.jpg").click()
    wait_for_status(page, "flower.jpg: kind")
    assert page.locator("article li").count() == 5
    page.locator("#rule").select_option("0.95")
    assert page.locator("article li").count() == 11
    page.locator("#rule").select_option("0.9")
    shown = [label.split(" ")[1] for label in page.locator("article li span:first-child").all_inner_texts()]
    (expected,) = predict(page.models["kinds"], [PHOTOGRAPHS / "flower.jpg"], coverage=0.9)
    assert shown == [prediction.label.split(" ")[1] for prediction in expected]
    page.locator("#reject").check()
    assert page.locator("article li").all_inner_texts() == ["None of the classes."]
    assert "kind" not in page.get_by_role("status").inner_text()
    assert list(predict(page.models["kinds"], [PHOTOGRAPHS / "flower.jpg"], reject=True)) == [[]]
    page.locator("#reject").uncheck()

    page.locator("#programs").select_option(index=5)  # of the second model
    wait_for_status(page, "flower.jpg: LABEL_")
    (scores,) = predict(page.models["several"], [PHOTOGRAPHS / "flower.jpg"], threshold="auto")
    shown = page.locator("article li").all_inner_texts()
    assert [line.split() for line in shown] == [[label, f"{100 * score:.1f}%"] for label, score in scores]


@pytest.mark.browser
def test_a_picture_chosen_while_the_page_loads_is_classified(page, tmp_path):
    Image.new("RGB", (50, 40), "green").save(tmp_path / "early.png")
    with page.context.browser.new_context(service_workers="block") as first_visit:
        new, held = first_visit.new_page(), []
        new.route("**/page.json", lambda route: held.append(route))
        new.goto(page.url)
        new.set_input_files("#files", tmp_path / "early.png")
        held.pop().continue_()
        wait_for_status(new, "early.png: kind")


@pytest.mark.browser
def test_keyboard_and_screen_reader_reach_every_control(page, tmp_path):
    Image.new("RGB", (50, 40), "green").save(tmp_path / "green.png")
    page.reload()
    wait_for_status(page, "Ready")
    page.set_input_files("#files", tmp_path / "green.png")
    wait_for_status(page, "green.png: kind")
    page.get_by_role("img", name="green.png").wait_for()
    page.locator("summary").focus()
    page.keyboard.press("Enter")  # shows the text with a link
    walk_with_tab(page)  # to the end, where Tab begins again
    found = walk_with_tab(page)
    roles = "button button button combobox combobox checkbox checkbox button DisclosureTriangle link"
    assert " ".join(role for role, _ in found) == roles
    assert len(found) == page.locator(CONTROLS).count()
    assert all(name for _, name in found)
    assert "green.png" in found[7][1]  # a button of one of several pictures

    page.locator("#camera").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.wait_for_function("() => document.getElementById('video').videoWidth > 0")
    walk_with_tab(page)
    assert len({name for role, name in walk_with_tab(page) if role == "button"}) == 2
    page.locator("#shoot").focus()
    page.keyboard.press("Enter")
    wait_for_status(page, "camera.png: kind")
    assert page.evaluate("() => document.activeElement.id") == "camera"
    page.locator("article button").first.focus()
    page.keyboard.press("Space")
    assert page.locator("article").count() == 1
    page.keyboard.press("Space")
    assert page.locator("article").count() == 0
    assert page.evaluate("() => document.activeElement.id") == "files"
