"""Labels that are computed from annotations: thresholds of google-research/task_adaptation."""

import numpy as np

from hf_vit.evaluation.vtab_data import TARGETS, clevr_distance, kitti_distance


def test_clevr_targets():
    near = {"pixel_coords": [3.0, 4.0, 8.2], "shape": "cube"}
    far = {"pixel_coords": [1.0, 2.0, 11.5], "shape": "sphere"}
    assert TARGETS["clevr_count"][1]([near] * 3) == 0
    assert TARGETS["clevr_count"][1]({"shape": ["cube"] * 10, "size": ["large"] * 10}) == 7  # a record of lists
    assert clevr_distance([far, near, far]) == 1
    for distance, label in ((8.0, 0), (8.5, 1), (8.6, 2), (9.2, 3), (9.9, 4), (10.1, 5)):
        assert clevr_distance([far, {"pixel_coords": [0, 0, distance]}]) == label


def test_kitti_target():
    def objects(*found):
        return [{"type": kind, "location": [0.5, 1.5, z]} for kind, z in found]

    assert kitti_distance(objects(("Car", 7.9), ("Van", 30.0))) == 0
    assert kitti_distance(objects(("Pedestrian", 3.0), ("Truck", 8.1))) == 1
    assert kitti_distance(objects((2, 20.5), (3, 1.0))) == 2  # numbers of TensorFlow Datasets: truck, pedestrian
    assert kitti_distance(objects(("Cyclist", 3.0))) == 3
    assert kitti_distance([]) == 3


def test_targets_of_dsprites_and_smallnorb():
    assert [TARGETS["dsprites_location"][1](x) for x in (0, 1, 2, 31)] == [0, 0, 1, 15]
    bins = [TARGETS["dsprites_orientation"][1](number) for number in range(40)]
    assert np.bincount(bins).tolist() == [3, 2] * 8
    assert [TARGETS["smallnorb_azimuth"][1](value) for value in (0, 2, 34)] == [0, 1, 17]
    assert TARGETS["smallnorb_elevation"][1](8) == 8
