"""Remote code: a folder loads where hf_vit cannot be imported; untrusted code never runs."""

import json
import shutil

import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit import add_code
from hf_vit.hub.remote_code import code_of
from hf_vit.inference.predictor import predict
from hf_vit.loading import save_folder
from hf_vit.models.modeling_hf_vit import HfViTModel as PlainModel

from ..comparing import change_json
from ..processes import finish, start
from ..tiny_models import UNKNOWN_FIELDS, load_model, save_tiny, tiny, tiny_bit

LOAD = """
    import torch
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification
    from transformers import AutoModelForMaskedImageModeling

    torch.set_num_threads(1)  # as in the tests; how sums are split changes their last bits
    folder = sys.argv[1]
    assert "hf_" in AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type
    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    assert type(processor).__module__.startswith("transformers_modules."), type(processor)
    images = torch.load(f"{folder}/images.pt", weights_only=True)
    pixel_values = processor(list(images), return_tensors="pt").pixel_values
    with torch.inference_mode():
        model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
        features = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()(pixel_values).pooler_output
        torch.save((pixel_values, model(pixel_values).logits, features), f"{folder}/results.pt")
        if "AutoModelForMaskedImageModeling" in model.config.auto_map:
            masked = AutoModelForMaskedImageModeling.from_pretrained(folder, trust_remote_code=True)
            assert masked(pixel_values).logits.isfinite().all()
    for kept in (model.config, processor):
        assert kept.to_dict()["added_by_a_tool"] == kept.added_by_a_tool
        assert kept.added_by_a_tool == {"dtype": "float32", "nested": {"deep": None}}
    assert not [name for name in sys.modules if name.startswith("hf_vit.")]
"""


MODELS = {
    "plain": lambda: tiny(representation_size=9),
    "hybrid": lambda: tiny(hybrid=True),
    "relative": lambda: tiny(position_embedding_type="relative"),
    "flexible": lambda: tiny(stored_patch_size=(7, 5)),
    "bit": tiny_bit,
}


@pytest.fixture(params=MODELS)
def folder_with_code(request, tmp_path):
    model = MODELS[request.param]()
    folder = tmp_path / "folder"
    save_folder(folder, model, hf_vit.HfViTImageProcessor(size=[*model.config.image_size]))
    add_code(folder)
    for file in ("config.json", "preprocessor_config.json"):
        change_json(folder / file, **UNKNOWN_FIELDS)
    torch.save(torch.randint(0, 256, (3, 3, 31, 57), dtype=torch.uint8), folder / "images.pt")
    return folder


def test_the_same_logits_where_hf_vit_cannot_be_imported(folder_with_code, run_without_hf_vit):
    run_without_hf_vit(LOAD, folder_with_code)
    pixel_values, logits, features = torch.load(folder_with_code / "results.pt", weights_only=True)
    model, processor = load_model(folder_with_code).eval(), hf_vit.HfViTImageProcessor.from_pretrained(folder_with_code)
    images = torch.load(folder_with_code / "images.pt", weights_only=True)
    assert torch.equal(processor(list(images), return_tensors="pt").pixel_values, pixel_values)
    with torch.inference_mode():
        assert torch.equal(model(pixel_values).logits, logits)
        assert torch.equal(model.base_model(pixel_values).pooler_output, features)


def test_register_for_auto_class_copies_the_same_code(tmp_path):
    """`register_for_auto_class` changes every later save, so it runs in a separate process."""
    folder = save_tiny(tmp_path / "ours", position_embedding_type="relative")
    code = f"""
import hf_vit
model, processor = hf_vit.load({str(folder)!r})
model.register_for_auto_class("AutoModelForImageClassification")
model.config.register_for_auto_class()
processor.register_for_auto_class("AutoImageProcessor")
for part in (model, processor):
    part.save_pretrained({str(tmp_path / "saved")!r})
"""
    finish(start(code))
    saved = {file.name for file in (tmp_path / "saved").glob("*.py")} | {"modeling_masked_patch_prediction.py"}
    add_code(tmp_path / "ours")
    assert saved == {file.name for file in (tmp_path / "ours").glob("*.py")}
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text())["auto_map"] for name in ("ours", "saved"))
    assert theirs.items() <= ours.items()


PLAIN_CODE = {
    "configuration_hf_vit.py",
    "image_decoding.py",
    "image_processing_hf_vit.py",
    "image_reading.py",
    "image_resizing.py",
    "image_tiff.py",
    "modeling_hf_vit.py",
    "pretrained.py",
    "resize_weights.py",
    "sizes.py",
}


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({}, True),
        ({"pooling": "map"}, True),
        ({"pooling": "mean", "position_embedding_type": "sincos2d", "hidden_size": 16}, True),
        ({"position_embedding_type": "learned2d"}, False),
        ({"position_embedding_placement": "every_layer"}, False),
        ({"stored_patch_size": 7}, False),
    ],
)
def test_a_plain_model_is_pushed_with_the_code_of_a_plain_model(fields, is_plain, tmp_path):
    folder = save_tiny(tmp_path / "folder", **fields)
    add_code(folder)
    code = {file.name for file in folder.glob("*.py")}
    assert (code == PLAIN_CODE) == is_plain
    assert is_plain or code > PLAIN_CODE


def test_a_model_that_needs_more_than_the_code_of_a_plain_model_is_refused_by_it():
    """Such as a configuration that was edited after the push."""
    with pytest.raises(ValueError, match="hf_vit"):
        PlainModel(tiny(position_embedding_type="relative").config)


def test_only_code_that_auto_map_reaches_is_pushed(folder_with_code, tmp_path):
    folder = shutil.copytree(folder_with_code, tmp_path / "model")
    code = {file.name for file in code_of(folder)}
    assert code == {file.name for file in folder.glob("*.py")}
    (folder / "inference.py").write_text("PASSWORD = 1")
    assert {file.name for file in code_of(folder)} == code
    change_json(folder / "config.json", auto_map={"AutoModel": "../outside.Model"})
    (tmp_path / "outside.py").touch()
    (folder / "preprocessor_config.json").unlink()
    assert code_of(folder) == set()


def test_untrusted_code_never_runs(run_without_hf_vit, tmp_path):
    mark, folder = tmp_path / "it ran", save_tiny(tmp_path / "folder")
    for name in ("config.json", "preprocessor_config.json"):
        autos = ("AutoConfig", "AutoModel", "AutoModelForImageClassification", "AutoImageProcessor")
        change_json(folder / name, auto_map=dict.fromkeys(autos, "hostile.Model"))
    autos = {"AutoProcessor": "hostile.Model", "AutoImageProcessor": "hostile.Model"}
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": autos}))
    (folder / "hostile.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: pass\n")
    model = hf_vit.HfViTForImageClassification.from_pretrained(folder)
    assert type(load_model(folder)) is type(model)
    Image.effect_noise((41, 33), 80).convert("RGB").save(tmp_path / "image.png")
    list(predict(folder, [tmp_path / "image.png"]))
    code = """
        import pytest
        from transformers import AutoConfig, AutoImageProcessor, AutoModel
        for auto in (AutoConfig, AutoImageProcessor, AutoModel):
            with pytest.raises(Exception, match="trust_remote_code=True"):
                auto.from_pretrained(sys.argv[1])
    """
    run_without_hf_vit(code, folder)
    assert not mark.exists()


def test_a_folder_of_another_package_gets_no_code(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="'vit'"):
        add_code(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
