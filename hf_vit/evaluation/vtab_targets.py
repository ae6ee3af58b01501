"""Labels of VTAB tasks that are computed from the annotation of an image.

The thresholds are those of google-research/task_adaptation, data/{clevr,dsprites,kitti,smallnorb}.py. `TARGETS` lists
the column that each function takes; `objects` is a list of records, or a record of lists.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

_CLEVR_DISTANCES = (8.0, 8.5, 9.0, 9.5, 10.0)  # units of the rendered scene, between 6 classes
_KITTI_DISTANCES = (8.0, 20.0, 999.0)  # meters, between 4 classes; the last is "no vehicle"
_KITTI_VEHICLES = ("Car", "Van", "Truck", 0, 1, 2)  # names of the annotation, or numbers of TensorFlow Datasets
_NO_VEHICLE = 1000.0


def _records(objects: Any) -> list[dict[str, Any]]:
    """Convert annotated objects to a list of records."""
    if isinstance(objects, dict):
        return [dict(zip(objects, values, strict=True)) for values in zip(*objects.values(), strict=True)]
    return list(objects)


def _class_of(value: float, thresholds: tuple[float, ...]) -> int:
    """Count the thresholds below `value`."""
    return bisect_left(thresholds, value)


def clevr_count(objects: Any) -> int:
    """Number of objects: 3 to 10, as classes 0 to 7."""
    return len(_records(objects)) - 3


def clevr_distance(objects: Any) -> int:
    """Distance of the closest object from the camera (the third of `pixel_coords`), as classes 0 to 5."""
    return _class_of(min(entry["pixel_coords"][2] for entry in _records(objects)), _CLEVR_DISTANCES)


def kitti_distance(objects: Any) -> int:
    """Distance of the closest car, van or truck (the third of `location`): up to 8 m, 20 m, further, or none."""
    vehicles = [entry["location"][2] for entry in _records(objects) if entry["type"] in _KITTI_VEHICLES]
    return _class_of(min([*vehicles, _NO_VEHICLE]), _KITTI_DISTANCES)


def dsprites_location(label_x_position: int) -> int:
    """Horizontal position: 32 positions in 16 classes of two."""
    return label_x_position // 2


def dsprites_orientation(label_orientation: int) -> int:
    """Orientation: 40 orientations in 16 classes of 40 / 16 = 2.5, that is three and two in turn."""
    return int(label_orientation // 2.5)


def smallnorb_azimuth(azimuth: int) -> int:
    """Azimuth in 18 classes; the info files have 0, 2, 4 to 34, in units of 10 degrees."""
    return azimuth // 2


def smallnorb_elevation(elevation: int) -> int:
    """Elevation in 9 classes; the info files have 0 to 8, from 30 to 70 degrees in steps of 5."""
    return elevation


class _Target(NamedTuple):
    column: str  # of annotation
    function: Callable[[Any], int]


TARGETS = {
    "clevr_count": _Target("objects", clevr_count),
    "clevr_distance": _Target("objects", clevr_distance),
    "kitti_distance": _Target("objects", kitti_distance),
    "dsprites_location": _Target("label_x_position", dsprites_location),
    "dsprites_orientation": _Target("label_orientation", dsprites_orientation),
    "smallnorb_azimuth": _Target("azimuth", smallnorb_azimuth),
    "smallnorb_elevation": _Target("elevation", smallnorb_elevation),
}
