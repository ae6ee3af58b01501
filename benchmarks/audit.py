"""Measure the audit on planted faults: wrong labels, compared with cleanlab, and disguised duplicates.

    python benchmarks/audit.py MODEL DATASET [--split train] [--images 2000] [--faults labels duplicates]

Prints one JSON object per measurement. Twenty duplicates are planted: re-encoded, resized, mirrored, cropped to 70 to
90% of the area, or all of these. Duplicates of the dataset itself are counted first, and are not false positives.
"""

import argparse
import io
import json

import numpy as np
import torch
from PIL import Image, ImageOps

import hf_vit
from hf_vit.auditing.audit import find_label_errors, measure
from hf_vit.auditing.duplicates import find_near_duplicates
from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_split
from hf_vit.files.pictures import to_mode
from hf_vit.models.image_reading import load_image

PLANTED, SHARE = 20, 0.05


def jpeg(image, rng):
    content = io.BytesIO()
    image.save(content, "JPEG", quality=int(rng.integers(40, 90)))
    return Image.open(io.BytesIO(content.getvalue()))


def resize(image, rng):
    scale = rng.uniform(0.5, 1.5)
    return image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)


def crop(image, rng):
    share = rng.uniform(0.7, 0.9) ** 0.5
    width, height = (round(side * share) for side in image.size)
    left, top = rng.integers(0, image.width - width + 1), rng.integers(0, image.height - height + 1)
    return image.crop((left, top, left + width, top + height))


DISGUISES = [
    jpeg,
    resize,
    lambda image, rng: ImageOps.mirror(image),
    crop,
    lambda image, rng: jpeg(ImageOps.mirror(resize(crop(image, rng), rng)), rng),
]


def png(image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def measure_duplicates(model, images, features, seed):
    """Return the number of planted duplicates found, and of other pairs that are not duplicates of the dataset."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(images))[:PLANTED]
    copies = [DISGUISES[number % len(DISGUISES)](images[row], rng) for number, row in enumerate(rows)]
    pictures = torch.from_numpy(np.stack([measure(png(image)).picture for image in [*images, *copies]]))
    every = torch.cat([features, torch.as_tensor(hf_vit.embed(model, copies))])
    before = find_near_duplicates(features, pictures[: len(images)])
    found = find_near_duplicates(every, pictures)
    truth = {(int(row), len(images) + number) for number, row in enumerate(rows)}
    known = {first: {second for pair in before for second in pair if first in pair} for first in map(int, rows)}
    false = [
        pair
        for pair in found.keys() - truth - before.keys()
        if pair[1] < len(images) or pair[0] not in known[int(rows[pair[1] - len(images)])]
    ]
    return {"planted": PLANTED, "found": len(found.keys() & truth), "own": len(before), "false": len(false)}


def measure_labels(features, labels, seed):
    """Return precision and recall of ours and, if it is installed, of cleanlab with scikit-learn's probe."""
    rng, classes = np.random.default_rng(seed), int(labels.max()) + 1
    flipped = np.zeros(len(labels), bool)
    flipped[rng.permutation(len(labels))[: round(SHARE * len(labels))]] = True
    noisy = np.where(flipped, (labels + rng.integers(1, classes, len(labels))) % classes, labels)
    errors, _ = find_label_errors(features, torch.from_numpy(noisy), classes)
    found = {"ours": errors}
    try:
        from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import cross_val_predict
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        print("cleanlab or scikit-learn is not installed: no comparison")
    else:
        values = features.numpy()
        plain = LogisticRegression(max_iter=1000)
        for name, probe in (("cleanlab", plain), ("cleanlab, scaled", make_pipeline(StandardScaler(), plain))):
            chances = cross_val_predict(probe, values, noisy, cv=5, method="predict_proba")
            found[name] = np.flatnonzero(find_label_issues(noisy, chances, n_jobs=1))
    hits = {name: flipped[rows].sum() for name, rows in found.items()}
    return {
        name: {"precision": round(hits[name] / max(len(rows), 1), 3), "recall": round(hits[name] / flipped.sum(), 3)}
        for name, rows in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--split", default="train")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--faults", nargs="+", default=["labels", "duplicates"], choices=["labels", "duplicates"])
    options = parser.parse_args()
    split = open_split(load_split(options.dataset, options.split))
    rows = np.random.default_rng(0).permutation(len(split))[: options.images].tolist()
    files = [split.image(split.samples[row], row) for row in rows]
    images = [to_mode(load_image(file), "RGB") for file in files]
    features = torch.as_tensor(hf_vit.embed(options.model, images)).float()
    labels = split.class_numbers()[rows]
    for seed in range(options.seeds):
        for fault in options.faults:
            result = (
                measure_labels(features, labels, seed)
                if fault == "labels"
                else measure_duplicates(options.model, images, features, seed)
            )
            print(
                json.dumps({"dataset": options.dataset, "images": len(rows), "seed": seed, fault: result}), flush=True
            )


if __name__ == "__main__":
    main()
