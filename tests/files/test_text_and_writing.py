"""Every text is UTF-8 in any locale, and every write is atomic: checks of the source code and in a process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_vit.evaluation.vtab_data import read_table
from hf_vit.evaluation.vtab_report import summarize, write_figure
from hf_vit.training.figures import write_curve

from ..launching import locale_environment
from ..paths import ROOT

SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for room in ("hf_vit", "training", "conversion", "benchmarks")
    for path in sorted((ROOT / room).rglob("*.py"))
}
BINARY = {
    "Image",
    "os",
    "archive",
    "zip",
    "tarfile",
    "filesystem",
    "tensorstore",
    "KvStore",
}  # other objects with a method `open`
WHOLE = {"new_file", "new_folder", "new_model_files"}
# Modules that write into a caller's draft, or are atomic in another way.
IN_DRAFTS = {
    "hf_vit/files/output.py": "the functions themselves",
    "hf_vit/files/download.py": "a part of a download, and its record",
    "hf_vit/files/safetensors_stream.py": "into the draft of a folder",
    "hf_vit/cli/feature_files.py": "into the draft of a file that new_features opens",
    "hf_vit/analysis/report.py": "into the draft of a folder",
    "hf_vit/data/splits.py": "a line of a log, by several processes",
    "hf_vit/training/checkpoint.py": "into the draft of a folder, renamed when every process has written",
    "hf_vit/data/folders.py": "a log in a cache, read up to its last complete line; and into the draft of a folder",
    "hf_vit/models/utils.py": "a note in a cache, renamed into its place",
    "hf_vit/models/pretrained.py": "save_pretrained, which writes file by file; save_folder is atomic",
}


def mode_of(call: ast.Call, place: int) -> str:
    """Return the strings in the argument `mode`; "r" without one."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] or call.args[place : place + 1]
    texts = [node.value for one in given for node in ast.walk(one) if isinstance(node, ast.Constant)]
    return "/".join(text for text in texts if isinstance(text, str)) or "r"


def name_and_receiver(call: ast.Call) -> tuple[str, str]:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr, ast.unparse(call.func.value).split(".")[-1].strip("_")
    return ast.unparse(call.func), ""


def is_text(call: ast.Call) -> bool:
    """Tell whether a call reads or writes text (in the locale's encoding, unless it names one)."""
    name, receiver = name_and_receiver(call)
    if name in ("read_text", "write_text"):
        return bool(receiver)
    if name == "open":
        return receiver not in BINARY and any(
            "b" not in mode for mode in mode_of(call, 0 if receiver else 1).split("/")
        )
    if name in ("fdopen", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"):
        return "b" not in (mode_of(call, 1) if name == "fdopen" else mode_of(call, 0).replace("r", "w+b"))
    if name == "TextIOWrapper":
        return True
    return any(keyword.arg in ("text", "universal_newlines") for keyword in call.keywords)


def unencoded(text: str) -> Iterator[int]:
    """Yield the lines of calls that leave the encoding to the locale."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and is_text(node) and "encoding" not in {word.arg for word in node.keywords}:
            yield node.lineno


@pytest.mark.parametrize("name", SOURCES)
def test_every_text_names_its_encoding(name):
    assert not list(unencoded(SOURCES[name].read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "open(path)",
        "open(path, 'w')",
        "path.open('a')",
        "path.read_text()",
        "(folder / name).write_text(text)",
        "open(path, 'a' if more else 'wb')",
        "subprocess.run(line, capture_output=True, text=True)",
        "tempfile.NamedTemporaryFile('w')",
        "os.fdopen(number)",
        "io.TextIOWrapper(stream)",
    ],
)
def test_a_call_that_leaves_the_encoding_to_the_locale_is_reported(text):
    assert list(unencoded(text)) == [1]


@pytest.mark.parametrize(
    "text", ["open(path, 'rb')", "Image.open(path)", "write_text(path, text)", "path.read_text(encoding='utf-8')"]
)
def test_other_calls_are_not_reported(text):
    assert not list(unencoded(text))


def writes(call: ast.Call) -> bool:
    name, receiver = name_and_receiver(call)
    if name == "open":
        return receiver not in BINARY and bool({*"wax+"} & {*mode_of(call, 0 if receiver else 1)})
    return name in ("savefig", "save_file", "write_bytes") or (bool(receiver) and name in ("write_text", "dump"))


def bare_writes(node: ast.AST) -> Iterator[str]:
    """Yield the calls that write directly to a destination, where a killed process would leave half a file."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.With) and any(
            isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) in WHOLE
            for item in child.items
        ):
            continue
        if isinstance(child, ast.Call) and writes(child):
            yield ast.unparse(child)
        yield from bare_writes(child)


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("hf_vit/") and name not in IN_DRAFTS])
def test_every_write_is_atomic(name):
    assert not list(bare_writes(ast.parse(SOURCES[name].read_text(encoding="utf-8"))))


@pytest.mark.parametrize("kind", ["learning curve", "vtab"])
def test_an_interrupted_picture_keeps_the_earlier_one(kind, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "picture.png"
    path.write_bytes(b"earlier")

    def break_off(self, place, **options):
        Path(place).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", break_off)
    tasks = read_table()["tasks"]
    draw = {
        "vtab": lambda: write_figure(tasks, summarize(tasks, {tasks[0].name: 0.5}), path),
        "learning curve": lambda: write_curve([{"step": 1, "loss": 0.5}], path),
    }[kind]
    with pytest.raises(KeyboardInterrupt):
        draw()
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


IN_ANOTHER_LOCALE = """
import json, locale, sys
from pathlib import Path
from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.conversion.labels import set_labels
from hf_vit.hub.cards import render_folder_card
from hf_vit.loading import load, save_folder
from hf_vit.training.options import parse_settings
from hf_vit.training.settings import FinetuneSettings

assert locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8"), locale.getpreferredencoding(False)
folder = Path(sys.argv[1])
config = HfViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32,
                     num_labels=2)
model = HfViTForImageClassification(config)
set_labels(model, folder / "labels.txt")
model.conversion_record = {"source": "M\\u00fcller.npz"}
model.save_pretrained(folder / "model")
assert load(folder / "model")[0].config.id2label[0] == "Gr\\u00f6\\u00dfe \\u0142"
assert json.loads((folder / "model" / "conversion.json").read_bytes())["source"] == "M\\u00fcller.npz"
settings = parse_settings(FinetuneSettings, ["--recipe", str(folder / "recipe.yaml")])
assert settings.dataset == "Bl\\u00fcten", settings.dataset
for _ in range(2):
    (folder / "model" / "README.md").write_bytes(render_folder_card(folder / "model").encode())
"""


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", "de_DE.ISO-8859-1"])
def test_umlauts_survive_in_any_locale(locale, tmp_path):
    environment = locale_environment(locale, tmp_path)
    (tmp_path / "labels.txt").write_bytes("Größe ł\nzwei\n".encode())
    (tmp_path / "recipe.yaml").write_bytes("model: x\ndataset: Blüten\nsteps: 1\noutput_dir: y\n".encode())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_bytes("---\nlicense: mit\n---\n# Für Käthe ł\n".encode())
    line = [sys.executable, "-c", IN_ANOTHER_LOCALE, tmp_path]
    done = subprocess.run(line, env=environment, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "README.md").read_bytes().decode().count("# Für Käthe ł") == 1
