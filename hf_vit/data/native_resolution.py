"""Training at native aspect ratios: a batch has images of different sizes, as patches, padded to the longest sequence.

NaViT (arXiv 2307.06304) trains in this way, and drops a share of each image's patches. NaViT packs several images into
a sequence, with masks. Here a sequence has one image, as in SigLIP 2 NaFlex (arXiv 2502.14786), with at most as many
patches as an image of the model's size. Images are bucketed by their number of patches to reduce padding.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..models.image_reading import ImageReadingError, load_image, read_size
from ..models.image_resizing import fit_grid
from .augmentation import Box, Crop, TrainTransform, sample_generator, sample_inception_box
from .loaders import TrainDataset, collate_fn
from .splits import Split

_RATIOS = 0.75, 1.33  # range of a crop's aspect ratio divided by the image's


class NativeDataset(TrainDataset):
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
        row, visit, _ = self.draw(position)
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
        size = rows * height, columns * width
        pixels = replace(self.transform, size=size)(decoded, rng, Crop(box, size, Box(0, 0, *size)))
        patches = pixels.reshape(rows, height, columns, width, -1).swapaxes(1, 2).reshape(rows * columns, -1)
        entries = {"image": patches, "spatial_shapes": np.array([rows, columns])}
        if self.token_drop:
            number = max(round(len(patches) * (1 - self.token_drop)), 1)
            entries["kept_patches"] = np.sort(rng.permutation(len(patches))[:number])
        return entries


def collate_patches(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples into "image" (batch, most patches, values) uint8, its mask, and the other entries.

    "image" is padded with 0 and "kept_patches" with -1.
    """
    padded = {"image": 0, "kept_patches": -1}
    batch = collate_fn([{name: value for name, value in sample.items() if name not in padded} for sample in samples])
    for name, filler in padded.items():
        if name in samples[0]:
            rows = [torch.from_numpy(sample[name]) for sample in samples]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)
    counts = torch.tensor([len(sample["image"]) for sample in samples])
    batch["pixel_attention_mask"] = (torch.arange(batch["image"].shape[1]) < counts[:, None]).int()
    return batch
