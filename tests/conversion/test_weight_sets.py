"""Files of PyTorch and JAX as training programs write them: which of their arrays are read, and what is refused."""

import argparse
from collections import defaultdict
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_vit.conversion import ConversionError, convert, export

from ..comparing import logits
from ..tiny_models import tiny

OPTIONS = {"num_attention_heads": 2, "position_grid": (5, 6)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> (timm's arrays, logits) of two models of the same sizes; and the pixel values."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    torch.manual_seed(3)
    pixel_values = torch.randn(2, 3, 20, 36)
    for seed, name in enumerate(("raw", "averaged")):
        model = tiny(seed=seed, hidden_act="gelu")
        export(model, folder / f"{name}.safetensors", "timm")
        export(tiny(seed=seed), folder / f"{name}.npz", "jax")
        found[name] = load_file(folder / f"{name}.safetensors"), logits(model, pixel_values)
        found[f"{name}.npz"] = dict(np.load(folder / f"{name}.npz")), logits(tiny(seed=seed), pixel_values)
    return found, pixel_values


def under(prefix, arrays):
    return {prefix + name: array for name, array in arrays.items()}


def renamed(arrays, old, new):
    return {name.replace(old, new, 1) if name.startswith(old) else name: array for name, array in arrays.items()}


def without_head(arrays):
    return {name: array for name, array in arrays.items() if not name.startswith("head.")}


def head_of(arrays, prefix):
    return {f"{prefix}.weight": arrays["head.weight"], f"{prefix}.bias": arrays["head.bias"]}


# What the file is -> its content, made of raw (r) and averaged (a) weights.
# Then what is read, "raw" or "averaged", and a word that is logged or ""; or "refused", and a word of the refusal.
FILES = {
    # averaged weights are read, and both are named
    "timm": (lambda r, a: {"state_dict": r, "state_dict_ema": a}, "averaged", "state_dict_ema"),
    "model and ema": (lambda r, a: {"model": r, "ema": a}, "averaged", "model, ema"),
    "ema_state_dict": (lambda r, a: {"state_dict": r, "ema_state_dict": a}, "averaged", "ema_state_dict"),
    "params_ema": (lambda r, a: {"params": r, "params_ema": a}, "averaged", "params_ema"),
    "a level below": (lambda r, a: {"model": r, "ema": {"decay": 0.9, "shadow": a}}, "averaged", "ema/shadow"),
    "student and teacher": (lambda r, a: {"student": r, "teacher": a}, "averaged", "teacher"),
    "prefixes": (lambda r, a: {**under("student.", r), **under("teacher.", a)}, "averaged", "student, teacher"),
    "Lightning": (
        lambda r, a: {"state_dict": {**under("model.", r), **under("ema_model.", a)}},
        "averaged",
        "ema_model",
    ),
    "averages beside the root": (lambda r, a: {**r, **under("ema_model.", a)}, "averaged", "the root"),
    # two encoders, and sets of which none is the average
    "BYOL": (lambda r, a: {**under("online_encoder.", r), **under("target_encoder.", a)}, "refused", "online_encoder"),
    "MoCo": (lambda r, a: {**under("encoder_q.", r), **under("encoder_k.", a)}, "refused", "encoder_k"),
    "MoCo v3": (lambda r, a: {**under("base_encoder.", r), **under("momentum_encoder.", a)}, "refused", "momentum"),
    "query and key": (lambda r, a: {"query": r, "key": a}, "refused", "query, key"),
    "two models": (lambda r, a: {"model": r, "best": a}, "refused", "model, best"),
    "two averages": (lambda r, a: {"model": r, "ema_fast": a, "ema_slow": a}, "refused", "ema_slow"),
    "callbacks": (
        lambda r, a: {"state_dict": r, "callbacks": {"EMA": {"ema_weights": a}}},
        "refused",
        "callbacks/EMA/ema_weights",
    ),
    "loops": (lambda r, a: {"state_dict": r, "loops": {"fit": {"averaged": a}}}, "refused", "loops/fit"),
    # one set, under any key, beside anything
    **{
        key: (lambda r, a, key=key: {key: r, "epoch": 3, "loss": torch.tensor(0.5)}, "raw", "")
        for key in ("model_state_dict", "net", "weights", "params", "module", "ema", "state_dict", "network")
    },
    "two levels": (lambda r, a: {"checkpoint": {"model": r}}, "raw", ""),
    "optimizer": (
        lambda r, a: {"model": r, "optimizer": {"state": {0: {"exp_avg": r["cls_token"]}}, "exp_avg": a}},
        "raw",
        "",
    ),
    "a NumPy number": (lambda r, a: {"state_dict": r, "best": np.float64(0.9), "step": np.int64(3)}, "raw", ""),
    "a NumPy array": (lambda r, a: {"state_dict": r, "rng": np.arange(5)}, "refused", "pickled objects"),
    "paths": (
        lambda r, a: {"model": r, "args": argparse.Namespace(out=Path("x")), "on": PureWindowsPath("c:/x")},
        "raw",
        "",
    ),
    "a defaultdict": (lambda r, a: {"model": r, "history": defaultdict(list, loss=[0.5])}, "raw", ""),
    "no arrays": (lambda r, a: {"epoch": 3, "args": {"lr": 0.1}}, "refused", "epoch, args"),
    # heads of one's own
    "dropout before the head": (lambda r, a: {**without_head(r), **head_of(r, "head.1")}, "raw", ""),
    "fc": (lambda r, a: {**without_head(r), **head_of(r, "fc")}, "raw", ""),
    "heads": (lambda r, a: {**without_head(r), **head_of(r, "heads")}, "raw", ""),
    "classifier": (lambda r, a: {**without_head(r), **head_of(r, "classifier")}, "raw", ""),
    "Lightning's root head": (lambda r, a: {**under("backbone.", without_head(r)), **head_of(r, "head")}, "raw", ""),
    "two heads": (
        lambda r, a: {**without_head(r), **head_of(r, "coarse"), **head_of(a, "fine")},
        "refused",
        "coarse.weight",
    ),
    "a head of two layers": (
        lambda r, a: {**without_head(r), **head_of(r, "head.0"), "head.2.weight": torch.ones(5, 11)},
        "refused",
        "head.2.weight",
    ),
}


@pytest.mark.parametrize("file", FILES)
def test_what_happens_with_a_file(tmp_path, models, caplog, file):
    found, pixel_values = models
    content, expected, word = FILES[file]
    torch.save(content(found["raw"][0], found["averaged"][0]), tmp_path / "file.pth")
    if expected == "refused":
        with pytest.raises(ConversionError, match=word):
            convert(tmp_path / "file.pth", **OPTIONS)
        return
    model, _ = convert(tmp_path / "file.pth", **OPTIONS)
    torch.testing.assert_close(logits(model, pixel_values), found[expected][1], rtol=0, atol=1e-5)
    assert word in caplog.text
    assert bool(word) == ("several sets" in caplog.text)


@pytest.mark.parametrize(
    ("file", "options", "expected"),
    [
        ("timm", {"weights": "state_dict"}, "raw"),
        ("timm", {"weights": "state_dict_ema"}, "averaged"),
        ("callbacks", {"weights": "callbacks/EMA/ema_weights"}, "averaged"),
        ("callbacks", {"weights": "state_dict"}, "raw"),
        ("BYOL", {"weights": "online_encoder"}, "raw"),
        ("MoCo", {"weights": "encoder_k"}, "averaged"),
        ("Lightning", {"weights": "model"}, "raw"),
        ("Lightning", {"weights": "ema_model."}, "averaged"),
        ("two heads", {"head": "coarse"}, "unknown: fine"),
        ("timm", {"weights": "swa"}, "state_dict_ema"),
        ("Lightning", {"weights": "teacher"}, "ema_model"),
        ("fc", {"head": "classifier"}, "fc"),
        ("timm", {"head": "fc"}, "head.weight"),
    ],
)
def test_the_caller_chooses(tmp_path, models, file, options, expected):
    found, pixel_values = models
    content, _, _ = FILES[file]
    torch.save(content(found["raw"][0], found["averaged"][0]), tmp_path / "file.pth")
    if expected not in found:
        with pytest.raises(ConversionError, match=expected):
            convert(tmp_path / "file.pth", **OPTIONS, **options)
        return
    model, _ = convert(tmp_path / "file.pth", **OPTIONS, **options)
    torch.testing.assert_close(logits(model, pixel_values), found[expected][1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("prefixes", "expected"),
    [
        ({"raw": "params/"}, "raw"),
        ({"raw": "ema_params/"}, "raw"),
        ({"raw": "target/"}, "raw"),
        ({"raw": "model/"}, "raw"),
        ({"raw": "state/params/"}, "raw"),
        ({"raw": "params/", "averaged": "ema_params/"}, "averaged"),
        ({"raw": "params/", "averaged": "target/"}, "refused"),
    ],
)
def test_prefixes_in_an_npz(tmp_path, models, prefixes, expected):
    found, pixel_values = models
    arrays = {}
    for name, prefix in prefixes.items():
        arrays |= under(prefix, found[f"{name}.npz"][0])
    np.savez(tmp_path / "file.npz", **arrays)
    if expected == "refused":
        with pytest.raises(ConversionError, match="params, target"):
            convert(tmp_path / "file.npz", position_grid=(5, 6))
        return
    model, _ = convert(tmp_path / "file.npz", position_grid=(5, 6))
    torch.testing.assert_close(logits(model, pixel_values), found[f"{expected}.npz"][1], rtol=0, atol=1e-5)


def test_the_command_chooses(tmp_path, models, run_command):
    found, _ = models
    torch.save({"model": found["raw"][0], "best": found["averaged"][0]}, tmp_path / "file.pth")
    command = ["convert", str(tmp_path / "file.pth"), "--check", "--position-grid", "5x6"]
    command += ["--set", "num_attention_heads=2"]
    assert "--weights" in run_command(command, status=2)
    assert "container best" in run_command([*command, "--weights", "best"])
