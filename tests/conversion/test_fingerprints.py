"""Content fingerprints: equal in every container; judged by NumPy and hashlib from the definition."""

import hashlib
import re
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vit import HfBiTModel, HfViTHybridModel, HfViTModel
from hf_vit.catalog import address_of, released_with
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, convert, export, fingerprint
from hf_vit.conversion.tables import TIMM_NUMBERS
from hf_vit.loading import load, save_folder
from hf_vit.models.configuration_hf_bit import BIG_TRANSFER

from ..comparing import read_arrays
from ..paths import SHARED
from ..tiny_models import TINY, TINY_HYBRID, VARIANTS, randomize, tiny, tiny_bit

WEIGHTS = SHARED / "weights"
NPZ, OF_TIMM = WEIGHTS / "Ti_16-imagenet2012-res_224.npz", WEIGHTS / "vit_tiny_patch16_224_timm.safetensors"
SQUARE = {"patch_size": (4, 4), "image_size": (20, 20)}
OF_TIMM_R50 = {"stem_depths": [2, 2, 2, 2], "stem_width": 64, "image_size": (64, 128)}
TIMM, TRANSFORMERS, BOTH, NONE = {"timm"}, {"transformers"}, {"timm", "transformers"}, set()


def encoder(model_class=HfViTModel, **fields):
    sizes = TINY_HYBRID if model_class is HfViTHybridModel else TINY
    return randomize(model_class(model_class.config_class(**{**sizes, **fields})))


BUILDERS = {"encoder": encoder, "hybrid encoder": partial(encoder, HfViTHybridModel), "BiT": tiny_bit}
STRUCTURES = {  # name, up to a colon that of its builder -> formats besides .npz and our folder; fields
    **{
        f"{name}, {layers} layers, {channels} channels": (
            {"cls": BOTH, "map": NONE}.get(name, TIMM),
            {**VARIANTS[name], **sizes, "num_channels": channels},
        )
        for name in ("cls", "mean", "map", "none")
        for layers, channels, sizes in (
            (1, 5, {"num_hidden_layers": 1}),
            (3, 1, {"num_attention_heads": 7, "intermediate_size": 9}),
        )
    },
    "12 layers": (BOTH, {"num_hidden_layers": 12}),
    "sine and cosine": (NONE, VARIANTS["sincos"]),
    "sine and cosine, a map": (NONE, {**VARIANTS["sincos"], "pooling": "map"}),
    "one patch": (BOTH, {"patch_size": (20, 36)}),
    "one head, a wide MLP": (BOTH, {"num_attention_heads": 1, "intermediate_size": 70, "num_hidden_layers": 2}),
    "a map, several heads": (TIMM, {"pooling": "map", "hidden_size": 12, "num_attention_heads": 3}),
    "a map, projected": (TIMM, {**SQUARE, "pooling": "map", "projection_dim": 5}),
    "square patches": (BOTH, {**SQUARE, "num_labels": 3}),
    "pre-logits": (NONE, {"representation_size": 9}),
    "pre-logits, mean": (NONE, {"representation_size": 9, "pooling": "mean"}),
    "hybrid": (NONE, VARIANTS["hybrid"]),
    "hybrid, mean": (NONE, {"hybrid": True, "pooling": "mean", "stem_depths": [1, 1, 2], "image_size": (32, 64)}),
    "stem alone": (TIMM, {"hybrid": True, "stem_depths": [], "stem_width": 64}),
    "hybrid of timm": (TIMM, {"hybrid": True, **OF_TIMM_R50}),
    "encoder": (BOTH, {}),
    "encoder: pre-logits": (TRANSFORMERS, {"representation_size": 9}),
    "encoder: mean": (TIMM, {"pooling": "mean"}),
    "encoder: tower of SigLIP": (BOTH, {**SQUARE, "pooling": "map"}),
    "hybrid encoder": (NONE, {}),
    "hybrid encoder: of timm": (TIMM, OF_TIMM_R50),
    "BiT": (TRANSFORMERS, {}),
    "BiT: one stage": (TRANSFORMERS, {"depths": [1]}),
    "BiT: three stages": (TRANSFORMERS, {"depths": [2, 1, 1], "num_labels": 3}),
    "BiT: 5 channels": (TRANSFORMERS, {"num_channels": 5}),
    "BiT: twice as wide": (TRANSFORMERS, {"embedding_size": 64}),
    "BiT: encoder": (TRANSFORMERS, {"model_class": HfBiTModel}),
}
IN_ORIGINAL_NAMES = {"12 layers", "hybrid", "pre-logits", *(name for name in STRUCTURES if name.startswith("BiT"))}


def define(config, to):
    """Give a configuration the definitions (GELU, epsilons) that a format needs; they are no content."""
    if hasattr(config, "depths"):
        numbers = {**BIG_TRANSFER, **({} if to in ("jax", "folder") else TIMM_NUMBERS)}
    else:
        numbers = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
    for name, number in numbers.items():
        setattr(config, name, number)


def by_definition(path):
    """Of a file whose names are the released files' own."""
    lines = b""
    for name, array in sorted(read_arrays(path).items()):
        shape, array = "x".join(map(str, array.shape)), np.ascontiguousarray(array, np.float32)
        lines += f"{hashlib.sha256(array).hexdigest()}  float32  {shape}  {name}\n".encode()
    return hashlib.sha256(lines).hexdigest()


def through_every_format(model, tmp_path):
    """Yield each fingerprint: of the model's folder, and of it in every format that supports it, each from the last."""
    grid = getattr(model.config, "grid_size", None)
    options = {} if grid is None or grid[0] == grid[1] else {"position_grid": grid}
    if getattr(model.config, "pooling", None) == "none":
        options["pooling"] = "none"
    for number, to in enumerate(["jax", "folder", "timm", "transformers", "jax", "folder"]):
        path = tmp_path / (f"{number}.npz" if to == "jax" else str(number))
        define(model.config, to)
        try:
            if to == "folder":
                model.save_pretrained(path)
            else:
                export(model, path, to)
        except ConversionError:
            continue
        yield to, fingerprint(path, **({} if to == "folder" else options))
        if to != "folder":
            model, _ = convert(path, **options)
            assert model.conversion_record["fingerprint"] == fingerprint(path, **options)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_same_in_every_container(tmp_path, structure):
    formats, fields = STRUCTURES[structure]
    build = BUILDERS.get(structure.partition(":")[0], tiny)
    names, numbers = zip(*through_every_format(build(**fields), tmp_path), strict=True)
    assert set(names) == {"jax", "folder", *formats}
    assert len(set(numbers)) == 1
    if structure in IN_ORIGINAL_NAMES:
        assert numbers[0] == by_definition(tmp_path / "0.npz")


def test_a_copy_with_exact_gelu_becomes_the_original_as_the_refusal_advises(tmp_path, capsys):
    model = tiny(patch_size=(4, 4), image_size=(20, 20))
    export(model, tmp_path / "original.npz", "jax")
    model.config.hidden_act = "gelu"
    export(model, tmp_path / "copy", "timm")
    assert main(["export", str(tmp_path / "copy"), str(tmp_path / "back.npz"), "--to", "jax"]) == 2
    advice = re.findall(r"(--set) (\S+=[^\s,]+)", capsys.readouterr().err)
    options = [word for option in advice for word in option]
    assert main(["convert", str(tmp_path / "copy"), str(tmp_path / "folder"), *options]) == 0
    assert main(["export", str(tmp_path / "folder"), str(tmp_path / "back.npz"), "--to", "jax"]) == 0
    assert by_definition(tmp_path / "back.npz") == by_definition(tmp_path / "original.npz")


def test_a_grid_that_is_not_square_is_no_content(tmp_path, run_command):
    model = tiny()
    export(model, tmp_path / "rectangle.npz", "jax")
    with pytest.raises(ConversionError, match="position_grid"):
        convert(tmp_path / "rectangle.npz")
    number = run_command(["fingerprint", tmp_path / "rectangle.npz"]).strip()
    assert number == fingerprint(tmp_path / "rectangle.npz", position_grid=model.config.grid_size)


def test_other_numbers_have_another(tmp_path):
    """Query and key swapped, a square kernel transposed, a zero of another sign."""
    model = tiny(representation_size=14)
    model.classifier.bias.data[0] = 0.0
    export(model, tmp_path / "a.npz", "jax")
    arrays = read_arrays(tmp_path / "a.npz")
    query = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    key, square, bias = query.replace("query", "key"), "pre_logits/kernel", "head/bias"
    np.savez(tmp_path / "b.npz", **arrays | {query: arrays[key], key: arrays[query]})
    np.savez(tmp_path / "c.npz", **arrays | {square: np.ascontiguousarray(arrays[square].T)})
    np.savez(tmp_path / "d.npz", **arrays | {bias: np.where(arrays[bias] == 0, np.float32(-0.0), arrays[bias])})
    assert len({fingerprint(tmp_path / f"{name}.npz", position_grid=(5, 6)) for name in "abcd"}) == 4


def test_half_precision_in_a_file_is_the_same_content_as_its_folder(tmp_path):
    model = tiny().half().float()
    export(model, tmp_path / "single.npz", "jax")
    arrays = {name: array.astype(np.float16) for name, array in read_arrays(tmp_path / "single.npz").items()}
    np.savez(tmp_path / "half.npz", **arrays)
    model, _ = convert(tmp_path / "half.npz", position_grid=(5, 6))
    model.save_pretrained(tmp_path / "folder", max_shard_size="10KB")
    model.half().save_pretrained(tmp_path / "half")
    names = ("single.npz", "half.npz", "folder", "half")
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) > 1
    found = {fingerprint(tmp_path / name, **({"position_grid": (5, 6)} if "npz" in name else {})) for name in names}
    assert found == {by_definition(tmp_path / "single.npz")}


def test_an_untrained_head_is_no_content(tmp_path):
    model = tiny()
    torch.nn.init.zeros_(model.classifier.weight)
    torch.nn.init.zeros_(model.classifier.bias)
    export(model, tmp_path / "whole.npz", "jax")
    arrays = read_arrays(tmp_path / "whole.npz")
    np.savez(tmp_path / "bare.npz", **{name: arrays[name] for name in arrays if not name.startswith("head/")})
    found = {fingerprint(tmp_path / f"{name}.npz", position_grid=(5, 6)) for name in ("whole", "bare")}
    assert found == {by_definition(tmp_path / "bare.npz")}


def test_a_changed_weight_of_a_folder(tmp_path):
    export(tiny(), tmp_path / "model.npz", "jax")
    model, processor = convert(tmp_path / "model.npz", position_grid=(5, 6))
    save_folder(tmp_path / "folder", model, processor)
    recorded = model.conversion_record["fingerprint"]
    assert fingerprint(tmp_path / "folder") == recorded
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin")
    assert fingerprint(tmp_path / "pickled") == recorded
    weights["classifier.bias"][0] += 1
    save_file(weights, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(tmp_path / "folder") != recorded


@pytest.mark.skipif(not NPZ.is_file(), reason="the real weights are not at hand")
def test_the_real_pair(tmp_path, capsys):
    expected = by_definition(NPZ)
    for path in (NPZ, OF_TIMM):
        assert main(["fingerprint", str(path)]) == 0
        said = capsys.readouterr()
        assert said.out == f"{expected}\n"
        assert address_of("augreg:Ti/16") == released_with(expected)
        assert address_of("augreg:Ti/16") in said.err
    assert main(["convert", str(NPZ), str(tmp_path / "folder")]) == 0
    model, _ = load(tmp_path / "folder")
    assert expected in (tmp_path / "folder" / "conversion.json").read_text()
    export(model, tmp_path / "theirs", "transformers")
    assert fingerprint(tmp_path / "folder") == fingerprint(tmp_path / "theirs") == expected
