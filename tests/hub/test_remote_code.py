"""Remote code: a folder loads where hf_vit cannot be imported; untrusted code never runs."""

import json
import os
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit import add_code
from hf_vit.hub.remote_code import code_of
from hf_vit.loading import save_folder
from hf_vit.prediction import predict

from ..comparing import change_json
from ..processes import ForkServer, finish, start
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
        if model.config.model_type != "hf_bit":
            masked = AutoModelForMaskedImageModeling.from_pretrained(folder, trust_remote_code=True)
            assert masked(pixel_values).logits.isfinite().all()
    for kept in (model.config, processor):
        assert kept.to_dict()["added_by_a_tool"] == kept.added_by_a_tool
        assert kept.added_by_a_tool == {"dtype": "float32", "nested": {"deep": None}}
    assert not [name for name in sys.modules if name.startswith("hf_vit.")]
"""
HOSTILE = """
    from pathlib import Path
    Path({mark!r}).touch()
    class Model: pass
"""


@pytest.fixture(scope="module")
def without_hf_vit(tmp_path_factory):
    """Processes that have transformers, and may not import hf_vit."""
    home = tmp_path_factory.mktemp("home")
    server = ForkServer(home / "runs", {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}, has_hf_vit=False)
    yield server
    server.stop()


def run_python(server: ForkServer, code: str, folder: Path) -> str:
    """Run code with the folder as its argument; transformers keeps the code of folders next to it."""
    modules = folder.parent / "modules"
    modules.mkdir()
    prelude = f"""
        import sys
        from transformers import dynamic_module_utils
        sys.modules["hf_vit"], sys.argv = None, ["", {str(folder)!r}]
        dynamic_module_utils.HF_MODULES_CACHE = {str(modules)!r}
    """
    process = server.start(textwrap.dedent(prelude) + textwrap.dedent(code), cwd=folder.parent)
    printed, error = process.wait()
    assert process.status == 0, error
    return printed


MODELS = {
    "plain": lambda: tiny(representation_size=9),
    "hybrid": lambda: tiny(hybrid=True),
    "bit": tiny_bit,
}


@pytest.fixture(params=MODELS)
def folder_with_code(request, tmp_path):
    model = MODELS[request.param]()
    height, width = model.config.image_size
    folder = tmp_path / "folder"
    save_folder(folder, model, hf_vit.HfViTImageProcessor(size={"height": height, "width": width}))
    add_code(folder)
    for file in ("config.json", "preprocessor_config.json"):
        change_json(folder / file, **UNKNOWN_FIELDS)
    torch.save(torch.randint(0, 256, (3, 3, 31, 57), dtype=torch.uint8), folder / "images.pt")
    return folder


def test_the_same_logits_where_hf_vit_cannot_be_imported(folder_with_code, without_hf_vit):
    run_python(without_hf_vit, LOAD, folder_with_code)
    pixel_values, logits, features = torch.load(folder_with_code / "results.pt", weights_only=True)
    model, processor = load_model(folder_with_code).eval(), hf_vit.HfViTImageProcessor.from_pretrained(folder_with_code)
    images = torch.load(folder_with_code / "images.pt", weights_only=True)
    assert torch.equal(processor(list(images), return_tensors="pt").pixel_values, pixel_values)
    with torch.inference_mode():
        assert torch.equal(model(pixel_values).logits, logits)
        assert torch.equal(model.base_model(pixel_values).pooler_output, features)


def test_register_for_auto_class_copies_the_same_code(tmp_path):
    """`register_for_auto_class` changes every later save, so it runs in a separate process."""
    code = """
        import sys, torch, hf_vit
        torch.manual_seed(5)
        hf_vit.HfViTForImageClassification.register_for_auto_class("AutoModelForImageClassification")
        hf_vit.HfViTConfig.register_for_auto_class()
        hf_vit.HfViTImageProcessor.register_for_auto_class("AutoImageProcessor")
        hf_vit.HfViTForImageClassification(hf_vit.HfViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=6, image_size=20, patch_size=5)).save_pretrained(sys.argv[1])
        hf_vit.HfViTImageProcessor(size=20).save_pretrained(sys.argv[1])
    """
    finish(start(f"import sys\nsys.argv = ['', {str(tmp_path / 'saved')!r}]\n{textwrap.dedent(code)}"))
    saved = {file.name for file in (tmp_path / "saved").glob("*.py")} | {"modeling_masked_patch_prediction.py"}
    (tmp_path / "ours").mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / "ours" / name).write_text((tmp_path / "saved" / name).read_text())
    add_code(tmp_path / "ours")
    assert saved == {file.name for file in (tmp_path / "ours").glob("*.py")}
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text())["auto_map"] for name in ("ours", "saved"))
    assert theirs.items() <= ours.items()


def test_only_code_that_auto_map_reaches_is_pushed(folder_with_code, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folder_with_code, folder)
    code = {file.name for file in code_of(folder)}
    assert code == {file.name for file in folder.glob("*.py")}
    (folder / "inference.py").write_text("PASSWORD = 1")
    assert {file.name for file in code_of(folder)} == code
    change_json(folder / "config.json", auto_map={"AutoModel": "../outside.Model"})
    (tmp_path / "outside.py").touch()
    (folder / "preprocessor_config.json").unlink()
    assert code_of(folder) == set()


@pytest.mark.parametrize("has_hf_vit", [True, False])
def test_untrusted_code_never_runs(without_hf_vit, tmp_path, has_hf_vit):
    mark, folder = tmp_path / "it ran", save_tiny(tmp_path / "folder")
    for name in ("config.json", "preprocessor_config.json"):
        autos = ("AutoConfig", "AutoModel", "AutoModelForImageClassification", "AutoImageProcessor")
        change_json(folder / name, auto_map=dict.fromkeys(autos, "hostile.Model"))
    autos = {"AutoProcessor": "hostile.Model", "AutoImageProcessor": "hostile.Model"}
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": autos}))
    (folder / "hostile.py").write_text(textwrap.dedent(HOSTILE.format(mark=str(mark))))
    if has_hf_vit:
        model = hf_vit.HfViTForImageClassification.from_pretrained(folder)
        assert type(load_model(folder)) is type(model)
        Image.effect_noise((41, 33), 80).convert("RGB").save(tmp_path / "image.png")
        list(predict(folder, [tmp_path / "image.png"]))
    else:
        code = """
            from transformers import AutoConfig, AutoImageProcessor, AutoModel
            for auto in (AutoConfig, AutoImageProcessor, AutoModel):
                try:
                    auto.from_pretrained(sys.argv[1])
                except Exception as error:
                    print(type(error).__name__, error)
                else:
                    raise SystemExit("it loaded")
        """
        assert "trust_remote_code=True" in run_python(without_hf_vit, code, folder)
    assert not mark.exists()


def test_a_folder_of_another_package_gets_no_code(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="'vit'"):
        add_code(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
