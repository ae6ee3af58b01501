"""Texts are UTF-8 in any locale."""

import subprocess
import sys

import pytest

from ..processes import environment

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
IN_ANOTHER_LOCALE = """
import json, locale, sys
from pathlib import Path
from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.conversion.converting import set_labels
from hf_vit.hub.cards import render_folder_card
from hf_vit.loading import load, save_folder
from hf_vit.settings.options import parse_settings
from hf_vit.settings.fields import FinetuneSettings

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
def test_umlauts_survive_in_another_locale(tmp_path):
    (tmp_path / "labels.txt").write_bytes("Größe ł\nzwei\n".encode())
    (tmp_path / "recipe.yaml").write_bytes("model: x\ndataset: Blüten\nsteps: 1\noutput_dir: y\n".encode())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "README.md").write_bytes("---\nlicense: mit\n---\n# Für Käthe ł\n".encode())
    line = [sys.executable, "-c", IN_ANOTHER_LOCALE, tmp_path]
    done = subprocess.run(line, env=environment() | C_LOCALE, capture_output=True, encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "README.md").read_bytes().decode().count("# Für Käthe ł") == 1
