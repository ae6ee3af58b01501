"""Class numbers of data against those of a model or another split: matched by name, or refused with both lists."""

import csv
import re

import datasets
import numpy as np
import pytest
import torch

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.catalog import built_in_class_names, imagenet_numbers
from hf_vit.cli import main
from hf_vit.data.labels import match_to_model, match_to_split, read_label_map
from hf_vit.data.splits import Split
from hf_vit.loading import save_folder

from ..commands import evaluate
from ..photographs import COLORS as THREE
from ..photographs import draw_picture, table_of
from ..processes import arguments
from ..tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "blank_figures")

COLORS = {**THREE, "gray": (128, 128, 128)}


def split_of(names, count=None, samples=None, **fields) -> Split:
    return Split(samples, "image", "label", names, len(names) if names else count, **fields)


def config_of(names) -> HfViTConfig:
    return HfViTConfig(num_labels=len(names), id2label=dict(enumerate(names)))


def numbers(data, model, **options):
    """Class numbers of the model for the data's 0, 1, ..."""
    split = match_to_model(split_of(data), config_of(model), "model", **options)
    return [split.label({"label": number}) for number in range(len(data))]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A model that tells three colors apart: the first patch's mean decides, by a head that was solved for it."""
    folder = save_tiny(tmp_path_factory.mktemp("model") / "tiny", num_labels=4)
    model = HfViTForImageClassification.from_pretrained(folder)
    pixels, rng = [], np.random.default_rng(3)
    processor = HfViTImageProcessor.from_pretrained(folder)
    for color in COLORS.values():
        pixels += [processor(draw_picture(color, rng), return_tensors="pt")["pixel_values"] for _ in range(8)]
    with torch.no_grad():
        features = model.vit(torch.cat(pixels)).pooler_output
        features = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
        targets = torch.eye(4).repeat_interleave(8, dim=0).double()
        weights = torch.linalg.lstsq(features, targets, driver="gelsd").solution
        model.classifier.weight.copy_(weights[:-1].T)
        model.classifier.bias.copy_(weights[-1])
    model.config.id2label = dict(enumerate(COLORS))
    model.config.label2id = {name: number for number, name in enumerate(COLORS)}
    save_folder(folder, model, processor, overwrite=True)
    return folder


def write(folder, names, order=tuple(COLORS), count=3):
    """A test split of pictures of the colors in `order`, whose classes have the names `names`; None: only numbers."""
    rng = np.random.default_rng(1)
    images = [draw_picture(COLORS[color], rng) for color in order for _ in range(count)]
    labels = [number for number in range(len(order)) for _ in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    table_of(images, labels, names or datasets.Value("int64")).to_parquet(folder / "test.parquet")
    return folder


def measure(model, data, **options):
    return evaluate(arguments(model=model, dataset=data, num_workers=0, **options))["accuracy"]


def test_equal_names_in_another_order_are_mapped(classifier, tmp_path):
    order = ["red", "gray", "blue", "green"]
    assert measure(classifier, write(tmp_path / "same", list(COLORS))) == 1.0
    assert measure(classifier, write(tmp_path / "other", order, order)) == 1.0
    assert measure(classifier, write(tmp_path / "fewer", order[:2], order[:2])) == 1.0


def test_names_in_another_case_are_refused_with_pairs(classifier, tmp_path, capsys):
    """Matched by number, the accuracy would depend on the order of the names."""
    data = write(tmp_path, ["Red", "blue", "green", "Gr_ay"], ["red", "blue", "green", "gray"])
    assert main(["evaluate", *arguments(model=classifier, dataset=data, num_workers=0)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "'Red'" in error
    assert "'blue'" in error


def test_a_file_states_the_mapping(classifier, tmp_path):
    data = write(tmp_path / "data", ["Rot", "blue", "green", "Grau"], ["red", "blue", "green", "gray"])
    for name, text in (("map.json", '{"Rot": "red", "Grau": 3}'), ("map.yaml", "\ufeffRot: red\nGrau: 3\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert measure(classifier, data, label_map=tmp_path / name) == 1.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- Rot\n", "map.yaml"),
        ("{Rot: [1]}", "'Rot'"),
        ("{no: red}", "False"),
        ("{Rot: crimson}", "'Rot'"),
        ("{Rot: 3}", "'Rot'"),
        ("{Blau: blue}", "'Blau'"),
        ("{Rot: red", "YAML"),
    ],
)
def test_wrong_label_map_is_one_sentence(tmp_path, content, message):
    (tmp_path / "map.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        numbers(["Rot", "blue", "green"], ["blue", "green", "red"], label_map=str(tmp_path / "map.yaml"))


def test_numeric_keys_of_a_label_map_are_names(tmp_path):
    (tmp_path / "map.yaml").write_text("0: cat\n7: 0\n")
    assert read_label_map(str(tmp_path / "map.yaml")) == {"0": "cat", "7": 0}


@pytest.mark.parametrize(
    ("protocol", "setting", "value"),
    [("knn", "label_map", "map.yaml"), ("accuracy", "shots", "1,5"), ("few_shot", "neighbors", 7)],
)
def test_a_setting_that_the_protocol_ignores_is_refused(classifier, tmp_path, protocol, setting, value):
    with pytest.raises(ValueError, match=f"{setting} .*{protocol}"):
        measure(classifier, tmp_path, protocol=protocol, **{setting: value})


def test_without_names_numbers_are_used_with_a_message(classifier, tmp_path, caplog):
    """Of the data, and then of the model."""
    assert measure(classifier, write(tmp_path, None)) == 1.0
    assert re.search(r"\b0\b\D+\b3\b", caplog.records[-1].getMessage())
    assert numbers(["cat", "dog"], ["LABEL_0", "LABEL_1", "LABEL_2"]) == [0, 1]
    assert re.search(r"\b0\b\D+\b1\b", caplog.records[-1].getMessage())
    with pytest.raises(ValueError, match=r"3 .* 2"):
        numbers(["cat", "dog", "owl"], ["LABEL_0", "LABEL_1"])


def test_numeric_folder_names_are_class_numbers(caplog):
    """0, 1, 10, 11, 2, ...: the tenth folder is not class 10."""
    names = sorted(str(number) for number in range(12))
    for model in ([f"LABEL_{number}" for number in range(12)], list("abcdefghijkl")):
        assert numbers(names, model) == [int(name) for name in names]
    assert caplog.records
    with pytest.raises(ValueError, match=r"\b0\b\D+\b1\b"):
        numbers(["1", "2"], ["LABEL_0", "LABEL_1"])


def test_ambiguous_class_names_and_unlabeled_images_are_refused(classifier, tmp_path):
    """The labels of a test split may be withheld, which are -1."""
    assert numbers(["crane", "crane", "kite"], ["crane", "crane", "kite"]) == [0, 1, 2]
    with pytest.raises(ValueError, match="'crane'"):
        numbers(["kite", "crane"], ["crane", "crane", "kite"])
    images = [draw_picture(COLORS["red"], np.random.default_rng(1)) for _ in range(12)]
    table_of(images, [-1] * 12, list(COLORS)).to_parquet(tmp_path / "test.parquet")
    with pytest.raises(ValueError, match="12"):
        measure(classifier, tmp_path)


def test_several_labels_are_mapped_too():
    split = match_to_model(split_of(["b", "a"], multi_label=True), config_of(["a", "x", "b"]), "model")
    assert split.label({"label": [0, 1]}).tolist() == [1, 0, 1]
    assert split.label({"label": [0]}).tolist() == [0, 0, 1]


def test_wnids_are_those_of_imagenet(shared):
    with (shared / "data" / "labels" / "imagenet1k_classes.csv").open(encoding="utf-8") as file:
        assert imagenet_numbers([row["wnid"] for row in csv.DictReader(file)]) == list(range(1000))


def test_wnids_match_imagenet_class_names():
    words = built_in_class_names("imagenet1k")
    few = ["n03000684", "n01440764", "n02102040"]  # chain saw, tench, English springer, in the order of no sorting
    assert [words[number] for number in numbers(few, words)] == ["chain saw", "tench", "English springer"]
    assert numbers(few, [f"LABEL_{number}" for number in range(1000)]) == numbers(few, words)
    assert numbers(few, ["n02102040", "n01440764", "n03000684"]) == [2, 1, 0]
    with pytest.raises(ValueError, match="'n03000684'"):
        numbers(few, words[:999])


def test_other_imagenet_names_need_the_same_order():
    words = built_in_class_names("imagenet1k")
    synonyms = [f"{name.split(' (')[0].upper()}, another name" for name in words]
    assert numbers(synonyms, words) == list(range(1000))
    swapped = [synonyms[1], synonyms[0], *synonyms[2:]]
    with pytest.raises(ValueError, match="model"):
        numbers(swapped, words)


def test_splits_are_matched_by_name():
    train = split_of(["a", "b", "c"])
    test = match_to_split(train, split_of(["c", "a"]), "train", "test")
    assert [test.label({"label": number}) for number in (0, 1, -1)] == [2, 0, -1]
    assert test.num_labels == 3
    with pytest.raises(ValueError, match="'A'"):
        match_to_split(train, split_of(["A", "b"]), "train", "test")
    with pytest.raises(ValueError, match=r"5 .* 3"):
        match_to_split(split_of(None, 3), split_of(None, 5), "train", "test")
    with pytest.raises(ValueError, match=r"train .* test"):
        match_to_split(split_of(["a"], multi_label=True), split_of(["a"]), "train", "test")
