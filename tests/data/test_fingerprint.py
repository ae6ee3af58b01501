"""Identities of models and data, and their use in features, results of VTAB, and resumed runs."""

import json
import os
import shutil

import numpy as np
import pytest
from huggingface_hub import constants

from hf_vit.data import fingerprint as module
from hf_vit.data.fingerprint import fingerprint_data, fingerprint_model
from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_named
from hf_vit.files.download import sha256_of
from hf_vit.scripts.evaluate import evaluate
from hf_vit.scripts.finetune import finetune
from hf_vit.scripts.pretrain import pretrain
from hf_vit.settings.fields import EvaluateSettings

from ..comparing import change_json
from ..photographs import draw_picture
from ..processes import DIGITS, arguments
from ..tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

COLORS = {"blue": (30, 60, 220), "green": (40, 200, 50), "red": (220, 40, 40)}


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny", patch_size=4, representation_size=10)


@pytest.fixture
def colors(tmp_path):
    """Pictures of three colors, 8 of each to learn from and 4 to measure on."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 4)):
        for name, color in COLORS.items():
            folder = tmp_path / "colors" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                draw_picture(color, rng).save(folder / f"{number}.bmp")
    return tmp_path / "colors"


def replace_in_silence(folder, like):
    """Pictures of another color in the place of those of a class: same names, sizes and times."""
    for file in folder.iterdir():
        before = file.stat()
        shutil.copyfile(like / file.name, file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size


def data_of(dataset, **changes):
    settings = EvaluateSettings(dataset=str(dataset), **changes)
    return fingerprint_data(open_named(settings, "train"))


def test_model_identity_is_weights_config_processor_and_code(tiny, tmp_path, monkeypatch):
    first = fingerprint_model(str(tiny))
    shutil.copytree(tiny, tmp_path / "same")
    (tmp_path / "same" / "metrics.json").write_text("{}")
    assert fingerprint_model(str(tmp_path / "same")) == first
    change_json(tmp_path / "same" / "config.json", hidden_act="relu")
    other = save_tiny(tmp_path / "other", patch_size=4, representation_size=9)
    shutil.copytree(tiny, tmp_path / "resized")
    processor = tmp_path / "resized" / "preprocessor_config.json"
    processor.write_text(processor.read_text().replace("vit_jax", "timm"))
    found = [fingerprint_model(str(folder)) for folder in (tmp_path / "same", other, tmp_path / "resized")]
    monkeypatch.setattr(module, "versions_of", lambda packages: dict.fromkeys(packages, "99"))
    found.append(fingerprint_model(str(tiny)))
    assert all(identity != first for identity in found)


def test_hub_model_identity_is_its_commit(tiny, tmp_path, monkeypatch):
    """In a cache as huggingface_hub lays it out."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--alice--tiny"
    (repository / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny, repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)
        identity = fingerprint_model("alice/tiny")
        assert (identity["name"], identity["commit"]) == ("alice/tiny", commit)


def test_data_identity_is_the_content(colors, tmp_path):
    first = data_of(colors)
    shutil.copytree(colors, tmp_path / "moved")
    assert data_of(tmp_path / "moved") == first
    replace_in_silence(colors / "train" / "red", colors / "train" / "green")
    assert data_of(colors) != first
    (tmp_path / "moved" / "train" / "red").rename(tmp_path / "moved" / "train" / "rose")
    assert data_of(tmp_path / "moved") != first


def test_identity_of_large_data_is_their_files(colors, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 10)
    first = data_of(colors)
    assert ("fingerprint" in first, data_of(colors)) == (True, first)
    os.utime(colors / "train" / "red" / "3.bmp", (1, 1))
    assert data_of(colors) != first


def test_identity_of_shards_is_their_files(colors, tmp_path):
    load_split(str(colors), "train").to_parquet(tmp_path / "train.parquet")
    first = data_of(tmp_path, streaming=True)
    assert ("shards" in first, data_of(tmp_path, streaming=True)) == (True, first)
    os.utime(tmp_path / "train.parquet", (1, 1))
    assert data_of(tmp_path, streaming=True) != first


@pytest.mark.parametrize("change", ["heads", "training images"])
def test_cached_features_of_other_data_are_not_used(tiny, colors, tmp_path, change):
    """The model has the same weights and another configuration; the images are others in files of the same names."""
    settings = {"model": tiny, "dataset": colors, "num_workers": 0, "protocol": "linear_probe", "probe_l2": "0.1"}
    before = evaluate(arguments(**settings, output_dir=tmp_path / "out"))
    if change == "heads":
        change_json(tiny / "config.json", num_attention_heads=7, hidden_act="relu")
    else:
        replace_in_silence(colors / "train" / "red", colors / "train" / "green")
    after = evaluate(arguments(**settings, output_dir=tmp_path / "out"))
    assert after == evaluate(arguments(**settings))
    assert after["loss"] != before["loss"]


def finetune_colors(colors, tiny, output, **changes):
    settings = {"model": tiny, "dataset": colors, "steps": 2, "batch_size": 4, "save_every": 2, "num_workers": 0}
    return finetune(arguments(**settings, report_to="none", output_dir=output, **changes))


def test_changed_data_is_not_resumed(tiny, colors, tmp_path):
    finetune_colors(colors, tiny, tmp_path / "out")
    finetune_colors(colors, tiny, tmp_path / "out", resume="true")
    replace_in_silence(colors / "train" / "red", colors / "train" / "green")
    with pytest.raises(ValueError, match=r"\w{12}, images 24 .* \w{12}, images 24$"):
        finetune_colors(colors, tiny, tmp_path / "out", resume="true")


def test_a_run_whose_model_changed_is_not_resumed(tiny, colors, tmp_path):
    finetune_colors(colors, tiny, tmp_path / "out")
    change_json(tiny / "config.json", hidden_act="relu")
    with pytest.raises(ValueError, match=r"\w{12} .* \w{12}$"):
        finetune_colors(colors, tiny, tmp_path / "out", resume="true")


def edit_state(output, edit):
    """Change the state of the newest checkpoint, with its checksum."""
    checkpoint = sorted((output / "checkpoints").iterdir())[-1]
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    edit(state)
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    change_json(checkpoint / "checksums.json", **{"state.json": sha256_of(checkpoint / "state.json")})


def test_a_run_of_an_earlier_version_is_resumed(tmp_path):
    """Its checkpoint lacks a new setting, which must have its default."""
    settings = {**DIGITS, "steps": 2, "warmup_steps": 0, "save_every": 2, "num_workers": 0, "output_dir": tmp_path}
    pretrain(arguments(**settings))

    def age(state):
        del state["settings"]["head"], state["settings"]["cooldown_steps"]

    edit_state(tmp_path, age)
    pretrain(arguments(**settings, resume="true"))
    with pytest.raises(ValueError, match="cooldown_steps"):
        pretrain(arguments(**settings, resume="true", cooldown_steps=1))
