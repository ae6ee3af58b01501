"""Convert the embedded JAX checkpoint, load it with the Auto classes, classify handwriting, fine-tune.

The checkpoint is a small ViT that `training/recipes/digits.yaml` trained on a random 80 % of scikit-learn's digits.
"""

import argparse
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from ..conversion import convert
from ..data.sources import load_digits
from ..files.progress import silence_progress_bars
from ..loading import save_folder
from .contact_sheet import draw_contact_sheet
from .finetuning import IMAGE_SIZE, finetune_at_higher_resolution


def main() -> None:
    """Run the demo; models, pictures and metrics are saved in `--output`."""
    parser = argparse.ArgumentParser(prog="python -m hf_vit.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder for models and pictures (default demo_output)"
    )
    output = parser.parse_args().output
    silence_progress_bars()

    folder = _convert_embedded_checkpoint(output / "digits")
    test = load_digits()["test"]
    images, labels = list(test["image"]), np.array(test["label"])
    predictions = _classify(folder, images)
    right = predictions == labels
    print(f"{right.sum()} of {len(labels)} held-out digits are right: accuracy {right.mean():.2%}")
    sheet = draw_contact_sheet(images, labels, predictions, output / "digits.png")
    print(f"contact sheet, wrong ones marked: {sheet}")
    print("fine-tuning at a higher resolution, through `accelerate launch` ...")
    before, after = finetune_at_higher_resolution(folder, output / "finetuned")
    print(f"at {IMAGE_SIZE} x {IMAGE_SIZE} pixels: accuracy {before:.2%} before fine-tuning, {after:.2%} after")
    print(f"learning curve: {output / 'finetuned' / 'after' / 'learning_curve.png'}")


def _convert_embedded_checkpoint(folder: Path) -> Path:
    with as_file(files("hf_vit.demo") / "digits.npz") as checkpoint:
        model, processor = convert(checkpoint, labels=[str(digit) for digit in range(10)])
    save_folder(folder, model, processor, overwrite=True)
    print(f"converted digits.npz (original JAX layout, {model.num_parameters():,} parameters) to {folder}")
    return folder


def _classify(folder: Path, images: list) -> np.ndarray:
    """Load a model with the Auto classes and return the predicted classes, (number of images,)."""
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=False).eval()
    processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    with torch.inference_mode():
        return model(**processor(images, return_tensors="pt")).logits.argmax(dim=-1).numpy()


if __name__ == "__main__":
    main()
