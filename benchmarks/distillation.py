"""Accuracy of a student with and without a teacher, over several seeds.

    python benchmarks/distillation.py MODEL TEACHER DATASET [--image-size 32] [--epochs 15] [--seeds 5]

MODEL is fine-tuned on DATASET (a folder with the splits train and test) at `--image-size`, with the labels and with the
probabilities of TEACHER, a classifier of the same classes. Both arms have the same seeds, crops and steps. Prints one
JSON object: the accuracy of the last step for each seed, mean and standard deviation of each arm, and the gain in
standard deviations of the larger.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

import hf_vit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("teacher")
    parser.add_argument("dataset")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    run = {"image_size": arguments.image_size, "epochs": arguments.epochs, "batch_size": 60, "learning_rate": 0.03}
    run |= {"crop_area": [0.5, 1], "eval_split": "test", "eval_every": 10**6, "num_workers": 0, "report_to": "none"}
    accuracies = {"without": [], "with": []}
    for seed in range(arguments.seeds):
        for arm, own in (("without", {}), ("with", {"teacher": arguments.teacher, "teacher_temperature": 2})):
            output = Path(tempfile.mkdtemp()) / arm
            metrics = hf_vit.finetune(arguments.model, arguments.dataset, output, seed=seed, **run, **own)
            accuracies[arm].append(metrics["accuracy"])
    means, deviations = ({arm: f(values) for arm, values in accuracies.items()} for f in (np.mean, _deviation))
    gain = (means["with"] - means["without"]) / max(deviations.values())
    results = {"accuracies": accuracies, "mean": means, "deviation": deviations, "gain_in_deviations": gain}
    print(json.dumps(results))


def _deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1))


if __name__ == "__main__":
    main()
