"""Training at native aspect ratios: a batch has images of many shapes, as patches, padded to the longest sequence.

NaViT (arXiv 2307.06304) trains in this way, and drops a share of each image's patches. NaViT packs several images into
a sequence, with masks. Here a sequence has one image, as in SigLIP 2 NaFlex (arXiv 2502.14786), with at most as many
patches as an image of the model's size. Images are bucketed by their number of patches to reduce padding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import Sampler

from ..models.configuration_hf_vit import HfViTConfig, as_pair
from ..models.flexible_sizes import refuse_mixed_sizes
from ..models.image_reading import ImageReadingError, load_image, read_size
from ..models.image_resizing import fit_grid
from .augmentation import Box, TrainTransform, sample_generator, sample_inception_box
from .batches import Shares
from .samples import Split, TrainSamples, collate, load_batches

if TYPE_CHECKING:
    from ..training.settings import TrainingSettings
from .shards import Shards

_WINDOW = 8  # optimiser steps whose images are bucketed together
_RATIOS = 0.75, 1.33  # range of a crop's aspect ratio divided by the image's


def check_native(
    settings: "TrainingSettings", accelerator: Accelerator, model: Any, processor: Any, split: Split
) -> None:
    """Raise ValueError if preset is "native" but model, data or device do not support it.

    If only the model's own processor is native, a message says that training differs from the evaluation.
    """
    if settings.preset != "native":
        if getattr(processor, "preset", None) == "native":
            accelerator.print("The model is evaluated at native aspect ratios; to train it so, set --preset native.")
        return
    if not isinstance(model.config, HfViTConfig):
        raise ValueError(
            f"preset is native, but {type(model).__name__} takes images of one size (expected a ViT of hf_vit)"
        )
    refuse_mixed_sizes(model.config)
    if isinstance(split.samples, Shards):
        raise ValueError("preset is native, which does not work with shards: it needs all image sizes in advance")
    if accelerator.device.type == "xla":
        raise ValueError("preset is native, which does not work on XLA: it would compile every shape of a batch")


class NativeSamples(TrainSamples):
    """Patches of augmented images at their aspect ratios, by position in the endless sequence.

    Args:
        transform: the augmentation; its `size` is not used, as the number of patches sets the size.
        patch_size: (height, width) in pixels.
        max_num_patches: largest number of patches of an image.
        token_drop: share of an image's patches to drop.
    """

    def __init__(
        self,
        split: Split,
        transform: TrainTransform,
        seed: int,
        class_sampling: str,
        patch_size: tuple[int, int],
        max_num_patches: int,
        token_drop: float = 0.0,
    ):
        super().__init__(split, transform, seed, class_sampling)
        self.patch_size, self.max_num_patches, self.token_drop = patch_size, max_num_patches, token_drop
        self._sizes: dict[int, tuple[int, int]] = {}  # row -> (height, width), a cache

    def count_patches(self, position: int) -> int:
        """Number of patches of the image at a position, from its size alone; 0 if the size cannot be read."""
        visit, row = self.find(*divmod(position, len(self.split)))
        if row not in self._sizes:
            try:
                self._sizes[row] = read_size(self.split.image(self.split.samples[row], row))
            except ImageReadingError:  # is logged when its pixels are needed
                self._sizes[row] = 0, 0
        height, width = self._sizes[row]
        return int(np.prod(self._cut(height, width, sample_generator(self.seed, visit, row))[1])) if height else 0

    def _cut(self, height: int, width: int, rng: np.random.Generator) -> tuple[Box, tuple[int, int]]:
        """Draw the crop of an image of this size, and return it with the (rows, columns) of its patches."""
        box = Box(0, 0, height, width)
        if self.transform.crop == "inception":
            ratios = (_RATIOS[0] * width / height, _RATIOS[1] * width / height)
            box = sample_inception_box(height, width, self.transform.crop_area, ratios, rng=rng)
        return box, fit_grid(box.height, box.width, self.patch_size, self.max_num_patches)

    def augment(self, image: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
        decoded = load_image(image, name=image["path"])
        box, (rows, columns) = self._cut(decoded.height, decoded.width, rng)
        height, width = self.patch_size
        pixels = replace(self.transform, size=(rows * height, columns * width))(decoded, rng, box)
        patches = pixels.reshape(rows, height, columns, width, -1).swapaxes(1, 2).reshape(rows * columns, -1)
        entries = {"image": patches, "spatial_shapes": np.array([rows, columns])}
        if self.token_drop:
            number = max(round(len(patches) * (1 - self.token_drop)), 1)
            entries["kept_patches"] = np.sort(rng.permutation(len(patches))[:number])
        return entries


class BucketedBatches(Sampler[list[int]]):
    """Batch sampler like `StepBatches`, but with the images of 8 optimiser steps bucketed by number of patches.

    The images are sorted, cut into steps, and the order of the steps is drawn at random. Within a step, micro-batches
    are cut from the sorted images. The samples of a step depend on its number, not on the number of processes.
    """

    def __init__(self, samples: NativeSamples, shares: Shares, steps: range):
        self.samples, self.shares, self.steps = samples, shares, steps
        self._window: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            positions = self.positions(step)
            for forward in range(self.shares.accumulation):
                begin = self.shares.micro_batch(forward) * self.shares.per_device
                yield positions[begin : begin + self.shares.per_device]

    def __len__(self) -> int:
        return len(self.steps) * self.shares.accumulation

    def positions(self, step: int) -> list[int]:
        """Return the positions of an optimiser step, over all processes."""
        number, place = divmod(step, _WINDOW)
        if self._window[0] != number:
            first = number * _WINDOW * self.shares.batch_size
            positions = np.arange(first, first + _WINDOW * self.shares.batch_size)
            counts = [self.samples.count_patches(int(position)) for position in positions]
            steps = positions[np.argsort(counts, kind="stable")].reshape(_WINDOW, -1)
            drawn = np.random.default_rng((self.samples.seed, number)).permutation(_WINDOW)
            self._window = (number, steps[drawn])
        return self._window[1][place].tolist()


def collate_patches(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples into "image" (batch, most patches, values) uint8, its mask, and the other entries.

    "image" is padded with 0 and "kept_patches" with -1.
    """
    padded = {"image": 0, "kept_patches": -1}
    batch = collate([{name: value for name, value in sample.items() if name not in padded} for sample in samples])
    for name, filler in padded.items():
        if name in samples[0]:
            rows = [torch.from_numpy(sample[name]) for sample in samples]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)
    counts = torch.tensor([len(sample["image"]) for sample in samples])
    batch["pixel_attention_mask"] = (torch.arange(batch["image"].shape[1]) < counts[:, None]).int()
    return batch


def native_loader(
    settings: "TrainingSettings", split: Split, transform: TrainTransform, processor: Any, shares: Shares, steps: range
) -> Iterable[dict[str, torch.Tensor]]:
    """Return the training batches of this process as patches, for the steps in `steps`, one per forward.

    Args:
        processor: the image processor of the evaluation; it sets patch size and number of patches.
    """
    patches = as_pair(processor.patch_size), processor.max_num_patches, settings.token_drop
    samples = NativeSamples(split, transform, settings.seed, settings.class_sampling, *patches)
    return load_batches(samples, BucketedBatches(samples, shares, steps), collate_patches, settings.num_workers)
