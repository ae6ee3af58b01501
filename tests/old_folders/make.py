"""Makes the folders and files here, with the hf_vit of commit e7c2c6c1 (version 0.1.0) and never with a newer one.

    cd CHECKOUT_OF_e7c2c6c1 && OMP_NUM_THREADS=1 PYTHONPATH=. python path/to/make.py

Today's code reads them in test_old_folders.py.
"""

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

import hf_vit
from hf_vit.cli import main
from tests.paths import PEERS
from tests.tiny_models import save_tiny

HERE = Path(__file__).parent
MODEL = {"hidden_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 22}
MODEL |= {"image_size": 8, "patch_size": 4}
RUN = {"eval_split": "test[:20]", "batch_size": 8, "steps": 5, "warmup_steps": 1}
RUN |= {"learning_rate": 0.05, "eval_every": 3, "save_every": 3, "num_workers": 0, "report_to": "none"}
HEADS = ["--set", "num_attention_heads=2"]
FINETUNE = {**RUN, "eval_split": "train", "steps": 2, "flip": False, "crop_area": [0.9, 1.0]}


def write_images(folder: Path) -> None:
    """Write 24 images of two classes; each pixel is repeated, so that the files are small."""
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(12):
            pixels = generator.integers(0, 255, (5, 9, 3), np.uint8).repeat(4, axis=0).repeat(4, axis=1)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def command(*line: object) -> None:
    assert main([str(word) for word in line]) == 0, line


def logits(folder: Path) -> np.ndarray:
    """(2, classes), for noise of the size of the model"""
    model, _ = hf_vit.load(folder)
    pixel_values = torch.randn(
        2, 3, *np.broadcast_to(model.config.image_size, 2), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        return model(pixel_values).logits.numpy()


def save_adapter(base: Path, folder: Path) -> None:
    """Save a PEFT adapter that names its base by a relative path."""
    model, _ = hf_vit.load(base)
    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    adapted = get_peft_model(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.peft_config["default"].base_model_name_or_path = base.name
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()  # PEFT's template


def make_programs(work: Path) -> None:
    """Write a quantized folder, and a folder for browsers whose runtime has no content."""
    save_tiny(work / "small", num_hidden_layers=1)
    command("quantize", work / "small", work / "quantized", "--calibrate", work / "images", "--min-agreement", 0)
    runtime = work / "runtime" / "dist"
    runtime.mkdir(parents=True)
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (runtime / name).write_text(name)
    command("export", work / "small", work / "web", "--to", "web", "--runtime", runtime.parent)
    for name in ("small", "runtime"):
        shutil.rmtree(work / name)


def make_results(work: Path) -> None:
    """Write issues of an audit, and an evaluation with the features that it keeps."""
    data = ["--dataset", work / "images", "--num-workers", 0]
    command("audit", work / "saved", *data, "--output-dir", work / "audited")
    splits = ["--train-split", "train", "--split", "train"]
    command("evaluate", work / "saved", *data, *splits, "--protocol", "knn", "--output-dir", work / "evaluated")


def make(work: Path) -> None:
    write_images(work / "images")
    command("convert", PEERS / "timm_plain.safetensors", work / "converted", *HEADS, "--position-grid", "5x9")
    save_tiny(work / "saved")
    model, processor = hf_vit.load(work / "saved")
    shutil.rmtree(work / "saved")
    model.save_pretrained(work / "saved")
    processor.save_pretrained(work / "saved")
    names = {"num_labels": 2, "id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    save_tiny(work / "base", **names)
    hf_vit.pretrain(
        "digits", work / "run", **{key: value for key, value in RUN.items() if key != "dataset"}, config=MODEL
    )
    images = {key: value for key, value in FINETUNE.items() if key != "dataset"}
    hf_vit.finetune(work / "base", work / "images", work / "lora", lora_rank=2, **images)
    command("calibrate", work / "base", work / "calibrated", "--dataset", work / "images", "--split", "train")
    for suffix in ("npz", "parquet"):
        command("embed", work / "saved", work / "images", "--output", work / f"features.{suffix}")
    command("shard", work / "images", work / "shards", "--images", 24)
    command("export", work / "saved", work / "deployed", "--to", "onnx")
    save_adapter(work / "saved", work / "adapter")
    make_programs(work)
    make_results(work)
    os.chdir(work)  # the adapter's base is there
    models = ("converted", "saved", "run", "run/best", "calibrated", "lora", "adapter", "quantized")
    expected = {name: logits(work / name) for name in models}
    for pattern in ("*.html", "*.png", "predictions.csv"):
        for path in work.rglob(pattern):
            if work / "images" not in path.parents:
                path.unlink()
    shutil.rmtree(work / "run" / "checkpoints" / "step_00000005", ignore_errors=True)  # to resume from step 3
    for name in ("lora/checkpoints", "lora/best"):
        shutil.rmtree(work / name)
    for name in ("run", "run/best", "lora"):
        (work / name / "card_data.json").unlink(missing_ok=True)
    shutil.rmtree(work / "base")  # as the calibrated folder
    np.savez_compressed(work / "expected.npz", **{name.replace("/", "_"): values for name, values in expected.items()})


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        make(Path(name))
        for path in Path(name).iterdir():
            target = HERE / path.name
            shutil.rmtree(target, ignore_errors=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
        print(json.dumps(sorted(path.name for path in HERE.iterdir())))
