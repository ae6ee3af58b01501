"""Training on images of many shapes, compared with forwards of single images, which have goldens (NaFlex)."""

import json
import math
import re
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.data.augmentation import TrainTransform
from hf_vit.data.native_resolution import NativeDataset, NativeTransform, collate_patches
from hf_vit.data.samplers import BatchLayout, BucketBatchSampler
from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_split
from hf_vit.files.pictures import read_size
from hf_vit.inference.predictions import model_inputs
from hf_vit.models.flexible_sizes import unpatchify
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.training.objectives import Normalizer
from hf_vit.training.trainer import Trainer

from ..commands import evaluate, finetune
from ..processes import arguments, weights
from ..tiny_models import TINY, VARIANTS, save_tiny, tiny

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "blank_figures")

PATCH, MOST = TINY["patch_size"], 30  # pixels of a patch; patches of an image
WHOLE = TrainTransform((1, 1), "none", flip=False)


@pytest.fixture(scope="module")
def strips(tmp_path_factory):
    """Two classes by color, of 23 and 17 images of many shapes; two lie on their side, and one more cannot be read."""
    root, rng = tmp_path_factory.mktemp("strips"), np.random.default_rng(0)
    for name, color, count in (("green", (40, 180, 60), 23), ("red", (190, 40, 50), 17)):
        (root / name).mkdir()
        for number in range(count):
            size = (int(rng.integers(8, 60)), int(rng.integers(8, 60)), 3)
            pixels = np.clip(np.array(color) + rng.integers(-60, 60, size), 0, 255).astype(np.uint8)
            exif = Image.Exif()
            exif[0x0112] = 6 if number == 1 else 1
            Image.fromarray(pixels).save(root / name / f"{number}.png", exif=exif)
    (root / "red" / "broken.png").write_bytes(b"this is no picture")
    return root


def samples_of(folder, transform=WHOLE, token_drop=0.0) -> NativeDataset:
    own = {"patch_size": PATCH, "max_num_patches": MOST, "token_drop": token_drop}
    return NativeDataset(open_split(load_split(str(folder), "train")), NativeTransform(**vars(transform), **own), 3)


@pytest.mark.parametrize(
    ("variant", "autocast"), [*((name, False) for name in ("cls", "mean", "map", "sincos", "learned2d")), ("cls", True)]
)
def test_logits_do_not_depend_on_the_batch(strips, variant, autocast):
    model, samples = tiny(**VARIANTS[variant]), samples_of(strips)
    batch = collate_patches([samples[position] for position in range(9)])
    assert len({*map(tuple, batch["spatial_shapes"].tolist())}) > 3
    processor = HfViTImageProcessor(image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.2, 0.1])
    normalize = Normalizer(processor, torch.device("cpu"))
    tolerance = 0.05 if autocast else 1e-5
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        together = model(**{**model_inputs(batch), "pixel_values": normalize(batch["image"])}).logits
        for index, grid in enumerate(batch["spatial_shapes"].tolist()):
            patches = batch["image"][index : index + 1, : math.prod(grid)]
            image = unpatchify(patches, tuple(grid), PATCH).permute(0, 2, 3, 1)
            alone = model(normalize(image)).logits
            torch.testing.assert_close(together[index], alone[0], rtol=tolerance, atol=tolerance)


def test_without_augmentation_training_sees_the_pixels_of_evaluation(strips):
    """Up to rounding: the processor resizes by Pillow's bilinear, as a crop with antialias does."""
    samples = samples_of(strips, TrainTransform((1, 1), "none", flip=False, antialias=True))
    processor = HfViTImageProcessor("native", patch_size=PATCH, max_num_patches=MOST, padding="longest")
    for position in range(9):
        row = samples.sampler.draw(0, position).row
        picture = samples.split.samples[row]["image"]
        if "broken" in picture["path"]:
            continue
        expected = processor(picture["path"], return_tensors="pt")
        ours = samples[position]
        assert ours["spatial_shapes"].tolist() == expected.spatial_shapes[0].tolist()
        assert np.abs(ours["image"] / 127.5 - 1 - expected.pixel_values[0].numpy()).max() < 1e-6


def test_crops_have_nearly_the_images_aspect_ratio(strips):
    transform = TrainTransform((1, 1), "inception", (0.3, 1.0))
    samples, ratios = samples_of(strips, transform), []
    for position in range(80):
        row = samples.sampler.draw(*divmod(position, len(samples.split))).row
        rows, columns = samples[position]["spatial_shapes"]
        assert samples.count_patches(position) in (0, rows * columns)
        picture = samples.split.samples[row]["image"]["path"]
        height, width = read_size(picture) if "broken" not in picture else (0, 0)
        if min(height, width) > 20:
            ratios.append((columns * PATCH[1] / (rows * PATCH[0])) / (width / height))
    assert 0.9 < np.exp(np.mean(np.log(ratios))) < 1.1
    assert min(ratios) > 0.55  # of 0.75, and whole patches
    assert max(ratios) < 1.8


def test_buckets_are_complete_and_independent_of_processes_and_first_step(strips):
    samples = samples_of(strips)
    whole = buckets(samples, BatchLayout(10, 10), range(16))
    steps = list(whole)
    assert [sorted(chain(*steps[n : n + 8])) for n in (0, 8)] == [list(range(80)), list(range(80, 160))]
    assert list(buckets(samples, BatchLayout(10, 10), range(5, 16))) == steps[5:]
    halves = [list(buckets(samples, BatchLayout(10, 5, 2, rank), range(16))) for rank in range(2)]
    assert [left + right for left, right in zip(*halves, strict=True)] == steps
    accumulated = list(buckets(samples, BatchLayout(10, 5), range(16)))
    assert [left + right for left, right in zip(accumulated[::2], accumulated[1::2], strict=True)] == steps
    assert padding(samples, steps) < 0.5 * padding(samples, np.arange(160).reshape(16, 10).tolist())


def buckets(samples, layout, steps):
    return BucketBatchSampler(layout, steps, samples.count_patches, samples.seed)


def padding(samples, steps) -> int:
    counts = [[samples.count_patches(position) for position in step] for step in steps]
    return sum(max(step) * len(step) - sum(step) for step in counts)


def test_dropped_patches_have_no_effect_and_their_share_is_exact(strips):
    """The forward equals one over all patches with the dropped ones masked."""
    model, samples = tiny(pooling="mean", use_cls_token=True), samples_of(strips, token_drop=0.4)
    batch = collate_patches([samples[position] for position in range(9)])
    counts = batch["spatial_shapes"].prod(dim=1)
    kept = batch["keep"]
    assert (kept >= 0).sum(dim=1).tolist() == [round(0.6 * count) for count in counts.tolist()]
    mask = torch.zeros(9, batch["image"].shape[1] + 1).scatter_(1, kept + 1, 1)[:, 1:]
    assert all(len(set(row[row >= 0].tolist())) == (row >= 0).sum() for row in kept)
    with torch.no_grad():
        inputs = {**model_inputs(batch), "pixel_values": batch["image"] / 127.5 - 1}
        dropped = model(**inputs).logits
        del inputs["keep"]
        masked = model(**{**inputs, "pixel_attention_mask": mask}).logits
        assert not torch.allclose(model(**inputs).logits, masked, atol=1e-3)
    torch.testing.assert_close(dropped, masked, rtol=1e-5, atol=1e-5)
    again = samples_of(strips, token_drop=0.4)
    assert again[4]["keep"].tolist() == samples[4]["keep"].tolist()
    assert again[4]["keep"].tolist() != again[4 + 41]["keep"].tolist()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("pretrained") / "tiny")


def finetune_strips(strips, pretrained, output, **changes) -> dict:
    settings = {"model": pretrained, "dataset": strips, "preset": "native", "output_dir": output, "steps": 12}
    settings |= {"batch_size": 8, "learning_rate": 0.03, "crop_area": "0.5,1", "num_workers": 0, "report_to": "none"}
    settings |= {"token_drop": 0.3, "dropout": 0.1, "save_every": 4, "eval_every": 50, "eval_split": "train[:30]"}
    return finetune(arguments(**{**settings, **changes}))


def test_killed_and_resumed_is_bit_identical(strips, pretrained, tmp_path, monkeypatch, capsys):
    metrics = finetune_strips(strips, pretrained, tmp_path / "whole")
    assert metrics["accuracy"] == 1.0
    assert re.search(r"\b30\b", capsys.readouterr().out)
    step = Trainer.train_step

    def die(run, number):
        if number == 6:
            run.checkpoints.wait()  # that of step 4 is being written
            raise KeyboardInterrupt
        return step(run, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", die)
        with pytest.raises(KeyboardInterrupt):
            finetune_strips(strips, pretrained, tmp_path / "killed")
    finetune_strips(strips, pretrained, tmp_path / "killed", resume="true")
    assert re.search(r"\b4\b.*\b12\b", capsys.readouterr().out)
    torch.testing.assert_close(weights(tmp_path / "killed"), weights(tmp_path / "whole"), rtol=0, atol=0)
    again = evaluate(arguments(model=tmp_path / "whole", dataset=strips, split="train[:30]", num_workers=0))
    assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-5)  # an evaluation drops no patches
    saved = json.loads((tmp_path / "whole" / "preprocessor_config.json").read_text())
    assert (saved["preset"], saved["max_num_patches"]) == ("native", 30)


def test_shards_and_a_model_whose_layers_need_one_grid_are_refused(strips, pretrained, tmp_path):
    load_split(str(strips), "train").to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(ValueError, match="shards"):
        finetune_strips(tmp_path / "data", pretrained, tmp_path / "out", streaming="true", eval_split="train")
    model = save_tiny(tmp_path / "axial", **VARIANTS["axial"])
    with pytest.raises(ValueError, match="axial"):
        finetune_strips(strips, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
