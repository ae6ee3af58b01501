"""`hf-vit demo`."""

import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from ..files.messages import silence_progress_bars
from ..files.output import refuse_existing
from .arguments import Overwrite


def demo(
    model: Annotated[str, "model, as in `hf-vit predict`; or a folder that --static wrote"],
    second_model: Annotated[str | None, "second model, to choose from on the page"] = None,
    *,
    static: Annotated[
        Path | None, "write the page to this folder and exit; `hf-vit demo FOLDER` serves it later", "FOLDER"
    ] = None,
    examples: Annotated[Path | None, "folder of example images (default: two photographs)", "FOLDER"] = None,
    host: Annotated[str, "address to listen on; 0.0.0.0 lets other machines connect"] = "127.0.0.1",
    port: Annotated[int | None, "port of the page (default: 7860, or a free one)"] = None,
    open_: Annotated[bool, "open the page in a browser"] = False,
    runtime: Annotated[
        Path | None,
        "folder or .tgz of the npm package onnxruntime-web (default: download it once into the cache)",
        "PACKAGE",
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Show a page that classifies images and draws the attention, in the browser.

    The model runs in the browser; the server only sends files. --static writes these files to a folder, for any web
    host or a static Space on the Hub.
    """
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"--port is {port} (expected 1 to 65535)")
    silence_progress_bars()
    from ..demo.page import serve, write_static_page

    models = [model, second_model] if second_model else [model]
    if static is not None:
        refuse_existing(static, overwrite)
        write_static_page(models, static, examples=examples, runtime=runtime, overwrite=overwrite)
        print(f"saved in {static}; its README.md explains how to open the page and how to upload it to the Hub")
    elif Path(model, "page.json").is_file():
        serve(Path(model), host, port, open_)
    else:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the folder is deleted
        with TemporaryDirectory(prefix="hf_vit_demo_") as scratch:
            page = Path(scratch, "page")
            write_static_page(models, page, examples=examples, runtime=runtime)
            serve(page, host, port, open_)
