"""Sizes that a file declares are checked before memory is taken; Linux counts the memory."""

import json
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForImageClassification

from hf_vit import HfBiTConfig, HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.conversion import checkpoint, convert
from hf_vit.conversion.tables import ConversionError
from hf_vit.files import limits, npz
from hf_vit.files.limits import check_declared
from hf_vit.files.npz import NpzError, NpzReader
from hf_vit.loading import load
from hf_vit.models.image_reading import ImageReadingError, read_image

from ..comparing import change_json, read_arrays
from ..paths import GOLDENS
from ..photographs import png_of
from ..processes import growth_of
from ..tiny_models import tiny


def is_refused(action, message, error=ValueError) -> None:
    """Check that an error is raised before memory is taken."""

    def refused():
        with pytest.raises(error, match=message):
            action()

    assert growth_of(refused) < 60_000_000


def test_a_compressed_file_that_declares_too_many_bytes_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "bomb.npz", **{name: np.zeros(1_000_000, bool) for name in "abc"})
    monkeypatch.setattr(limits, "_ALWAYS_ALLOWED_BYTES", 2**20)
    with pytest.raises(NpzError, match=r"bomb\.npz .* 3,000,"):
        NpzReader(tmp_path / "bomb.npz")
    monkeypatch.setenv("HF_VIT_ALLOW", "private, large")
    with NpzReader(tmp_path / "bomb.npz") as reader:
        assert len(reader.arrays) == 3


def test_overlapping_arrays_are_refused(tmp_path):
    """Both directory entries point to the same bytes, as in a zip bomb without compression."""
    np.savez(tmp_path / "a.npz", a=np.zeros(1000, np.float32), b=np.zeros(1000, np.float32))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    for offset in (content.index(b"PK\1\2"), content.rindex(b"PK\1\2")):
        struct.pack_into("<II", content, offset + 20, 6000, 6000)
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(NpzError, match=r"a\.npz"):
        NpzReader(tmp_path / "a.npz")


def test_too_many_arrays_and_a_too_long_header_are_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", a=np.zeros(1), b=np.zeros(1))
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\2\0" + struct.pack("<I", 20_000_000) + bytes(20_000_000))
    is_refused(lambda: NpzReader(tmp_path / "b.npz"), "20000000", NpzError)
    monkeypatch.setattr(npz, "MAX_ARRAYS", 1)
    with pytest.raises(NpzError, match=r"a\.npz"):
        NpzReader(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("file", "block", "number", "message"),
    [("hybrid_r2222", "block4/", 10**9, "stages"), ("vit_token", "encoderblock_0/", 900, "missing")],
)
def test_a_large_number_in_a_name_creates_no_large_model(file, block, number, message, tmp_path):
    arrays = read_arrays(GOLDENS / f"{file}.npz")
    name = next(name for name in arrays if block in name)
    arrays[name.replace(block, f"{block[:-2]}{number}/")] = arrays[name]
    np.savez(tmp_path / "a.npz", **arrays)
    is_refused(lambda: convert(tmp_path / "a.npz"), message)


def test_too_many_empty_stacked_blocks_are_refused(tmp_path):
    arrays = {"embedding/kernel": np.zeros((2, 2, 3, 4), "f4")}
    arrays["Transformer/encoderblock/LayerNorm_0/scale"] = np.zeros((500_000, 0), "f4")
    np.savez(tmp_path / "a.npz", **arrays)
    is_refused(lambda: convert(tmp_path / "a.npz"), r"a\.npz")


def test_expanded_tensors_are_refused(tmp_path):
    torch.save({"a": torch.zeros(1).expand(10**9)}, tmp_path / "expanded.pth")
    is_refused(lambda: checkpoint.read_arrays(tmp_path / "expanded.pth"), "4,000,000,000", ConversionError)


def test_an_image_file_that_declares_a_box_of_4_eib_is_refused(tmp_path):
    """Pillow asks the file for as much as a JPEG 2000 says that its header has."""
    Image.new("RGB", (8, 9)).save(tmp_path / "a.jp2")
    content = (tmp_path / "a.jp2").read_bytes()
    before, _, after = content.partition(b"jp2h")
    (tmp_path / "a.jp2").write_bytes(before[:-4] + b"\0\0\0\1jp2h" + (2**62).to_bytes(8, "big") + after)
    is_refused(lambda: read_image(tmp_path / "a.jp2"), None, ImageReadingError)


def test_an_old_pth_that_declares_more_than_it_holds_is_refused(tmp_path):
    """PyTorch takes the memory before it looks for the numbers: 120 GB end in an error of its allocator."""
    torch.save({"a": torch.zeros(1000)}, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    content = (tmp_path / "a.pth").read_bytes()
    declared = pickle.BININT2 + struct.pack("<H", 1000)
    assert content.count(declared + pickle.NONE) == 1
    more = pickle.LONG1 + bytes([5]) + (30_000_000_000).to_bytes(5, "little")
    (tmp_path / "a.pth").write_bytes(content.replace(declared + pickle.NONE, more + pickle.NONE))
    is_refused(lambda: checkpoint.read_arrays(tmp_path / "a.pth"), r"a\.pth", ConversionError)


def settings_of(folder, **changes):
    """Save a tiny model, with other settings in its config.json."""
    tiny().save_pretrained(folder)
    change_json(folder / "config.json", **changes)
    return folder


def test_a_config_json_of_a_larger_model_than_the_weights_is_refused(tmp_path):
    settings_of(tmp_path, hidden_size=5_000, intermediate_size=20_000)
    is_refused(lambda: load(tmp_path), r"900,7\d\d,\d+")
    (tmp_path / "model.safetensors").unlink()
    is_refused(lambda: AutoModelForImageClassification.from_pretrained(tmp_path), "no file named", OSError)


def test_an_index_of_weights_with_millions_of_lists_is_refused(tmp_path):
    tiny().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": [{"[]," * 2_000_000}[]]}}')
    is_refused(lambda: load(tmp_path), "1,048,576")


def test_an_index_of_weights_does_not_lead_out_of_its_folder(tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tiny().state_dict(), "../outside.safetensors")}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"outside\.safetensors"):
        load(tmp_path / "model")


def test_a_head_may_be_larger_than_the_file(tmp_path):
    tiny().save_pretrained(tmp_path)
    model = HfViTForImageClassification.from_pretrained(tmp_path, num_labels=20_000)
    assert model.classifier.weight.shape == (20_000, 14)
    save_file(tiny().half().state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    HfViTForImageClassification.from_pretrained(tmp_path)


def test_a_too_large_or_too_deep_config_json_is_refused(tmp_path, monkeypatch):
    nested: dict = {}
    for _ in range(40):
        nested = {"a": [nested]}
    with pytest.raises(ValueError, match="32"):
        load(settings_of(tmp_path, auto_map=nested))
    with open(settings_of(tmp_path) / "config.json", "r+b") as file:
        file.truncate(2**26 + 1)  # a file with a hole: nothing is written
    with pytest.raises(ValueError, match="67108864"):
        load(tmp_path)


def test_the_largest_variants_are_within_the_limits():
    """ViT-G/14 (arXiv 2106.04560, Table 2), the published files of FACTS, and tiles of 48 megapixels."""
    giant = {"hidden_size": 1664, "num_hidden_layers": 48, "num_attention_heads": 16, "intermediate_size": 8192}
    HfViTConfig(**giant, patch_size=14, num_labels=29_593)
    HfBiTConfig.from_variant("R152x4", num_labels=21_843)
    HfViTConfig(image_size=(6_000, 8_000), patch_size=(16, 16), position_embedding_type="sincos2d")
    HfViTImageProcessor(size={"height": 6_000, "width": 8_000})
    for size in (1_200_000_000, 2_500_000_000, 3_730_000_000, 4 * 1_843_000_000):
        check_declared("it", 4 * size, size)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_images_that_are_too_large_before_or_after_resizing_are_refused():
    is_refused(lambda: read_image(png_of(12_000, 12_000)), "12000 x 12000", ImageReadingError)
    processor = HfViTImageProcessor(size={"shortest_edge": 512})
    is_refused(lambda: processor(Image.new("L", (10_000, 1))), "2,621,440,000", ImageReadingError)
    processor = HfViTImageProcessor(size=14, do_convert_rgb=False, image_mean=0.5, image_std=0.5)
    many = np.zeros((2**20, 1, 3), np.uint8)
    is_refused(lambda: processor(many, input_data_format="channels_first"), "1,048,576", ImageReadingError)
