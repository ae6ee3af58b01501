"""The page of `hf-vit demo` in headless Chromium: its classes compared with Python's, and the time to the first one.

    python benchmarks/browser.py FOLDER IMAGES [--rounds 5] [--runtime PACKAGE]

FOLDER holds a classifier and its processor; IMAGES is a folder of JPEGs. PACKAGE is as in `hf-vit demo`. Each
picture is classified as it is, and as a PNG with the levels that Pillow decodes, by each program of the page. The times
begin when a page is opened, in a new profile of the browser, or when `hf-vit predict` is started, and end with the
first answer. The next picture goes to the same page, or to the model in memory. All servers are on this machine.
`--times` and `--answers` measure only one of both.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which

import numpy as np
import torch
from common import machine_as_markdown, milliseconds_text, report_progress, seconds_of, stamp, table
from PIL import Image, ImageOps
from playwright.sync_api import Browser, Page, sync_playwright

import hf_vit
from hf_vit.demo.page import PageHandler, write_static_page
from hf_vit.files.image_files import images_below

_BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome", "chromium-browser")
_LOAD = """async (file) => {
  const { models: [model] } = await (await fetch("page.json")).json();
  window.worker ??= new Worker("worker.js", { type: "module" });
  return new Promise((resolve) => {
    window.worker.onmessage = ({ data }) => (data.ready || data.error) && resolve(data.error ?? "");
    window.worker.postMessage({ model, file });
  });
}"""
_CLASSIFY = """async (name) => {
  const picture = await (await fetch(name)).blob();
  return new Promise((resolve) => {
    window.worker.onmessage = ({ data }) => resolve(data.error ?? Array.from(data.logits));
    window.worker.postMessage({ id: 0, picture });
  });
}"""
_ANSWERED = "(count) => document.querySelectorAll('article:not(.waiting)').length === count"
_COMMAND = "import sys; from hf_vit_command import main; sys.argv[0] = 'hf-vit'; sys.exit(main())"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runtime", type=Path)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--answers", action="store_true")
    arguments = parser.parse_args()
    images = list(images_below(arguments.images))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Path(folder, "page")
        write_static_page([arguments.folder], page, runtime=arguments.runtime)
        path = next(filter(None, map(which, _BROWSERS)), None)
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        if not arguments.times:
            print(compare_answers(browser, page, arguments.folder, images))
        if not arguments.answers:
            print(compare_times(browser, page, arguments.folder, images[0], arguments.rounds))
        print(f"Chromium {browser.version}. {machine_as_markdown({'': stamp()})}")
        browser.close()


class PlainHandler(PageHandler):
    """A server of static files without the headers that several threads need."""

    def send_header(self, keyword: str, value: str) -> None:
        if not keyword.startswith("Cross-Origin"):
            super().send_header(keyword, value)


@contextmanager
def serve(folder: Path, handler_class: type[SimpleHTTPRequestHandler]) -> Iterator[str]:
    """Serve a folder while the block runs; yield its address."""
    handler = partial(handler_class, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


# Answers


def compare_answers(browser: Browser, page: Path, folder: Path, images: list[Path]) -> str:
    """Return a table: for each program its size, top classes as in Python, and largest differences of a logit."""
    model, processor = hf_vit.load(folder, backend="eager")
    expected = []
    for number, image in enumerate(images):
        with torch.inference_mode():
            expected.append(model(**processor(str(image), return_tensors="pt")).logits[0].numpy())
        (page / f"{number}.jpg").write_bytes(image.read_bytes())
        with Image.open(image) as opened:
            ImageOps.exif_transpose(opened).convert("RGB").save(page / f"{number}.png")
    rows = []
    with serve(page, PageHandler) as address:
        tab = browser.new_page()
        tab.set_default_timeout(0)
        tab.goto(address)
        for program in tab.evaluate("async () => (await (await fetch('page.json')).json()).models[0].programs"):
            report_progress(program["name"])
            if error := tab.evaluate(_LOAD, program["file"]):
                raise SystemExit(error)
            jpeg, png = (
                np.array([tab.evaluate(_CLASSIFY, f"{number}.{suffix}") for number in range(len(images))])
                for suffix in ("jpg", "png")
            )
            same = [int((answers.argmax(1) == np.argmax(expected, 1)).sum()) for answers in (png, jpeg)]
            differences = [f"{np.abs(a - b).max():.2g}" for a, b in ((png, expected), (jpeg, expected), (jpeg, png))]
            size = f"{program['bytes'] / 1e6:.1f} MB"
            rows.append([program["name"], size, *(f"{count} of {len(images)}" for count in same), *differences])
        tab.close()
    names = ["program", "size", "top class as in Python, PNG", "JPEG"]
    return table([*names, "largest difference of a logit, PNG", "JPEG", "JPEG from PNG"], rows)


# Times


def compare_times(browser: Browser, page: Path, folder: Path, image: Path, rounds: int) -> str:
    """Return a table of the times to the first answer, and from the first to the second, in milliseconds."""
    command = [sys.executable, "-c", _COMMAND, "predict", str(folder), str(image)]
    model, processor = hf_vit.load(folder)

    def predict() -> list[float]:
        """A process for the first picture; the next one with the model in memory."""
        first = seconds_of(lambda: subprocess.run(command, check=True, capture_output=True))
        with torch.inference_mode():
            return [first, seconds_of(lambda: model(**processor(str(image), return_tensors="pt")).logits)]

    turns: dict[str, list[list[float]]] = {}
    with serve(page, PlainHandler) as plain, serve(page, PageHandler) as isolated:
        openers: dict[str, Callable[[], list[float]]] = {
            "page, one thread": lambda: visit(browser, plain, image),
            "page, several threads": lambda: visit(browser, isolated, image),
            "page, a later visit without a network": lambda: visit_again(browser, plain, image),
            "hf-vit predict": predict,
        }
        for number in range(rounds + 1):  # the first one warms up
            for name, opener in openers.items():
                report_progress(f"round {number}: {name}")
                seconds = opener()
                if number:
                    turns.setdefault(name, []).append(seconds)
    rows = [
        [name, *(milliseconds_text([one[part] for one in seconds]) for part in (0, 1))]
        for name, seconds in turns.items()
    ]
    return table(["", "ms to the first answer (quartiles)", "ms to the next"], rows)


def visit(browser: Browser, address: str, image: Path) -> list[float]:
    """Open a page in a new profile and ask for two pictures; return the seconds to the first answer and to the next."""
    with browser.new_context() as context:
        return open_and_ask(context.new_page(), address, image)


def open_and_ask(tab: Page, address: str, image: Path) -> list[float]:
    start = time.perf_counter()
    tab.goto(address)
    ask(tab, image, 1)
    first = time.perf_counter()
    ask(tab, image, 2)
    return [first - start, time.perf_counter() - first]


def visit_again(browser: Browser, address: str, image: Path) -> list[float]:
    """Visit the page, then again without a network, as `visit`; the second visit is timed."""
    with browser.new_context() as context:
        tab = context.new_page()
        open_and_ask(tab, address, image)
        tab.evaluate("() => navigator.serviceWorker.ready.then(() => true)")
        context.set_offline(True)
        return open_and_ask(tab, address, image)


def ask(tab: Page, image: Path, count: int) -> None:
    tab.set_input_files("#files", str(image))
    tab.wait_for_function(_ANSWERED, arg=count)


if __name__ == "__main__":
    main()
