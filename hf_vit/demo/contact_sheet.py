"""A page of images with what a model says of them."""

from pathlib import Path

import numpy as np

from ..files.output import new_file

COLUMNS, ROWS = 12, 8


def draw_contact_sheet(images: list, labels: np.ndarray, predictions: np.ndarray, path: Path) -> Path:
    """Draw every wrong image, framed in red with the right label, then right ones while there is room."""
    from matplotlib.figure import Figure

    order = np.argsort(labels == predictions, kind="stable")[: COLUMNS * ROWS]
    figure = Figure(figsize=(COLUMNS * 0.9, ROWS * 1.05 + 0.5))
    axes = figure.subplots(ROWS, COLUMNS)
    for axis in axes.flat:
        axis.axis("off")
    for axis, index in zip(axes.flat, order, strict=False):
        wrong = labels[index] != predictions[index]
        axis.imshow(images[index], cmap="gray_r")
        title = f"{predictions[index]}, is {labels[index]}" if wrong else str(predictions[index])
        axis.set_title(title, fontsize=9, color="firebrick" if wrong else "black", pad=3)
        if wrong:
            axis.axis("on")
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set(edgecolor="firebrick", linewidth=2)
    accuracy = (labels == predictions).mean()
    figure.suptitle(
        f"{len(labels)} held-out digits, accuracy {accuracy:.2%}; the wrong ones first, in red", fontsize=11
    )
    figure.tight_layout(pad=0.5, rect=(0, 0, 1, 0.97))
    with new_file(path, overwrite=True) as file:
        figure.savefig(file, dpi=120)
    return path
