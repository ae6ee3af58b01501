"""Speed of a whole training loop, from JPEG files to optimizer step, compared with transformers' Trainer and timm.

    python benchmarks/training.py --images FOLDER [--variants Ti/16 S/16 B/16] [--rounds 3]

FOLDER holds train/<class>/*.jpg. Each library trains the same architecture at 224 pixels on the same files with random
crops and flips, and SGD with momentum and clipping. Precision, batch size, threads and number of workers are the same.
The libraries take turns, each in a separate process; the result is the median over rounds. A library that is not
installed is skipped.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from common import Failed, peak_mib, run_apart, silence_torchvision

_SIDES = ("hf_vit", "transformers", "timm")
SIZES = {  # hidden size, heads; 12 layers each
    "Ti/16": (192, 3),
    "S/16": (384, 6),
    "B/16": (768, 12),
}
_MEAN = _STD = (0.5, 0.5, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=["Ti/16", "S/16", "B/16"], choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a round, after two steps of warm-up")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--side", choices=_SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        silence_torchvision()
        os.environ["ACCELERATE_USE_CPU"] = "true"
        print(json.dumps(globals()[f"_train_with_{options.side}"](options)))
        return
    for variant in options.variants:
        compare(options, variant)


def compare(options: argparse.Namespace, variant: str) -> None:
    """Run the contestants in turn; print a line for each."""
    results: dict[str, list[dict]] = {side: [] for side in _SIDES}
    for _ in range(options.rounds):
        for side in _SIDES:
            if (result := _run_side(options, variant, side)) is not None:
                results[side].append(result)
    for side, rounds in results.items():
        if rounds:
            speeds = sorted(options.batch_size / result["seconds_per_step"] for result in rounds)
            cpu = statistics.median(result["cpu_seconds_per_step"] for result in rounds)
            memory = max(result["peak_mib"] for result in rounds)
            print(
                f"{variant:6} {side:13} {statistics.median(speeds):7.2f} images/s "
                f"({speeds[0]:.2f} to {speeds[-1]:.2f}), {cpu:6.2f} CPU seconds a step, {memory:6.0f} MiB"
            )


def _run_side(options: argparse.Namespace, variant: str, side: str) -> dict | None:
    try:
        return run_apart(__file__, *sys.argv[1:], "--variants", variant, "--side", side)
    except Failed as error:
        print(f"{variant:6} {side:13} skipped: {error}")
        return None


class _Clock:
    """Clock of wall time per step and CPU time of the training process, after two warm-up steps."""

    def __init__(self, options: argparse.Namespace):
        self.steps = options.steps
        self.ticks: list[tuple[float, float]] = []

    def _tick(self):
        self.ticks.append((time.perf_counter(), time.process_time()))

    def result(self) -> dict[str, float]:
        ticks = self.ticks[1 : self.steps + 2]
        wall, cpu = (ticks[-1][kind] - ticks[0][kind] for kind in (0, 1))
        speeds = {"seconds_per_step": wall / self.steps, "cpu_seconds_per_step": cpu / self.steps}
        return {**speeds, "peak_mib": peak_mib()}


def _train_with_hf_vit(options: argparse.Namespace) -> dict:

    from hf_vit.data.sources import load_split
    from hf_vit.data.splits import open_split
    from hf_vit.models.configuration_hf_vit import HfViTConfig
    from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
    from hf_vit.models.modeling_hf_vit_variants import HfViTForImageClassification
    from hf_vit.settings.fields import FinetuneSettings
    from hf_vit.settings.options import parse_settings
    from hf_vit.training.launch import keep_freed_memory, start_accelerator
    from hf_vit.training.trainer import Trainer

    split = open_split(load_split(str(options.images), "train"))
    with tempfile.TemporaryDirectory() as output:
        config = HfViTConfig.from_variant(options.variants[0], num_labels=split.num_labels)
        model, processor = HfViTForImageClassification(config), HfViTImageProcessor()
        model.save_pretrained(f"{output}/start")
        line = (
            f"--model {output}/start --dataset {options.images} --output_dir {output}/run --steps {options.steps + 2} "
            f"--batch_size {options.batch_size} --mixed_precision {options.mixed_precision} --report_to none"
        )
        settings = parse_settings(FinetuneSettings, line.split())
        keep_freed_memory()  # as the scripts do
        trainer = Trainer(settings, start_accelerator(settings), model, processor, split)
        trainer.start()
        clock = _Clock(options)
        with closing(trainer.console):
            for step in range(options.steps + 2):
                trainer.train_step(step)
                clock._tick()
        return clock.result()


def _train_with_transformers(options: argparse.Namespace) -> dict:
    import datasets
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

    hidden_size, heads = SIZES[options.variants[0]]
    data = datasets.load_dataset("imagefolder", data_dir=str(options.images), split="train")
    transform = _usual_transform()
    data.set_transform(
        lambda rows: {
            "pixel_values": [transform(image.convert("RGB")) for image in rows["image"]],
            "labels": rows["label"],
        }
    )
    config = ViTConfig(
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=4 * hidden_size,
    )
    config.num_labels = data.features["label"].num_classes
    clock = _Clock(options)

    class Tick(TrainerCallback):
        def on_step_end(self, *arguments, **keywords):
            clock._tick()

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=options.batch_size,
            max_steps=options.steps + 2,
            learning_rate=0.01,
            optim="sgd",
            optim_args="momentum=0.9",
            lr_scheduler_type="cosine",
            max_grad_norm=1.0,
            dataloader_num_workers=options.num_workers,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=options.mixed_precision == "bf16",
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        Trainer(ViTForImageClassification(config), arguments, train_dataset=data, callbacks=[Tick()]).train()
    return clock.result()


def _usual_transform():
    """Return torchvision's transform, or the same with Pillow if torchvision cannot be imported."""
    try:
        from torchvision import transforms  # pyright: ignore[reportMissingImports] - a peer

        return transforms.Compose(
            [
                transforms.RandomResizedCrop(224, scale=(0.05, 1.0)),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(_MEAN, _STD),
            ]
        )
    except (ImportError, RuntimeError):
        return _pillow_transform


def _pillow_transform(image):
    import random

    import numpy as np
    import torch
    from PIL import Image

    area = image.width * image.height * random.uniform(0.05, 1.0)
    ratio = random.uniform(3 / 4, 4 / 3)
    width, height = (min(int((area * r) ** 0.5), side) for r, side in ((ratio, image.width), (1 / ratio, image.height)))
    left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
    image = image.resize((224, 224), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255).sub_(0.5).div_(0.5)


def _train_with_timm(options: argparse.Namespace) -> dict:
    import timm  # pyright: ignore[reportMissingImports] - a peer
    import timm.data  # pyright: ignore[reportMissingImports] - a peer
    import timm.optim  # pyright: ignore[reportMissingImports] - a peer
    import torch

    hidden_size, heads = SIZES[options.variants[0]]
    data = timm.data.create_dataset("", root=str(options.images / "train"))
    classes = len(list((options.images / "train").iterdir()))
    model = timm.create_model(
        "vit_base_patch16_224", embed_dim=hidden_size, num_heads=heads, num_classes=classes
    ).train()
    loader = timm.data.create_loader(
        data,
        (3, 224, 224),
        options.batch_size,
        is_training=True,
        use_prefetcher=False,
        scale=(0.05, 1.0),
        color_jitter=0,
        interpolation="bilinear",
        mean=_MEAN,
        std=_STD,
        num_workers=options.num_workers,
        pin_memory=False,
    )
    optimizer = timm.optim.create_optimizer_v2(model, "momentum", lr=0.01, weight_decay=0, momentum=0.9)
    clock = _Clock(options)
    while len(clock.ticks) < options.steps + 2:
        for images, labels in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.mixed_precision == "bf16"):
                loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
            optimizer.zero_grad()
            loss.backward()
            timm.utils.dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            clock._tick()
            if len(clock.ticks) == options.steps + 2:
                break
    return clock.result()


if __name__ == "__main__":
    main()
