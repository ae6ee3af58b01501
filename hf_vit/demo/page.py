"""Page of `hf-vit demo MODEL [OTHER]`, which classifies pictures and shows the models' attention.

The page loads everything from this machine: it has no external fonts, scripts or statistics, and no public link.
"""

import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial, wraps
from html import escape
from pathlib import Path
from typing import Any

import gradio

from ..files.contents import in_words
from ..files.image_files import IMAGE_SUFFIXES
from ..files.messages import USER_ERRORS, one_sentence
from ..files.output import write_text
from ..files.predictions import predictions_writer
from .description import describe
from .examples import CREDITS, MOST_EXAMPLES, PHOTOGRAPHS, copy_examples, write_digits
from .looking import TOP_K, Demo

MOST_PICTURES = 1000  # largest number of pictures of a folder
_LARGEST_FILE = "64mb"
_ROLLOUT, _MEAN = "Rollout", "Mean of all"
_CSS = Path(__file__).with_name("page.css")
_HINT = (
    "Bright areas get most attention: that of the class token, or the mean over the patches if there is none. "
    "*Rollout* multiplies the attention of all layers. In the last layers corners and background can be bright "
    "too: there a ViT keeps facts about the whole picture ([arXiv 2309.16588](https://arxiv.org/abs/2309.16588))."
)
_FOLDER_HINT = f"Every picture of a folder is classified, up to {MOST_PICTURES:,} of them. They stay on this server."
_Choice = str | int  # a layer or head


def serve(
    folders: Sequence[str | Path],
    examples: str | Path | None = None,
    host: str | None = "127.0.0.1",
    port: int | None = None,
    open_browser: bool = False,
) -> None:
    """Show the page until interrupted.

    Args:
        folders: one model, or two to compare: folders or names on the Hub.
        examples: a folder of images; by default two photographs, or digits for a classifier of digits.
        host: address of the page; "0.0.0.0" is open to other machines; None: the value of GRADIO_SERVER_NAME.
        port: port of the page; by default GRADIO_SERVER_PORT, or the first free one from 7860.
        open_browser: open the page in a browser.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the folder is deleted
    with tempfile.TemporaryDirectory(prefix="hf_vit_demo_") as scratch:
        os.environ.setdefault("GRADIO_TEMP_DIR", f"{scratch}/gradio")  # gradio would keep all uploads
        page = build_page(folders, Path(scratch), examples)
        try:
            _, address, _ = page.launch(
                server_name=host,
                server_port=port,
                inbrowser=open_browser,
                share=False,
                ssr_mode=False,
                quiet=True,
                prevent_thread_lock=True,
                max_file_size=_LARGEST_FILE,
                css_paths=_CSS,
                footer_links=[],
            )
        except OSError as error:
            if "empty port" not in str(error):
                raise
            raise OSError(f"port {port or 'of the page'} is in use; choose another with --port") from None
        shown = " and ".join(map(str, folders))
        print(f"the page of {shown} is shown at {address} (Ctrl+C ends it)", flush=True)
        page.block_thread()


def build_page(folders: Sequence[str | Path], scratch: Path, examples: str | Path | None = None) -> gradio.Blocks:
    """Build the page.

    Args:
        folders, examples: as in `serve`.
        scratch: folder for examples and tables.

    Raises:
        ValueError: both models are the same.
    """
    if len({str(folder) for folder in folders}) < len(folders):
        raise ValueError(f"both models are {folders[0]} (expected two); leave one out")
    demos = [Demo(folder) for folder in folders]
    if len({demo.name for demo in demos}) < len(demos):
        for demo, folder in zip(demos, folders, strict=True):
            demo.name = str(folder)
    if examples is None and demos[0].labels and set(demos[0].labels) <= set("0123456789"):
        pictures, credits = write_digits(scratch), ""
    else:
        pictures, credits = copy_examples(Path(examples or PHOTOGRAPHS), scratch), "" if examples else CREDITS
    title = " and ".join(demo.name for demo in demos)
    # The models serve one visitor at a time, because attention is recorded with hooks on their layers.
    with gradio.Blocks(title=title, analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        gradio.HTML(f"<h1>{escape(title)}</h1>", padding=False, elem_classes="title flush")
        with gradio.Tab("One picture"):
            _add_picture(demos, pictures, credits)
        with gradio.Tab("A folder of pictures"):
            _add_folder(demos, scratch)
        for demo, folder in zip(demos, folders, strict=True):
            with gradio.Accordion(f"About {demo.name}", open=False):
                gradio.HTML(describe(folder, demo.name, demo.model), elem_classes="facts flush", padding=False)
    return page.queue(default_concurrency_limit=1)


def _add_picture(demos: list[Demo], examples: list[Path], credits: str) -> None:
    """Add the tab for one picture: the picture on the left, and the models' answers side by side on the right."""
    names = [demo.name if len(demos) > 1 else "" for demo in demos]
    with gradio.Row():
        with gradio.Column(scale=1, min_width=300):
            picture = gradio.Image(type="filepath", label="Picture", sources=["upload", "clipboard"], height=320)
            gradio.Examples([[str(file)] for file in examples], picture, examples_per_page=MOST_EXAMPLES)
            gradio.Markdown(credits, elem_classes="hint")
        with gradio.Column(scale=len(demos), min_width=300):
            with gradio.Row(equal_height=True):
                classes = [_add_classes(name) for name in names]
            with gradio.Row():
                looks = [_add_look(demo, name) for demo, name in zip(demos, names, strict=True)]
            gradio.Markdown(_HINT, elem_classes="hint")
    picture.preprocess = _path_of  # gradio would open the picture itself, without our error messages

    def look(path: str | None, *choices: _Choice) -> list[Any]:
        if path is None:
            return [None] * (2 * len(demos))
        asked = zip(demos, choices[::2], choices[1::2], strict=True)
        answers = [demo.look(path, *_numbers(layer, head)) for demo, layer, head in asked]
        return [part for answer in answers for part in answer]

    outputs = [part for label, (shown, *_) in zip(classes, looks, strict=True) for part in (label, shown)]
    choices = [choice for _, *two in looks for choice in two]
    _listen(picture.change, look, [picture, *choices], outputs, "look")
    for number, (demo, (shown, layer, head)) in enumerate(zip(demos, looks, strict=True), start=1):

        def show(path: str | None, layer: _Choice, head: _Choice, demo: Demo = demo) -> list[Any]:
            image = None if path is None else demo.show(path, *_numbers(layer, head))
            return [image, gradio.update(interactive=layer != _ROLLOUT)]

        chosen = partial(gradio.on, [layer.input, head.input])
        _listen(chosen, show, [picture, layer, head], [shown, head], f"attention_{number}")


def _add_classes(name: str) -> gradio.Label:
    """Add the classes of a model, under its name if there are two models."""
    with gradio.Column(min_width=260):
        _add_name(name)
        return gradio.Label(num_top_classes=TOP_K, label="Classes")


def _add_look(demo: Demo, name: str) -> tuple[Any, Any, Any]:
    """Add the attention of a model, with the choice of layer and head, under its name if there are two models."""
    layers = [(_ROLLOUT, _ROLLOUT), *((f"Layer {n} of {demo.num_layers}", n) for n in _from_1(demo.num_layers))]
    heads = [(_MEAN, _MEAN), *((f"Head {n} of {demo.num_heads}", n) for n in _from_1(demo.num_heads))]
    settings: dict[str, Any] = {"filterable": False, "min_width": 120}
    with gradio.Column(min_width=260):
        _add_name(name)
        with gradio.Row():
            layer = gradio.Dropdown(layers, value=_ROLLOUT, label="Attention", **settings)
            head = gradio.Dropdown(heads, value=_MEAN, label="Head", interactive=False, **settings)
        shown = gradio.Image(
            format="png", label="Where the model looks", buttons=["download", "fullscreen"], height=320
        )
    return shown, layer, head


def _add_name(name: str) -> None:
    if name:
        gradio.HTML(f"<h3>{escape(name)}</h3>", padding=False, elem_classes="name flush")


def _add_folder(demos: list[Demo], scratch: Path) -> None:
    """Add the tab for a folder of pictures: a table, and a CSV for each model."""
    gradio.Markdown(_FOLDER_HINT, elem_classes="hint")
    files: Any = gradio.File(file_count="directory", label="Folder", height=160)
    said = gradio.Markdown(elem_classes="hint")
    tables = gradio.File(label="Predictions as CSV (the five likeliest classes)", interactive=False, visible=False)
    rows = gradio.HTML(padding=False, elem_classes="flush")
    files.preprocess = _named_paths_of

    def classify(found: list[tuple[str, str]] | None, progress: Any = gradio.Progress()) -> list[Any]:  # noqa: B008
        if found is None:
            return ["", gradio.update(visible=False), ""]
        return _classify_folder(demos, found, Path(tempfile.mkdtemp(dir=scratch)), progress)

    _listen(partial(files.change, show_progress_on=files), classify, [files], [said, tables, rows], "folder")


def _classify_folder(demos: list[Demo], found: list[tuple[str, str]], folder: Path, progress: Any) -> list[Any]:
    """Classify the pictures of a folder; return the summary, the CSV files and the HTML table.

    Args:
        found: names and paths of files.
        folder: folder for the CSV files.

    Raises:
        ValueError: there are no pictures, too many, or none can be read.
    """
    images = sorted((name, path) for name, path in found if name.lower().endswith(IMAGE_SUFFIXES))
    if not images:
        raise ValueError(f"the folder holds no pictures (expected files that end in {', '.join(IMAGE_SUFFIXES)})")
    if len(images) > MOST_PICTURES:
        raise ValueError(f"the folder holds {len(images):,} pictures (expected at most {MOST_PICTURES:,}); use a part")
    rows, unreadable, tables = [[name] for name, _ in images], dict[int, Exception](), []
    for demo in demos:
        text = io.StringIO()
        write = predictions_writer("csv", text)
        for batch in demo.classify_all([path for _, path in images]):
            for number, predictions in zip(batch.numbers, batch.outputs, strict=True):
                write(images[number][0], predictions)
                rows[number] += [predictions[0].label, f"{100 * predictions[0].score:.1f}"]
            unreadable |= batch.unreadable
            progress((max([*batch.numbers, *batch.unreadable]) + 1, len(images)), desc=demo.name, unit="pictures")
        tables.append(folder / f"predictions-{demo.name.replace('/', '-')}.csv")
        write_text(tables[-1], text.getvalue())
    names = in_words([images[number][0] for number in sorted(unreadable)])
    reasons = [
        one_sentence(unreadable[number]).replace(path, name)
        for number, (name, path) in enumerate(images)
        if number in unreadable
    ]
    if len(reasons) == len(images):
        raise ValueError(f"none of the {len(images)} pictures can be read: {reasons[0]}")
    said = f"Pictures classified: {len(images) - len(unreadable)}."
    if others := len(found) - len(images):
        said += f" Other files, not used: {others}."
    if unreadable:
        said += f" Pictures that cannot be read: {len(unreadable)} ({names}). The first: {reasons[0]}"
    kept = [row for number, row in enumerate(rows) if number not in unreadable]
    files = gradio.update(value=[str(table) for table in tables], visible=True)
    return [escape(said), files, _render_rows([demo.name for demo in demos], kept)]


def _render_rows(models: list[str], rows: list[list[str]]) -> str:
    """Return the rows as an HTML table: a picture, and a class and a probability for each model."""
    columns = '<col class="picture">' + '<col class="class"><col class="score">' * len(models)
    names = "".join(f'<th colspan="2">{escape(model)}</th>' for model in models)
    head = f"<tr><th></th>{names}</tr>" if len(models) > 1 else ""
    head += f"<tr><th>Picture</th>{'<th>Class</th><th>%</th>' * len(models)}</tr>"
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<colgroup>{columns}</colgroup><thead>{head}</thead><tbody>{body}</tbody>"
    return f'<div class="predictions"><table class="of_{len(models)}">{table}</table></div>'


def _listen(event: Any, function: Callable[..., Any], inputs: list[Any], outputs: list[Any], name: str) -> None:
    """Call a function on an event; an error is one sentence, with the file's own name instead of its upload path."""

    @wraps(function)
    def answer(first: Any, *others: Any) -> Any:
        try:
            return function(first, *others)
        except USER_ERRORS as error:
            sentence = one_sentence(error)
            if isinstance(first, str):
                sentence = sentence.replace(first, Path(first).name)
            raise gradio.Error(escape(sentence), duration=None, print_exception=False) from None

    event(answer, inputs, outputs, api_name=name, trigger_mode="always_last", concurrency_id="models")


def _numbers(layer: _Choice, head: _Choice) -> tuple[int | None, int | None]:
    """Convert the choices to numbers from 0; None means all."""
    if layer == _ROLLOUT:
        return None, None
    return int(layer) - 1, None if head == _MEAN else int(head) - 1


def _from_1(count: int) -> range:
    return range(1, count + 1)


def _path_of(payload: Any) -> str | None:
    return payload and payload.path


def _named_paths_of(payload: Any) -> list[tuple[str, str]] | None:
    """(original name, path) of uploaded files; names may repeat."""
    return [(file.orig_name or Path(file.path).name, file.path) for file in payload.root] if payload else None
