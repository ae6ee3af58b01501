"""What the image processor of a folder for transformers (`--for transformers`) costs, for each preset.

`python benchmarks/transformers_preprocessing.py MODEL IMAGES` prints, for each preset, by how many levels of 255 its
pixels differ from the exact ones, and how many predictions change. MODEL is a classifier, IMAGES a folder.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

import hf_vit
from hf_vit.conversion.transformers import nearest_processor
from hf_vit.models.image_processing_hf_vit import PRESETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("images", type=Path)
    options = parser.parse_args()
    files = sorted(path for path in options.images.rglob("*") if path.is_file())
    images = [Image.open(path).convert("RGB") for path in files]
    print(f"| preset | mean of 255 levels | most | predictions that change, of {len(images)} |")
    print("| --- | ---: | ---: | ---: |")
    for preset in PRESETS:
        if preset == "native":  # has no counterpart
            continue
        model, processor = hf_vit.load(options.model, preset=preset)
        settings = nearest_processor(processor.settings())
        # of Pillow, as without torchvision
        nearest = getattr(transformers, f"{settings['image_processor_type']}Pil").from_dict(settings)
        levels = np.reshape(processor.image_std, (-1, 1, 1)) / processor.rescale_factor  # of a difference of 1
        means, most, changed = [], 0.0, 0
        for image in images:
            pair = [np.asarray(one(image).pixel_values[0], dtype=np.float32) for one in (processor, nearest)]
            differences = np.abs(pair[0] - pair[1]) * levels
            means.append(differences.mean())
            most = max(most, differences.max())
            with torch.no_grad():
                first, second = model(torch.from_numpy(np.stack(pair))).logits.argmax(-1)
            changed += int(first != second)
        print(f"| `{preset}` | {np.mean(means):.2f} | {most:.0f} | {changed} |", flush=True)


if __name__ == "__main__":
    main()
