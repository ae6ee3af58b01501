"""Model cards: rendering from a folder, and checks for missing information."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from hf_vit import HfViTConfig, HfViTImageProcessor, HfViTModel
from hf_vit.catalog import released, released_facts, with_cards
from hf_vit.cli import build_parser, main
from hf_vit.conversion import convert
from hf_vit.files.readme import BEGIN, END
from hf_vit.hub.cards import check_card, render_card, render_folder_card, split_readme
from hf_vit.hub.published_cards import folder_name
from hf_vit.loading import save_folder

from ..paths import ROOT

TI_16 = "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, str]:
    """Cards of all published checkpoints by name of the folder, written by the command."""
    folder = tmp_path_factory.mktemp("cards")
    assert main(["card", "--published", str(folder)]) == 0
    cards = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.glob("*/*.md")}
    names = {f"{entry.family}/{folder_name(entry)}.md" for entry in with_cards()}
    assert cards.keys() == names
    assert len(names) == 141
    return {Path(name).stem: text for name, text in cards.items()}


def test_cards_of_published_checkpoints_have_no_problems(published):
    for entry in with_cards():
        name, card = folder_name(entry), published[folder_name(entry)]
        assert check_card(card) == [], name
        command = re.search(r"^hf-vit (convert .*)$", card, re.MULTILINE)[1]
        arguments = build_parser().parse_args(shlex.split(command))
        assert (arguments.source, str(arguments.output)) == (entry.location, name)
        for result in entry.facts.get("results", ()):
            assert re.search(rf"\| {result['value']}% \| .* \| \[.*\]\({result['source']['url']}\)", card), name
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert len(name) <= 96


def test_the_cards_in_the_repository_are_up_to_date(published):
    paths = sorted((ROOT / "model_cards").glob("*/*.md"))
    assert paths
    for path in paths:
        assert path.read_text() == published[path.stem], "run: hf-vit card --published model_cards"


def test_the_cards_of_families_with_a_name_pattern(published):
    """Sources: PaliGemma's paper (400 million parameters, width 2,048 of Gemma 2B); Oxford-IIIT Pet has 37 classes."""
    cards = {entry.family: published[folder_name(entry)] for entry in with_cards() if entry not in released()}
    assert cards.keys() == released_facts()["patterns"].keys()
    assert re.search(r" 41\d,\d{3},\d{3} ", cards["paligemma"])
    assert "(1, patches, 2048)" in cards["paligemma"]
    assert re.search(r"\| 93,\d{3},\d{3} \|", published["clippo-b16-yfcc100m-clippo"])  # CLIPPO's README: 93 million
    assert " 37 " in cards["bit_vtab"]


def test_a_card_has_the_source_and_who_measured_each_result(goldens, tmp_path):
    model, processor = convert(goldens / "vit_token.npz")
    model.conversion_record["source"] = f"gs://vit_models/augreg/{TI_16}--imagenet2012-steps_20k-lr_0.03-res_384.npz"
    save_folder(tmp_path / "ti16", model, processor)
    card = render_folder_card(tmp_path / "ti16")
    assert check_card(card) == []
    metadata = split_readme(card)[0]
    assert metadata["license"] == "apache-2.0"
    assert metadata["datasets"] == ["imagenet-21k", "ILSVRC/imagenet-1k"]
    (result,) = metadata["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 78.22
    assert "recommended AugReg checkpoints" in result["source"]["name"]
    assert "| ImageNet-1k | accuracy | 78.22% | this model | [README of google-research" in card
    assert model.conversion_record["sha256"] in card
    (tmp_path / "secret").mkdir()
    shutil.copyfile(goldens / "vit_token.npz", tmp_path / "secret" / "mine.npz")
    model, processor = convert(tmp_path / "secret" / "mine.npz")
    save_folder(tmp_path / "mine", model, processor)
    card = render_folder_card(tmp_path / "mine")
    assert "hf-vit convert mine.npz mine\n" in card
    assert "secret" not in card


def card_of_run(folder, **run) -> str:
    """Return the card of the folder of a training run, without problems."""
    (folder / "card_data.json").write_text(json.dumps(run))
    card = render_folder_card(folder, license="mit")
    assert check_card(card) == []
    return card


def test_a_card_of_a_training_run(folder):
    """Absolute paths are those of another machine, and a folder has no address on the Hub."""
    command = "hf-vit finetune ti16 /home/me/pictures --exclude=/home/me/a.csv --output-dir 'C:\\Users\\me\\run'"
    settings = {"exclude": ["/home/me/a.csv"], "teacher": "~/home/teacher"}
    run = {"base_model": "./runs/before", "dataset": "/home/me/pictures", "metrics": {"accuracy": 0.5}}
    card = card_of_run(folder, **run, settings=settings, command=command)
    metadata = split_readme(card)[0]
    assert not {"base_model", "datasets"} & set(metadata)  # folders are no names on the Hub
    assert metadata["model-index"][0]["results"][0]["dataset"]["type"] == "pictures"
    assert "| pictures | accuracy | 50.00% |" in card
    assert "hf-vit finetune ti16 pictures --exclude=a.csv --output-dir run" in card
    assert not any(word in card for word in ("home", "Users", "huggingface.co/folder"))


def test_a_card_shows_classes_and_figures_of_its_run(folder):
    """A Markdown renderer shows that class names are plain text."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    run = {"dataset": "me/garden", "metrics": {"accuracy": 0.8, "samples": 1503}, "num_classes": 2}
    run |= {"command": "hf-vit finetune --eval-split 'train[:20%]'", "date": "2026-11-22"}
    before = card_of_run(folder, **run)
    run["classes"] = [{"name": "<b>|*a*", "images": 1500, "right": 1000}, {"name": "b_1_", "images": 3, "right": 3}]
    run["figures"] = ["confusion_matrix.png", "learning_curve.png"]
    card = card_of_run(folder, **run)
    assert card.count("train[:20%]") == 1  # the command stands once, below the table
    assert "| me/garden | images | 1,503 |" in card
    assert "2026-11-22" in card
    html = markdown.render(card)
    cells = re.findall(r"<td>(.*?)</td>", html.split("by class:")[1].split("</table>")[0])
    assert cells == ["&lt;b&gt;|*a*", "1,500", "66.7%", "b_1_", "3", "100.0%"]
    assert re.findall(r'<img src="(.*?)" alt=".+?"', html) == run["figures"]
    assert [line for line in before.splitlines() if line not in card.splitlines()] == []
    card = card_of_run(folder, **{**run, "num_classes": 37, "mistaken": [["a", "b", 4]], "figures": []})
    assert "| a | b | 4 |" in card
    assert "![" not in card


def test_rendering_again_changes_nothing_and_keeps_own_text(folder):
    card = render_folder_card(folder, license="mit")
    mine = card.replace(BEGIN, f"Mine.\n\n{BEGIN}") + "\nMine too.\n"
    mine = mine.replace("license: mit", "license: other\nlicense_name: garden\ndatasets: [me/garden]\nlanguage: en")
    (folder / "README.md").write_text(mine)
    again = render_folder_card(folder)
    (folder / "README.md").write_text(again)
    assert render_folder_card(folder) == again
    (folder / "README.md").write_bytes(b"\xef\xbb\xbf" + again.replace("\n", "\r\n").encode())  # of Windows
    assert render_folder_card(folder) == again
    metadata, before, after = split_readme(again)
    assert (before, after) == ("Mine.", "Mine too.")
    assert (metadata["license"], metadata["license_name"], metadata["language"]) == ("other", "garden", "en")
    assert metadata["datasets"] == ["me/garden"]
    assert again.count(BEGIN) == again.count(END) == 1


def test_convert_writes_a_readme_with_loading_code(goldens, tmp_path, run_command):
    folder = tmp_path / "folder"
    command = ["convert", goldens / "vit_token.npz", folder]
    run_command(command)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(code.replace("FOLDER", str(folder)), names)
    assert type(names["model"]).__name__ == "HfViTForImageClassification"
    run_command([*command, "--overwrite"])  # what convert wrote is nobody's own text
    run_command(["card", folder, "--write", "--license", "mit"])
    card = (folder / "README.md").read_text()
    assert card.count(BEGIN) == 1
    (folder / "README.md").write_text(f"Mine.\n\n{BEGIN}\n{END}\n")
    assert "README.md" in run_command([*command, "--overwrite"], status=2)


def test_a_readme_without_our_part_is_kept_above_it(folder):
    (folder / "README.md").write_text("---\ntags: flowers\n---\n# My model\n\nIt is mine.\n")
    card = render_folder_card(folder)
    metadata, before, _ = split_readme(card)
    assert before == "# My model\n\nIt is mine."
    assert metadata["tags"] == ["flowers", "hf_vit", "vit", "vision"]
    assert "\n# folder\n" not in card


@pytest.mark.parametrize("bare", [False, True])
def test_the_example_of_a_card_runs(folder, bare, capsys, monkeypatch, tmp_path):
    if bare:
        model = HfViTModel.from_pretrained(folder)
        save_folder(folder, model, HfViTImageProcessor.from_pretrained(folder), overwrite=True)
    Image.effect_noise((45, 31), 80).save(tmp_path / "cats.png")
    example = re.search(r"```python\n(.*?)```", render_folder_card(folder), re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    with torch.inference_mode():
        exec(example.replace("photo.jpg", "cats.png"), {})
    printed = capsys.readouterr().out.strip()
    names = HfViTConfig.from_pretrained(folder).id2label.values()
    assert printed == "torch.Size([1, 14])" if bare else printed in names


GOOD = f"---\nlicense: apache-2.0\n---\n{BEGIN}\n## Compute\n{END}\n"


@pytest.mark.parametrize(
    ("good", "bad"),
    [("license: apache-2.0\n", ""), ("apache-2.0", "Apache 2.0"), ("Compute", "[More Information Needed]")],
)
def test_problems_of_a_card_are_found(good, bad):
    assert check_card(GOOD) == []
    (problem,) = check_card(GOOD.replace(good, bad, 1))
    assert (bad.strip("[]") or "license") in problem


def test_card_command(folder, run_command):
    assert 'from_pretrained("me/vit")' in run_command(["card", folder, "--license", "mit", "--name", "me/vit"])
    assert "license" in run_command(["card", folder, "--write"], status=2)
    texts = {name: (folder / name).read_text() for name in ("config.json", "preprocessor_config.json")}
    assert (folder / "README.md").read_text() == render_card(texts, "folder")
    assert "config.json" in run_command(["card", folder.parent], status=2)
