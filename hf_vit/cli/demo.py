"""`hf-vit demo`."""

from pathlib import Path
from typing import Annotated

from ..files.image_files import images_below
from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Model, refuse_source


def demo(
    folder: Model,
    other: Annotated[str | None, "second model, shown side by side"] = None,
    *,
    examples: Annotated[
        Path | None, "folder of example images (default: two photographs)", {"metavar": "FOLDER"}
    ] = None,
    host: Annotated[str | None, "address of the page (default 127.0.0.1); 0.0.0.0 is open to other machines"] = None,
    port: Annotated[int | None, "port of the page (default: the first free one from 7860)"] = None,
    open: Annotated[bool, "open the page in a browser"] = False,
    space: Annotated[
        Path | None, "write the page as a Space for the Hub to this folder, and exit", {"metavar": "FOLDER"}
    ] = None,
    static: Annotated[
        Path | None,
        "write a page that computes in the visitor's browser, without a server, to this folder, and exit",
        {"metavar": "FOLDER"},
    ] = None,
    runtime: Annotated[
        Path | None,
        "for --static: the npm package onnxruntime-web, a folder or .tgz (default: download it once)",
        {"metavar": "PACKAGE"},
    ] = None,
    wheel: Annotated[
        Path | None, "for --space: wheel of hf_vit to install, instead of a package index", {"metavar": "FILE"}
    ] = None,
    overwrite: Annotated[bool, "for --static and --space: replace the output"] = False,
) -> None:
    """Serve a page that classifies images and shows the attention of one or two models."""
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"--port is {port}; it must be at least 1 and at most 65535")
    silence_progress_bars()
    folders = [folder, other] if other else [folder]
    if runtime and static is None:
        raise ValueError("--runtime needs --static")
    if overwrite and static is None and space is None:
        raise ValueError("--overwrite needs --static or --space")
    if static is not None:
        unused = {"examples": examples, "host": host, "port": port, "open": open, "space": space, "wheel": wheel}
        if given := [name for name, value in unused.items() if value]:
            raise ValueError(f"--{given[0]} has no effect on --static, which only writes files; leave it out")
        if other:
            raise ValueError("--static writes the page of one model; leave the second out")
        from ..demo.static_page import write_static_page

        refuse_source(static, folder)
        write_static_page(folder, static, runtime, overwrite=overwrite)
        print(f"written to {static}; its README.md explains how to open it, and how to upload it to the Hub")
        return
    if space is None:
        if wheel:
            raise ValueError("--wheel needs --space")
        if examples:
            images_below(examples)  # an error before the models are loaded, if there are no images
        from ..demo.page import serve

        serve(folders, examples, host or "127.0.0.1", port, open)
        return
    of_page = {"examples": examples, "host": host, "port": port, "open": open}
    if given := [name for name, value in of_page.items() if value]:
        raise ValueError(f"--{given[0]} has no effect on --space, which only writes files; leave it out")
    from ..demo.looking import Demo
    from ..demo.space import write_space

    refuse_existing(space, overwrite)
    for place in folders:
        refuse_source(space, place)
        Demo(place)  # an error now instead of in the Space
    write_space(space, folders, wheel, overwrite)
    print(f"written to {space}; its README.md explains how to upload it to the Hub")
