"""The picture of similar images: whole names that do not cover each other."""

import itertools

import numpy as np
from matplotlib.figure import Figure

from hf_vit.demo.contact_sheet import draw_neighbors

NAMES = ["short.png", "Screenshot 2024-01-01 at 10.00.00 of something.png", "W" * 60 + ".png"]
NAMES += [f"IMG_20230714_183245123_HDR_portrait_mode_edited_{number:04}.jpg" for number in range(4)]


def test_names_are_whole_and_do_not_overlap(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: drawn.append(figure) or save(figure, file))
    image = np.zeros((9, 12, 3), np.uint8)
    draw_neighbors(image, [(image, f"folder/{name}", 0.5) for name in NAMES], tmp_path / "sheet.png")
    (figure,) = drawn
    titles = [axes.title for axes in figure.axes[1 : 1 + len(NAMES)]]
    assert ["".join(title.get_text().split()[1:]) for title in titles] == ["".join(name.split()) for name in NAMES]
    boxes = [title.get_window_extent() for title in titles]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
