"""Accuracy of a small student with and without a teacher, over several seeds.

    python benchmarks/distillation.py MODEL DATASET [--seeds 5] [--epochs 60] [--output-dir FOLDER]

The teacher is MODEL, fine-tuned on DATASET (a folder with the splits train and test). The student has random weights
and 0.5 M parameters. Both arms have the same seeds, crops, mixup and steps. Prints one JSON object: the accuracy of
the last step for each seed, mean and standard deviation of each arm, and the gain in standard deviations of the larger.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

import hf_vit

STUDENT = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 384}
SIZE = 64
COMMON = {"eval_split": "test", "num_workers": 0, "report_to": "none", "eval_batch_size": 60, "image_size": SIZE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("dataset")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--output-dir", type=Path, default=Path(tempfile.mkdtemp()))
    arguments = parser.parse_args()
    teacher = arguments.output_dir / "teacher"
    taught = hf_vit.finetune(
        arguments.model, arguments.dataset, teacher, epochs=20, batch_size=60, learning_rate=0.01, **COMMON
    )
    run = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 0.1, "batch_size": 60}
    run |= {"mixup_alpha": 0.5, "crop_area": [0.2, 1], "epochs": arguments.epochs, "eval_every": 10**6, **COMMON}
    run |= {"config": {**STUDENT, "image_size": SIZE, "patch_size": 8}}
    accuracies = {"without": [], "with": []}
    for seed in range(arguments.seeds):
        for arm, own in (("without", {}), ("with", {"teacher": str(teacher), "teacher_temperature": 1})):
            output = arguments.output_dir / f"{arm}_{seed}"
            metrics = hf_vit.pretrain(arguments.dataset, output, seed=seed, **run, **own)
            accuracies[arm].append(metrics["accuracy"])
    means, deviations = ({arm: f(values) for arm, values in accuracies.items()} for f in (np.mean, _deviation))
    gain = (means["with"] - means["without"]) / max(deviations.values())
    results = {"teacher": taught["accuracy"], "accuracies": accuracies, "mean": means, "deviation": deviations}
    print(json.dumps({**results, "gain_in_deviations": gain}))


def _deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1))


if __name__ == "__main__":
    main()
