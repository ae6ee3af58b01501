"""VTAB-1k on small datasets in the form of each kind of task; targets by hand."""

import json
import shutil
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
from accelerate import Accelerator

from hf_vit.evaluation import vtab, vtab_data
from hf_vit.evaluation.vtab import markdown_table, summarize
from hf_vit.evaluation.vtab_data import Task, open_task, read_table
from hf_vit.settings.fields import EvaluateSettings
from hf_vit.settings.recipes import read_recipe

from ..commands import evaluate
from ..comparing import change_json
from ..data.test_loaders import write_tar
from ..paths import RECIPES
from ..photographs import draw_picture, write_colors
from ..processes import arguments
from ..tiny_models import save_tiny

TASKS = {task.name: task for task in read_table()["tasks"]}


def test_tasks_groups_and_means_equal_the_paper():
    """Tables 2 and 9 of arXiv 2010.11929."""
    groups = {
        "natural": "Caltech101 CIFAR-100 DTD Flowers102 Pets Sun397 SVHN",
        "specialized": "Camelyon EuroSAT Resisc45 Retinopathy",
        "structured": "Clevr-Count Clevr-Dist DMLab dSpr-Loc dSpr-Ori KITTI-Dist sNORB-Azim sNORB-Elev",
    }
    expected = [(name, group) for group, names in groups.items() for name in names.split()]
    assert [(name, task.group) for name, task in TASKS.items()] == expected
    assert len({task.folder for task in TASKS.values()}) == len({task.hub for task in TASKS.values()}) == 19
    for task in TASKS.values():
        assert task.target is None or task.target in vtab_data.TARGETS
        assert task.splits.keys() <= {"train", "validation", "test"}
    means = [summarize(list(TASKS.values()), row)["mean"] for row in read_table()["paper"].values()]
    assert [round(100 * mean, 1) for mean in means] == [77.6, 76.3, 72.7]


def test_the_setting_equals_the_recipe_and_augmentation_bits_appendix():
    """All tasks have one setting: that of the recipe without splits, at each level of augmentation.

    The appendix of arXiv 1912.11370 on VTAB; sizes of Scenic's vtab_plainvit_config.py, which agrees with it.
    """
    table = read_table()
    for level, augmentation in table["augmentation"].items():
        recipe = read_recipe(RECIPES / "finetune_vtab.yaml", {"augmentation": level})
        for unused in ("train_split", "eval_split", "crop_area"):
            recipe.pop(unused, None)
        assert {**table["setting"], **augmentation} == recipe
    levels = {name: table["augmentation"][task.augmentation] for name, task in TASKS.items()}
    assert {name for name, level in levels.items() if not level["flip"]} == {"dSpr-Ori", "sNORB-Azim", "dSpr-Loc"}
    uncropped = {"Clevr-Count", "Clevr-Dist", "DMLab", "KITTI-Dist", "dSpr-Loc"}
    assert {name for name, level in levels.items() if level["crop"] == "none"} == uncropped
    assert {level["crop"] for level in levels.values()} == {"none", "random"}
    assert (table["setting"]["resize"], table["setting"]["image_size"]) == (448, 384)


def images(count: int, rng) -> list:
    return [draw_picture((shade, shade, 255 - shade), rng) for shade in rng.integers(0, 255, count)]


def write(folder, split, columns):
    folder.mkdir(parents=True, exist_ok=True)
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    dataset.to_parquet(folder / f"{split}.parquet")


@pytest.fixture(autouse=True)
def _fewer_examples(monkeypatch):
    monkeypatch.setattr(vtab_data, "TRAIN", 80)
    monkeypatch.setattr(vtab_data, "VALIDATION", 20)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Data of ten tasks in their published forms: lists, an image folder, parquet, annotations, latents."""
    root, rng = tmp_path_factory.mktemp("vtab"), np.random.default_rng(0)
    write_lists(root / "caltech101", rng)
    write_colors(root / "eurosat", ("blue", "red"), train=53, test=10)
    for split, count in (("train", 106), ("test", 20)):
        fine = rng.integers(0, 100, count)
        write(root / "cifar", split, {"image": images(count, rng), "fine_label": fine, "coarse_label": fine // 5})
    write_annotated(root, rng)
    return root


def write_lists(folder, rng):
    """Write lists in the usual form of VTAB-1k."""
    (folder / "images").mkdir(parents=True)
    for number, image in enumerate(images(7, rng)):
        image.save(folder / "images" / f"{number} x.png")
    for name, count in (("train800", 80), ("val200", 20), ("test", 13)):
        lines = [f"images/{number % 7} x.png {number % 102}" for number in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


def write_annotated(root, rng):
    def coordinates(count):
        return [[0.0, 0.0, float(z)] for z in rng.uniform(7, 12, count)]

    for split, count in (("train", 250), ("validation", 30)):  # CLEVR's test split has no annotation
        objects = [[{"pixel_coords": place} for place in coordinates(n)] for n in rng.integers(3, 11, count)]
        write(root / "clevr_count", split, {"image": images(count, rng), "objects": objects})
    kinds = np.array(["Car", "Van", "Pedestrian", "Cyclist"])
    for split, count in (("train", 83), ("validation", 25), ("test", 21)):
        objects = [
            [{"type": str(kind), "location": [0.0, 0.0, float(rng.uniform(3, 40))]} for kind in rng.choice(kinds, 2)]
            for _ in range(count)
        ]
        write(root / "kitti", split, {"image": images(count, rng), "objects": objects})
    sprites = {"label_x_position": np.arange(300) % 32, "label_orientation": np.arange(300) % 40}
    write(root / "dsprites_loc", "train", {"image": images(300, rng), **sprites})
    for split, count in (("train", 90), ("test", 50)):
        views = {"azimuth": 2 * (np.arange(count) % 18), "elevation": np.arange(count) % 9}
        write(root / "smallnorb_azi", split, {"image": images(count, rng), **views, "category": np.arange(count) % 5})
    same_data = {"clevr_dist": "clevr_count", "dsprites_ori": "dsprites_loc", "smallnorb_ele": "smallnorb_azi"}
    for task, data in same_data.items():
        (root / task).symlink_to(root / data)


HERE = {  # images to measure on, and classes that occur
    "Caltech101": (13, 80),
    "CIFAR-100": (20, None),
    "EuroSAT": (20, 2),
    "Clevr-Count": (30, 8),
    "Clevr-Dist": (30, 6),
    "dSpr-Loc": (30, 16),
    "dSpr-Ori": (30, 16),
    "KITTI-Dist": (21, 4),
    "sNORB-Azim": (25, 18),
    "sNORB-Elev": (25, 9),
}


@pytest.mark.parametrize("name", HERE)
def test_splits_of_every_kind_of_task(root, name):
    data = open_task(TASKS[name], str(root))
    test_images, seen = HERE[name]
    assert (len(data.train), len(data.validation), len(data.test)) == (80, 20, test_images)
    assert data.listed == (name == "Caltech101")
    labels = {split.label(row) for split in (data.train, data.validation) for row in split.samples}
    assert data.train.class_numbers().tolist() == [data.train.label(row) for row in data.train.samples]
    assert labels <= set(range(TASKS[name].classes))
    assert seen in (len(labels), None)  # shuffled: every class is there
    assert data.train.num_labels == TASKS[name].classes
    again = open_task(TASKS[name], str(root))
    column = data.train.image_column
    for split in ("train", "validation", "test"):
        rows, others = (getattr(opened, split).samples[column] for opened in (data, again))
        assert list(rows) == list(others)
    if not data.listed:
        splits = (data.train, data.validation, data.test)
        contents = {row["bytes"] or row["path"] for split in splits for row in split.samples[column]}
        assert len(contents) == 100 + test_images


@pytest.mark.slow
def test_the_hub_has_all_tasks_by_name(hub, client, tmp_path):
    """The dataset has the CLIP benchmark's form: shards with an image and `cls`, in a folder for each split."""
    for split, count in (("train", 1003), ("test", 40)):
        (tmp_path / split).mkdir()
        write_tar(tmp_path / split / "0.tar", range(count), classes=32)
    code = f"""
        import json
        from huggingface_hub import HfApi
        from hf_vit.evaluation.vtab_data import Task, open_task

        name = "alice/wds_vtab-dsprites_label_x_position"
        HfApi().create_repo(name, repo_type="dataset")
        HfApi().upload_folder(repo_id=name, repo_type="dataset", folder_path={str(tmp_path)!r})
        task = Task("dSpr-Loc", "structured", 16, "dsprites_loc", name, "none", target="dsprites_location",
                    hub_columns={{"cls": "label_x_position"}}, splits={{"train": "elsewhere"}})
        data = open_task(task, "hub")
        labels = sorted({{data.test.label(row) for row in data.test.samples}})
        print(json.dumps([len(data.train), len(data.validation), len(data.test), labels]))
    """
    assert json.loads(client(code).splitlines()[-1]) == [800, 200, 40, list(range(16))]


def test_bad_data_give_one_sentence_that_names_the_task(root, tmp_path):
    with pytest.raises(ValueError, match="oxford_iiit_pet"):
        open_task(TASKS["Pets"], str(root))
    rng = np.random.default_rng(0)
    write(tmp_path / "svhn", "train", {"image": images(7, rng), "label": [0] * 7})
    write(tmp_path / "svhn", "test", {"image": images(2, rng), "label": [0] * 2})
    with pytest.raises(ValueError, match="SVHN"):
        open_task(TASKS["SVHN"], str(tmp_path))
    other = Task("Small", "natural", 90, "cifar", "-", "none", label="fine_label")
    with pytest.raises(ValueError, match=r"Small.* 89"):
        open_task(other, str(root))
    (tmp_path / "dtd").mkdir()
    for name in ("train800", "val200", "test"):
        (tmp_path / "dtd" / f"{name}.txt").write_text("images/1.png 4\nimages/2.png\n")
    with pytest.raises(ValueError, match=r"train800\.txt"):
        open_task(TASKS["DTD"], str(tmp_path))


def vtab_arguments(tiny, root, output, tasks, **changes) -> list[str]:
    small = {"steps": 30, "batch_size": 16, "warmup_steps": 2, "image_size": [20, 36], "learning_rate": 0.05}
    settings = {"protocol": "vtab", "num_workers": 0, "eval_batch_size": 16, "finetune": json.dumps(small)}
    return arguments(model=tiny, dataset=root, output_dir=output, tasks=tasks, **{**settings, **changes})


@pytest.mark.slow
def test_other_tasks_run_when_one_fails_and_the_rest_runs_later(tiny, root, tmp_path, capsys, monkeypatch):
    trained = []
    run = vtab.Runner.run
    monkeypatch.setattr(vtab.Runner, "run", lambda self, task: trained.append(task.name) or run(self, task))
    with pytest.raises(ValueError, match="Pets"):
        evaluate(vtab_arguments(tiny, root, tmp_path, "Pets,EuroSAT,kitti"))
    assert trained == ["Pets", "EuroSAT", "KITTI-Dist"]
    assert {path.name for path in tmp_path.iterdir()} == {"results", "vtab.json", "vtab.md", "vtab.png"}
    euro = json.loads((tmp_path / "results" / "eurosat.json").read_text())
    assert euro["accuracy"] > 0.9
    assert (euro["samples"], euro["examples"]) == (20, "drawn")
    assert euro["made_with"]["finetune"]["steps"] == 30

    report = evaluate(vtab_arguments(tiny, root, tmp_path, "EuroSAT,kitti,Caltech101", keep_models="true"))
    assert trained[3:] == ["Caltech101"]
    assert report == json.loads((tmp_path / "vtab.json").read_text())
    assert list(report["accuracy"]) == ["Caltech101", "EuroSAT", "KITTI-Dist"]
    assert report["mean"] == pytest.approx(np.mean(list(report["accuracy"].values())))
    assert report["drawn_examples"] == ["EuroSAT", "KITTI-Dist"]
    assert (tmp_path / "caltech101" / "model.safetensors").exists()
    assert not (tmp_path / "caltech101" / "checkpoints").exists()
    table = (tmp_path / "vtab.md").read_text().splitlines()
    assert table[0].split(" | ")[2] == tiny.name
    assert "| EuroSAT | specialized | 100.0 | 96.7 | 96.5 | 95.6 |" in table
    assert (tmp_path / "vtab.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="eurosat"):
        evaluate(vtab_arguments(tiny, root, tmp_path, "EuroSAT", split="validation"))
    with pytest.raises(ValueError, match="Cats"):
        evaluate(vtab_arguments(tiny, root, tmp_path, "Cats"))


def test_a_task_has_its_augmentation_at_any_size(tiny, tmp_path):
    """Training uses random crops (448 to 384), evaluation a plain resize; the user's settings override both."""

    def settings_of(name, **finetune):
        settings = EvaluateSettings(model=str(tiny), protocol="vtab", output_dir=str(tmp_path), finetune=finetune)
        return vtab.Runner(settings, Accelerator(), read_table()).settings_of(TASKS[name])

    pets, location = settings_of("Pets"), settings_of("dSpr-Loc", image_size=[48, 36])
    assert (pets.crop, pets.flip, pets.image_size, pets.resize, pets.preset) == ("random", True, 384, [448, 448], "bit")
    assert (location.crop, location.flip, location.resize, location.preset) == ("none", False, [56, 42], "bit")
    changed = settings_of("sNORB-Azim", flip=True, resize=400, preset="timm")
    assert (changed.crop, changed.flip, changed.resize, changed.preset) == ("random", True, 400, "timm")


@pytest.mark.slow
def test_a_stopped_task_continues_from_its_checkpoint(tiny, root, tmp_path, capsys, monkeypatch):
    """On the 80 and 20 examples of a validation."""
    settings = vtab_arguments(tiny, root, tmp_path, "EuroSAT", split="validation")
    with monkeypatch.context() as patch:
        patch.setattr(vtab, "write_json", Mock(side_effect=KeyboardInterrupt))  # of the result
        with pytest.raises(KeyboardInterrupt):
            evaluate(settings)
    assert "EuroSAT: 80" in capsys.readouterr().out
    assert evaluate(settings)["accuracy"]["EuroSAT"] > 0.9
    assert "checkpoints" in capsys.readouterr().out
    assert json.loads((tmp_path / "results" / "eurosat.json").read_text())["samples"] == 20


def test_a_table_of_some_tasks():
    tasks = list(TASKS.values())[5:8]
    accuracies = {"Sun397": 0.5, "Camelyon": 0.75}
    summary = summarize(tasks, accuracies)
    assert summary["groups"] == {"natural": 0.5, "specialized": 0.75}
    assert (summary["mean"], summary["tasks_done"], summary["tasks"]) == (0.625, 2, 3)
    table = markdown_table(tasks, {"ours": accuracies, "nothing": {}})
    assert "| SVHN | natural | - | - |" in table
    assert "| 62.5 | - |" in table


@pytest.mark.slow
def test_a_result_of_other_data_or_another_model_is_refused(root, tmp_path):
    """Cases: replaced images, and an edited config.json with the same weights."""
    model, data = save_tiny(tmp_path / "model"), tmp_path / "data"
    shutil.copytree(root / "eurosat", data / "eurosat")
    settings = vtab_arguments(model, data, tmp_path / "out", "EuroSAT")
    report = evaluate(settings)
    assert evaluate(settings) == report
    train = data / "eurosat" / "train"
    shutil.copytree(train / "blue", train / "red", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="--output-dir"):
        evaluate(settings)
    shutil.copytree(root / "eurosat" / "train" / "red", train / "red", dirs_exist_ok=True)
    before = json.loads((model / "config.json").read_text())["hidden_act"]
    change_json(model / "config.json", hidden_act="relu")
    with pytest.raises(ValueError, match="eurosat"):
        evaluate(settings)
    change_json(model / "config.json", hidden_act=before)
    (data / "eurosat").rename(data / "elsewhere")
    assert evaluate(settings) == report  # of data that is no longer there
