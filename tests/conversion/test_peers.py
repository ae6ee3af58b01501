"""Checkpoints of timm, torchvision, DeiT, MAE and DINO: their own logits, every array used, and back to timm."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, convert, export
from hf_vit.loading import save_folder

from ..comparing import assert_same_weights, change_json, logits
from ..paths import PEERS
from ..tiny_models import SIZES, load_model, tiny

CHECKPOINTS = json.loads((PEERS / "index.json").read_text())
GRID = {"num_attention_heads": 2, "position_grid": (5, 9)}


def convert_golden(name):
    arguments = dict(CHECKPOINTS[name])
    grid = arguments.pop("position_grid", None)
    return convert(PEERS / name, position_grid=None if grid is None else tuple(grid), **arguments)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_the_source(name):
    model, _ = convert_golden(name)
    with np.load(PEERS / "expected.npz") as expected:
        height, width = np.broadcast_to(model.config.image_size, 2)
        pixel_values = torch.from_numpy(expected[f"pixel_values_{height}x{width}"]).float()
        theirs = torch.from_numpy(expected[f"{name}/logits"])
    torch.testing.assert_close(logits(model, pixel_values), theirs, rtol=0, atol=1e-5)


def test_arrays_outside_the_encoder_are_named_in_the_record():
    assert convert_golden("mae.pth")[0].conversion_record["other_parts"] == ["decoder_embed.weight", "mask_token"]
    record = convert_golden("dino.pth")[0].conversion_record
    assert record["dialect"] == {"names": "timm", "prefix": "module.backbone.", "container": "teacher"}
    assert record["other_parts"] == ["module.head.last_layer.weight_v", "module.head.mlp.0.weight"]
    assert record["dtypes"] == ["float16"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("timm_plain.safetensors", {"preset": "timm", "image_mean": [0.5, 0.5, 0.5], "resample": 3}),
        ("deit.pth", {"preset": "timm", "image_mean": [0.485, 0.456, 0.406], "resample": 3}),
        ("torchvision.pth", {"preset": "timm", "image_std": [0.229, 0.224, 0.225], "resample": 2}),
        ("timm_folder", {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "resample": 2}),
    ],
)
def test_the_processor_is_the_one_of_the_source(name, settings):
    model, processor = convert_golden(name)
    assert {field: getattr(processor, field) for field in settings} == settings
    height, width = np.broadcast_to(model.config.image_size, 2)
    assert processor(np.zeros((50, 70, 3), np.uint8)).pixel_values[0].shape == (3, height, width)


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name.endswith(".safetensors")])
def test_export_to_timm(tmp_path, name):
    model, _ = convert_golden(name)
    if name in ("timm_hybrid.safetensors", "timm_bit.safetensors"):  # so few units are no architecture of timm
        with pytest.raises(ConversionError, match=r"\[1"):
            export(model, tmp_path / "back.safetensors", "timm")
        return
    arguments = export(model, tmp_path / "back.safetensors", "timm")
    back, source = load_file(tmp_path / "back.safetensors"), load_file(PEERS / name)
    assert set(back) == set(source)
    for key, array in source.items():
        assert torch.equal(back[key], array.float()), key
    assert (arguments["embed_dim"], arguments["num_heads"], arguments["num_classes"]) == (14, 2, 11)
    assert arguments["qkv_bias"] == (name != "timm_no_embed_class.safetensors")


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"label_names": [f"n{i}" for i in range(11)]}, {0: "n0", 10: "n10"}),
        ({"pretrained_cfg": {"label_names": [f"n{i}" for i in range(11)]}}, {0: "n0", 10: "n10"}),
        ({"label_names": {"0": "n0", "9": "n9"}}, {0: "n0", 9: "n9", 10: "LABEL_10"}),
        (
            {"label_names": [f"n{i}" for i in range(11)], "label_descriptions": {"n0": "tench, Tinca tinca"}},
            {0: "tench, Tinca tinca", 1: "n1"},
        ),
    ],
)
def test_class_names_are_kept_and_exported(tmp_path, stated, expected):
    folder = tmp_path / "theirs"
    shutil.copytree(PEERS / "timm_folder", folder)
    config = json.loads((folder / "config.json").read_text())
    pretrained = {**config["pretrained_cfg"], **stated.get("pretrained_cfg", {})}
    change_json(folder / "config.json", **{**stated, "pretrained_cfg": pretrained})
    model, _ = convert(folder, position_grid=(5, 9))
    assert {index: model.config.id2label[index] for index in expected} == expected
    export(model, tmp_path / "back", "timm")
    names = json.loads((tmp_path / "back" / "config.json").read_text())["label_names"]
    assert names == list(model.config.id2label.values())


def test_a_folder_for_timm_describes_the_architecture(tmp_path):
    model, processor = convert_golden("timm_folder")
    save_folder(tmp_path / "ours", model, processor)
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "timm"]) == 0
    stated, theirs = (
        json.loads((folder / "config.json").read_text())["model_args"]
        for folder in (PEERS / "timm_folder", tmp_path / "theirs")
    )
    assert {name: theirs[name] for name in stated} == stated
    again, _ = convert(tmp_path / "theirs", position_grid=(5, 9))
    assert again.config.to_dict() == convert_golden("timm_folder")[0].config.to_dict()
    assert_same_weights(again, model)


@pytest.mark.parametrize(
    ("depths", "architecture"),
    [([], "vit_tiny_r_s16_p8_224"), ([2, 2, 2, 2], "vit_small_r26_s32_224"), ([3, 4, 9], "vit_base_r50_s16_224")],
)
def test_hybrids_go_to_timm_and_back(tmp_path, depths, architecture, caplog):
    size = 64 if len(depths) == 4 else 32
    model = tiny(hybrid=True, stem_depths=depths, image_size=(size, size), patch_size=(1, 1), stem_width=64)
    export(model, tmp_path / "timm", "timm")
    assert "group_norm_eps" in caplog.text  # timm has one value for it
    assert "layer_norm_eps" not in caplog.text
    assert json.loads((tmp_path / "timm" / "config.json").read_text())["architecture"] == architecture
    again, _ = convert(tmp_path / "timm")
    assert list(again.config.stem_depths) == depths
    assert_same_weights(again, model)


def test_an_untrained_head_is_dropped(tmp_path):
    arrays = load_file(PEERS / "timm_plain.safetensors")
    arrays["head.weight"], arrays["head.bias"] = torch.zeros(11, 14), torch.full((11,), -10.0)
    save_file(arrays, tmp_path / "zero.safetensors")
    model, _ = convert(tmp_path / "zero.safetensors", **GRID)
    assert type(model).__name__ == "HfViTModel"
    assert model.conversion_record["dropped"] == {"head": {"shape": [14, 11], "bias": -10.0}}


def test_models_that_timm_does_not_support(tmp_path):
    plain = {**SIZES, "hidden_size": 16}  # a multiple of 4
    for fields, message in (
        ({"representation_size": 9}, "representation_size"),
        ({"position_embedding_type": "sincos2d"}, "sincos2d"),
        ({"layer_norm_eps": 1e-12, "norm_after_pooling": True}, "norm_after_pooling"),
        ({"hidden_act": "silu"}, "silu"),
    ):
        with pytest.raises(ConversionError, match=message):
            export(HfViTForImageClassification(HfViTConfig(**plain, **fields)), tmp_path / "out.safetensors", "timm")
    assert not list(tmp_path.iterdir())


def test_a_port_with_other_numbers_is_not_written_as_jax(tmp_path):
    wrong = {"plain": "hidden_act", "hybrid": "group_norm_eps=1e-05", "gap": "use_cls_token"}
    for name, message in wrong.items():
        with pytest.raises(ConversionError, match=message):
            export(convert_golden(f"timm_{name}.safetensors")[0], tmp_path / "out.npz", "jax")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"blocks.0.mlp.fc1.weight": None}, "blocks.0.mlp.fc1.weight"),
        ({"patch_embed.proj.weight": None}, "changed.safetensors"),
        ({"dist_token": (1, 1, 14)}, "dist_token"),
        ({"blocks.0.gamma.ls1": (14,), "reg_token": (1, 4, 14)}, "gamma.ls1, reg_token"),
        ({"blocks.0.attn.qkv.bias": (41,)}, r"qkv.bias \(41,\)"),
        ({"pos_embed": (1, 44, 14)}, "43.*5 x 9"),
        ({"pos_embed": (46, 14)}, "13.*5 x 9"),
    ],
)
def test_wrong_arrays_are_listed(tmp_path, shapes, message):
    arrays = load_file(PEERS / "timm_plain.safetensors")
    arrays |= {name: shape and torch.ones(shape) for name, shape in shapes.items()}
    left = {name: array for name, array in arrays.items() if array is not None}
    save_file(left, tmp_path / "changed.safetensors")
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "changed.safetensors", **GRID)


def test_the_number_of_heads_must_be_stated_if_unknown(tmp_path, run_command):
    with pytest.raises(ConversionError, match="14"):
        convert(PEERS / "timm_plain.safetensors", position_grid=(5, 9))
    command = ["convert", str(PEERS / "timm_plain.safetensors"), str(tmp_path / "out"), "--position-grid", "5x9"]
    assert "num_attention_heads" in run_command(command, status=2)
    assert not list(tmp_path.iterdir())
    assert main([*command, "--set", "num_attention_heads=2"]) == 0
    assert load_model(tmp_path / "out").config.num_attention_heads == 2


class Runs:
    """An object that prints when it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_nothing_is_unpickled(tmp_path, capsys):
    torch.save({"model": {"patch_embed.proj.weight": torch.ones(2)}, "hook": Runs()}, tmp_path / "evil.pth")
    with pytest.raises(ConversionError, match="evil"):
        convert(tmp_path / "evil.pth")
    assert "unpickled" not in capsys.readouterr().out


def test_foreign_files(tmp_path):
    torch.save([torch.ones(2)], tmp_path / "list.pth")
    with pytest.raises(ConversionError, match="list"):
        convert(tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    with pytest.raises(ConversionError, match=r"empty\.pth"):
        convert(tmp_path / "empty.pth")
    save_file({"vit.embeddings.patch_embeddings.projection.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConversionError, match=r"config.json"):
        convert(tmp_path / "model.safetensors")
    for name in ("model.onnx", "model.xml", "model.pt2"):
        (tmp_path / name).write_bytes(b"\x08\x0a")
        with pytest.raises(ConversionError, match="export MODEL FOLDER"):
            convert(tmp_path / name)


def test_file_names_are_not_needed(tmp_path):
    """A checkpoint is recognized by its content, under any file name."""
    for name in ("timm_plain.safetensors", "deit.pth"):
        shutil.copy(PEERS / name, tmp_path / "anything")
        assert convert(tmp_path / "anything", **GRID)[0].conversion_record["dialect"]["names"] == "timm"


def test_old_torchvision_names(tmp_path):
    weights = torch.load(PEERS / "torchvision.pth", weights_only=True)
    names = [name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2.") for name in weights]
    torch.save(dict(zip(names, weights.values(), strict=True)), tmp_path / "old.pth")
    model, _ = convert(tmp_path / "old.pth", num_attention_heads=2)
    assert_same_weights(model, convert_golden("torchvision.pth")[0])


@pytest.mark.parametrize(
    ("changes", "message"), [({"label_names": ["cat", "dog"]}, "11"), ({"global_pool": "avgmax"}, "global_pool")]
)
def test_a_timm_folder_that_cannot_be_right_is_refused(tmp_path, changes, message):
    shutil.copytree(PEERS / "timm_folder", tmp_path / "folder")
    change_json(tmp_path / "folder" / "config.json", **changes)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "folder", position_grid=(5, 9))
