"""Training at native aspect ratios: a batch has images of different sizes, as patches, padded to the longest sequence.

NaViT (arXiv 2307.06304) trains in this way, and drops a share of each image's patches. NaViT packs several images into
a sequence, with masks. Here a sequence has one image, as in SigLIP 2 NaFlex (arXiv 2502.14786), with at most as many
patches as an image of the model's size. Images are bucketed by their number of patches to reduce padding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..files.pictures import read_size
from ..models.image_reading import ImageReadingError
from ..models.image_resizing import fit_grid
from .augmentation import Box, Crop, TrainTransform, sample_generator, sample_inception_box
from .loaders import TrainDataset, collate_fn
from .splits import Split

_RATIOS = 0.75, 1.33  # range of a crop's aspect ratio divided by the image's


@dataclass(frozen=True)
class NativeTransform(TrainTransform):
    """Training augmentation: an image -> patches at its aspect ratio; their number replaces `size`.

    Args:
        patch_size: (height, width) in pixels.
        max_num_patches: largest number of patches of an image.
        token_drop: share of an image's patches to drop.
    """

    patch_size: tuple[int, int] = (16, 16)
    max_num_patches: int = 196
    token_drop: float = 0.0

    def draw_crop(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        box = Box(0, 0, height, width)
        if self.crop == "inception":
            ratios = (_RATIOS[0] * width / height, _RATIOS[1] * width / height)
            box = sample_inception_box(height, width, self.crop_area, ratios, rng=rng)
        rows, columns = fit_grid(box.height, box.width, self.patch_size, self.max_num_patches)
        size = rows * self.patch_size[0], columns * self.patch_size[1]
        return Crop(box, size, Box(0, 0, *size))

    def sample(self, image: Image.Image, rng: np.random.Generator, crop: Crop | None = None) -> dict[str, np.ndarray]:
        pixels = self(image, rng, crop)
        height, width = self.patch_size
        rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
        patches = pixels.reshape(rows, height, columns, width, -1).swapaxes(1, 2).reshape(rows * columns, -1)
        entries = {"image": patches, "spatial_shapes": np.array([rows, columns])}
        if self.token_drop:
            number = max(round(len(patches) * (1 - self.token_drop)), 1)
            entries["keep"] = np.sort(rng.permutation(len(patches))[:number])
        return entries


class NativeDataset(TrainDataset):
    """Patches of augmented images by position in the endless sequence, and their number without decoding them."""

    def __init__(self, split: Split, transform: NativeTransform, seed: int, class_sampling: str = "natural"):
        super().__init__(split, transform, seed, class_sampling)
        self.patch_pixels = transform.patch_size[0] * transform.patch_size[1]
        self._sizes: dict[int, tuple[int, int]] = {}  # row -> (height, width), a cache

    def count_patches(self, position: int) -> int:
        """Number of patches of the image at a position, from its size alone; 0 if the size cannot be read."""
        row, epoch, _ = self.draw(position)
        if row not in self._sizes:
            try:
                self._sizes[row] = read_size(self.split.image(self.split.samples[row], row))
            except ImageReadingError:  # is logged when its pixels are needed
                self._sizes[row] = 0, 0
        if self._sizes[row] == (0, 0):
            return 0
        crop = self.transform.draw_crop(*self._sizes[row], sample_generator(self.seed, epoch, row))
        return crop.size[0] * crop.size[1] // self.patch_pixels


def collate_patches(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples into "image" (batch, most patches, values) uint8, its mask, and the other entries.

    "image" is padded with 0 and "keep" with -1.
    """
    padded = {"image": 0, "keep": -1}
    batch = collate_fn([{name: value for name, value in sample.items() if name not in padded} for sample in samples])
    for name, filler in padded.items():
        if name in samples[0]:
            rows = [torch.from_numpy(sample[name]) for sample in samples]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)
    counts = torch.tensor([len(sample["image"]) for sample in samples])
    batch["pixel_attention_mask"] = (torch.arange(batch["image"].shape[1]) < counts[:, None]).int()
    return batch
