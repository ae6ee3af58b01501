"""Convert the embedded JAX checkpoint, load it, classify handwriting, fine-tune.

The checkpoint is a small ViT that `training/recipes/digits.yaml` trained on a random 80% of scikit-learn's digits.
"""

import argparse
import io
from contextlib import redirect_stdout
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch

import hf_vit

from ..conversion import convert
from ..data.sources import load_digits
from ..files.messages import silence_progress_bars
from ..loading import save_folder
from .contact_sheet import draw_contact_sheet

_IMAGE_SIZE = 24  # of the fine-tuning, at a higher resolution as in the paper: the embedded model was trained at 16


def main() -> None:
    """Run the demo; models, pictures and metrics are saved in `--output`."""
    parser = argparse.ArgumentParser(prog="python -m hf_vit.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder for models and pictures (default demo_output)"
    )
    output = parser.parse_args().output
    silence_progress_bars()

    folder = output / "digits"
    with as_file(files("hf_vit.demo") / "digits.npz") as checkpoint:
        converted, processor = convert(checkpoint, labels=[str(digit) for digit in range(10)])
    save_folder(folder, converted, processor, overwrite=True)
    print(f"converted digits.npz (original JAX layout, {converted.num_parameters():,} parameters) to {folder}")

    model, processor = hf_vit.load(folder)
    test = load_digits()["test"]
    images, labels = list(test["image"]), np.array(test["label"])
    with torch.inference_mode():
        predictions = model(**processor(images, return_tensors="pt")).logits.argmax(dim=-1).numpy()
    right = predictions == labels
    print(f"{right.sum()} of {len(labels)} held-out digits are right: accuracy {right.mean():.2%}")
    sheet = draw_contact_sheet(images, labels, predictions, output / "digits.png")
    print(f"contact sheet with the misclassified digits first: {sheet}")

    print("fine-tuning at a higher resolution ...")
    finetuned = output / "finetuned"
    with redirect_stdout(io.StringIO()):
        before = hf_vit.evaluate(folder, "digits", output_dir=finetuned / "before", image_size=_IMAGE_SIZE)
        after = hf_vit.finetune(
            folder,
            "digits",
            finetuned / "after",
            eval_split="test",
            image_size=_IMAGE_SIZE,
            epochs=10,
            batch_size=64,
            learning_rate=0.03,
            warmup_steps=20,
            crop_area=[0.7, 1.0],
            flip=False,
            num_workers=0,
            report_to="none",
            overwrite=True,
        )
    print(
        f"at {_IMAGE_SIZE} x {_IMAGE_SIZE} pixels: accuracy {before['accuracy']:.2%} before fine-tuning, "
        f"{after['accuracy']:.2%} after"
    )
    print(f"learning curve: {finetuned / 'after' / 'learning_curve.png'}")


if __name__ == "__main__":
    main()
