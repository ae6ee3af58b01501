"""Names of data sets: a misspelled folder, and the Hub out of reach."""

import datasets
import pytest
from huggingface_hub import HfApi

from hf_vit.data import sources


@pytest.fixture
def out_of_reach(tmp_path, monkeypatch):
    """A folder with photographs, an empty cache, and no network."""

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    (tmp_path / "photographs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(sources, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    asked = []
    empty = datasets.Dataset.from_dict({})
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: asked.append(arguments["path"]) or empty)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda **arguments: asked.append(arguments["path"]))
    return asked


@pytest.mark.parametrize("name", ["photgraphs", "./photgraphs", "photo graphs", "data/photgraphs", "a/b/photgraphs"])
def test_a_misspelled_folder_is_refused_at_once(out_of_reach, name):
    hint = "photographs?" if name.count("/") < 2 and not name.startswith("data/") else name
    for look in (lambda: sources.load_split(name, "train"), lambda: sources.names_of_splits(name)):
        with pytest.raises(ValueError, match="no folder") as refusal:
            look()
        assert hint in str(refusal.value)
    assert not out_of_reach


def test_a_data_set_in_the_cache_needs_no_network(out_of_reach, tmp_path):
    (tmp_path / "cache" / "someone___my_photos").mkdir(parents=True)
    sources.load_split("someone/MyPhotos", "train")
    assert out_of_reach == ["someone/MyPhotos"]


def test_a_name_that_the_hub_lacks(hub):
    with pytest.raises(ValueError, match="no/such"):
        sources.load_split("no/such", "train")
