"""Images in their own aspect ratio: sizes that the patches divide, images as patches, batches of like sizes.

Names, and the order of the values of a patch, are those of `Siglip2ImageProcessor` in transformers.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count

import torch
from torch.nn.functional import pad
from torch.utils.data import Sampler


@lru_cache(maxsize=4096)
def fit_grid(height: int, width: int, patch_size: tuple[int, int], max_num_patches: int) -> tuple[int, int]:
    """(rows, columns) of patches at the largest scale at which an image has at most `max_num_patches` of them.

    At scale s an image has ceil(s * height / patch height) rows: the last row is stretched to a whole one. The number
    of rows grows right after s = rows * patch height / height, and so on for the columns, so one of these is the scale.
    """
    patch_height, patch_width = patch_size
    grid = (1, 1)
    for rows in count(1):
        columns = -(-rows * patch_height * width // (height * patch_width))
        if rows * columns > max_num_patches:
            break
        grid = max(grid, (rows, columns))
    for columns in count(1):
        rows = -(-columns * patch_width * height // (width * patch_height))
        if rows * columns > max_num_patches:
            break
        grid = max(grid, (rows, columns))
    return grid


def patchify(images: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """(..., channels, height, width) -> (..., rows * columns, patch height * patch width * channels)."""
    patches = images.unflatten(-2, (-1, patch_size[0])).unflatten(-1, (-1, patch_size[1]))
    patches = patches.movedim(-5, -1).movedim(-3, -4)  # (..., rows, columns, patch height, patch width, channels)
    return patches.flatten(-3).flatten(-3, -2)


def pad_patches(patches: Sequence[torch.Tensor], length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Give several images the same number of patches.

    Args:
        patches: for each image (patches, values).
        length: the number of patches to pad with zeros to.

    Returns:
        For each image (length, values), and an int32 mask (length,) that is 1 at patches and 0 at padding.
    """
    padded = [pad(image, (0, 0, 0, length - len(image))) for image in patches]
    masks = [(torch.arange(length, device=image.device) < len(image)).int() for image in patches]
    return padded, masks


class PatchCountBatchSampler(Sampler[list[int]]):
    """Batches of images that have the same number of patches, so that nothing is padded.

    What is left of each number, less than a batch, is batched with its nearest numbers. Give it to a
    `DataLoader(dataset, batch_sampler=..., collate_fn=...)` whose `collate_fn` calls the image processor on a whole
    batch with `preset="native", padding="longest"`.

    Args:
        patch_counts: the number of patches of each image of the data set, the product of its `fit_grid`.
        batch_size: images in a batch.
        shuffle: whether images and batches come in another order in each epoch (see `set_epoch`).
        seed: of the order, the same on every process.
        drop_last: whether to leave out the one batch that is not full.
    """

    def __init__(
        self, patch_counts: Sequence[int], batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self.patch_counts = list(patch_counts)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int):
        """Called before each epoch, as with `torch.utils.data.DistributedSampler`."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(len(self.patch_counts), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        batches = self.batches(self.order(len(self.patch_counts), generator))
        return iter([batches[index] for index in self.order(len(batches), generator)])

    def order(self, length: int, generator: torch.Generator) -> list[int]:
        return torch.randperm(length, generator=generator).tolist() if self.shuffle else list(range(length))

    def batches(self, images: list[int]) -> list[list[int]]:
        groups = defaultdict(list)
        for image in images:
            groups[self.patch_counts[image]].append(image)
        whole, rest = [], []
        for _, group in sorted(groups.items()):
            end = len(group) - len(group) % self.batch_size
            whole += group[:end]
            rest += group[end:]
        images = whole + rest
        return [images[start : start + self.batch_size] for start in range(0, len(images), self.batch_size)][
            : len(self)
        ]
