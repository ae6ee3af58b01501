"""The page of `hf-vit demo`, which classifies pictures in the browser; the server only sends its files."""

import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

from ..files.image_files import images_below
from ..files.output import new_folder, refuse_inputs
from ..hub.static_space import write_space_readme
from ..loading import load
from ..models.image_reading import ImageReadingError, read_image
from ..runtimes.web import write_web_page

PHOTOGRAPHS = Path(__file__).with_name("photographs")
_CREDITS = (
    "Example pictures, CC BY 2.0, scaled: china by danielbuechele (flickr.com/photos/danielbuechele/6061409035), "
    "flower by vultilion (flickr.com/photos/vultilion/6056698931)."
)
_PORT = 7860
_MAX_EXAMPLES = 12
_NUM_DIGITS = 6
_DISPLAYED = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")  # by browsers


def write_static_page(
    models: Sequence[str | Path],
    output: Path,
    *,
    examples: Path | None = None,
    runtime: Path | None = None,
    repositories: Sequence[str] = (),
    overwrite: bool = False,
) -> None:
    """Write the page of one or several models, as a static Space.

    Args:
        models: folders of save_pretrained, or names on the Hub.
        output: the folder; it appears when it is complete.
        examples: folder of example pictures; by default two photographs, or digits for a classifier of digits.
        runtime: see `write_web_page`.
        repositories: names of the models on the Hub, which links the page from them.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
        ValueError: a model is not supported, both models are the same, or no example can be read.
    """
    refuse_inputs(output, *models, examples, runtime)
    names = [Path(model).resolve().name for model in models]
    if len(set(names)) < len(names):
        names = [str(model) for model in models]
    pairs = {name: load(model, backend="eager") for name, model in zip(names, models, strict=True)}
    if len(pairs) < len(models):
        raise ValueError(f"both models are {models[0]}; give two different models, or only one")
    labels = {label for model, _ in pairs.values() for label in model.config.id2label.values()}
    credits = ""
    with tempfile.TemporaryDirectory() as scratch, new_folder(output, overwrite) as draft:
        if examples is not None:
            pictures = list(islice(displayed_images(examples), _MAX_EXAMPLES))
            if not pictures:
                formats = ", ".join(_DISPLAYED)
                raise ValueError(f"a browser can show none of the images in {examples} (expected one of {formats})")
        elif labels <= set("0123456789"):
            pictures = write_digits(Path(scratch))
        else:
            pictures, credits = sorted(PHOTOGRAPHS.glob("*.jpg")), _CREDITS
        write_web_page(draft, pairs, examples=pictures, credits=credits, runtime=runtime, overwrite=True)
        write_space_readme(draft, " and ".join(names), repositories)


def displayed_images(folder: Path) -> Iterator[Path]:
    for file in images_below(folder):
        with suppress(ImageReadingError):
            if file.suffix.lower() in _DISPLAYED:
                read_image(file)
                yield file


def write_digits(folder: Path) -> list[Path]:
    """Write held-out handwritten digits of scikit-learn; return their files."""
    from ..data.sources import load_digits

    files = [folder / f"digit_{number}.png" for number in range(1, _NUM_DIGITS + 1)]
    for digit, file in zip(load_digits()["test"][:_NUM_DIGITS]["image"], files, strict=True):
        digit.resize((320, 320)).save(file)
    return files


def serve(page: Path, host: str = "127.0.0.1", port: int | None = None, open_browser: bool = False) -> None:
    """Serve the files of a page until Ctrl+C.

    Args:
        host: address; "0.0.0.0" is open to other machines.
        port: by default 7860, or a free one.
    """
    handler = partial(PageHandler, directory=str(page))
    try:
        server = ThreadingHTTPServer((host, port or _PORT), handler)
    except OSError as error:
        if port:
            raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from None
        server = ThreadingHTTPServer((host, 0), handler)
    with server, suppress(KeyboardInterrupt):
        address = f"http://{host}:{server.server_port}"
        print(f"serving the page at {address} (press Ctrl+C to stop)", flush=True)
        if open_browser:
            webbrowser.open(address)
        server.serve_forever()


class PageHandler(SimpleHTTPRequestHandler):
    """Handler that sends the headers with which WebAssembly may use several threads, and logs nothing."""

    extensions_map = {  # noqa: RUF012 - the system's own table may lack these
        **SimpleHTTPRequestHandler.extensions_map,
        **{".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm"},
    }

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")  # another model may be shown at this address next
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass
