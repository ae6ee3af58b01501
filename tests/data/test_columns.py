"""Which column has the labels: names before types; a new report is one row."""

import datasets
import pytest
from datasets import ClassLabel, Features, Image, List, Value

from hf_vit.data.columns import find_label_column
from hf_vit.data.labels import require_labels
from hf_vit.data.splits import open_split

TEXT, NUMBER, CLASS = Value("string"), Value("int64"), ClassLabel(names=["cat", "dog"])
FOUND = [
    ({"label": TEXT, "year": NUMBER}, "label"),
    ({"id": NUMBER, "label": TEXT}, "label"),
    ({"year": NUMBER, "Class": TEXT, "width": NUMBER}, "Class"),
    ({"category": NUMBER, "file": TEXT}, "category"),
    ({"image_id": NUMBER, "labels": List(TEXT)}, "labels"),
    ({"species": CLASS, "label": CLASS}, "label"),
    ({"label": Value("float64"), "species": CLASS}, "species"),
    ({"species": CLASS, "year": NUMBER}, "species"),
    ({"tags": List(CLASS), "year": NUMBER}, "tags"),
    ({"number": NUMBER, "caption": TEXT}, "number"),
]
REFUSED = [
    ({"label": TEXT, "class": TEXT}, "label, class"),
    ({"label": NUMBER, "labels": List(NUMBER)}, "label, labels"),
    ({"year": NUMBER, "width": NUMBER}, "year, width"),
    ({"fine": CLASS, "coarse": CLASS}, "fine, coarse"),
    ({"caption": TEXT}, "caption"),
]


@pytest.mark.parametrize(("columns", "expected"), FOUND)
def test_names_count_before_types(columns, expected):
    for order in (columns, dict(reversed(columns.items()))):
        assert find_label_column(Features({"image": Image()} | order), None) == expected


@pytest.mark.parametrize(("columns", "named"), REFUSED)
def test_several_candidates_are_listed(columns, named):
    with pytest.raises(ValueError, match=named):
        find_label_column(Features({"image": Image()} | columns), None)


@pytest.fixture
def years(tmp_path):
    """36 images with one year each, as a file of Parquet."""
    features = Features({"image": Image(), "year": NUMBER})
    images = [{"bytes": b"", "path": None}] * 36
    table = datasets.Dataset.from_dict({"image": images, "year": list(range(1990, 2026))}, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_of_years_is_no_column_of_labels_unless_it_is_named(years, streaming):
    samples = [str(years)] if streaming else datasets.Dataset.from_parquet(str(years))
    with pytest.raises(ValueError, match=r"year.*2,026"):
        require_labels(open_split(samples), "train", two_classes=True)
    require_labels(open_split(samples, label_column="year"), "train", two_classes=True)
    require_labels(open_split(samples), "test")  # few images may be evaluated
