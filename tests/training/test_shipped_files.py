"""Every recipe says what the paper's tables say, and every launcher template is one Accelerate understands.

The numbers here are the paper's, by table; recipes with a public original are compared in test_recipe_audit.py.
"""

from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from hf_vit import HfBiTConfig, HfViTConfig, HfViTForImageClassification
from hf_vit.settings.fields import FinetuneSettings, PretrainSettings
from hf_vit.settings.recipes import build, read_recipe
from hf_vit.training.build import build_config

from ..paths import RECIPES, ROOT

NAMES = sorted(path.name for path in RECIPES.glob("*.yaml"))
BASES = ("paper.yaml", "finetune_paper.yaml", "augreg.yaml")  # say neither how long nor on what


def resolve(name: str, model_folder: str = "model", **select: str) -> Any:
    """The settings of a recipe."""
    values = read_recipe(RECIPES / name, select)
    required = {"dataset": "data", "output_dir": "out", **values}
    if "objective" in values:
        return build(PretrainSettings, required)
    return build(FinetuneSettings, {"model": model_folder, **required})


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / name).read_text())


def options(name: str) -> dict[str, dict]:
    return read(name).get("options", {})


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(BASES)))
def test_every_recipe_and_every_level_of_it_is_valid(name):
    needed = {"size": "large"} if name == "bit_hyperrule.yaml" else {}  # without a size, it has no length
    resolve(name, **needed)
    for group, levels in options(name).items():
        for level in levels:
            resolve(name, **{**needed, group: str(level)})


def test_paper_common_settings():
    """Section 4.1 of arXiv 2010.11929, and the authors' answers in issues 2, 34 and 62 of their repository."""
    for name in ("paper_i21k.yaml", "paper_i1k.yaml", "paper_jft.yaml"):
        settings = resolve(name)
        assert (settings.optimizer, settings.adam_beta1, settings.adam_beta2) == ("adamw", 0.9, 0.999)
        assert (settings.batch_size, settings.image_size, settings.warmup_steps) == (4096, 224, 10_000)
    assert resolve("paper_i21k.yaml").final_learning_rate == 1e-5
    assert (resolve("paper_i21k.yaml").loss, resolve("paper_i21k.yaml").head_bias) == ("sigmoid", -10)
    assert (resolve("paper_i1k.yaml").max_grad_norm, resolve("paper_i21k.yaml").max_grad_norm) == (1, None)


# Table 3 of arXiv 2010.11929: recipe, epochs, base learning rate, decay, weight decay, dropout, and rows with these
TABLE_3 = [
    ("paper_jft.yaml", 7, 1e-3, "linear", 0.1, 0, ["R50x1", "R50x2"]),
    ("paper_jft.yaml", 7, 8e-4, "linear", 0.1, 0, ["B/16", "B/32", "R101x1", "R50+B/16", "R50+B/32"]),
    ("paper_jft.yaml", 7, 6e-4, "linear", 0.1, 0, ["L/32", "R152x1", "R152x2"]),
    ("paper_jft.yaml", 7, 4e-4, "linear", 0.1, 0, ["L/16", "R50+L/16"]),
    ("paper_jft.yaml", 7, 2e-4, "linear", 0.1, 0, ["R50+L/32"]),
    ("paper_jft.yaml", 14, 4e-4, "linear", 0.1, 0, ["L/16-14ep", "R50+L/16-14ep"]),
    ("paper_jft.yaml", 14, 3e-4, "linear", 0.1, 0, ["H/14"]),
    ("paper_i21k.yaml", 90, 1e-3, "linear", 0.03, 0.1, ["B/16", "B/32", "L/16", "L/32"]),
    ("paper_i21k.yaml", 30, 1e-3, "linear", 0.03, 0.1, ["L/16-30ep", "L/32-30ep"]),
    ("paper_i1k.yaml", 300, 3e-3, "cosine", 0.3, 0.1, ["B/16", "B/32", "L/16", "L/32"]),
]


@pytest.mark.parametrize(("recipe", "epochs", "rate", "decay", "weight_decay", "dropout", "rows"), TABLE_3)
def test_table_3(recipe, epochs, rate, decay, weight_decay, dropout, rows):
    for row in rows:
        settings = resolve(recipe, model=row)
        assert (settings.epochs, settings.learning_rate, settings.schedule) == (epochs, rate, decay)
        assert (settings.weight_decay, settings.dropout) == (weight_decay, dropout)
        assert settings.variant == row.removesuffix("-14ep").removesuffix("-30ep")


def test_variants_of_the_recipes_build():
    built = {}
    for recipe in ("paper_i21k.yaml", "paper_i1k.yaml", "paper_jft.yaml"):
        for row in options(recipe).get("model", {}):
            settings = resolve(recipe, model=row)
            config = built[settings.variant] = build_config(settings)
            assert config.image_size == 224
            if isinstance(config, HfViTConfig):
                assert config.hidden_dropout_prob == settings.dropout
                assert config.representation_size == config.hidden_size  # section 3.1: one tanh hidden layer
    resnets = {variant for variant, config in built.items() if isinstance(config, HfBiTConfig)}
    assert resnets == {"R50x1", "R50x2", "R101x1", "R152x1", "R152x2"}


# Table 4: steps and the grid of learning rates; the share of train that is a dev set (appendix B.1.1)
TABLE_4 = [
    ("imagenet", 20_000, {0.003, 0.01, 0.03, 0.06}, 99),
    ("cifar100", 10_000, {0.001, 0.003, 0.01, 0.03}, 98),
    ("cifar10", 10_000, {0.001, 0.003, 0.01, 0.03}, 98),
    ("pets", 500, {0.001, 0.003, 0.01, 0.03}, 90),
    ("flowers", 500, {0.001, 0.003, 0.01, 0.03}, 90),
]


@pytest.mark.parametrize(("dataset", "steps", "rates", "share"), TABLE_4)
def test_table_4(dataset, steps, rates, share):
    recipe = "finetune_table4.yaml"
    settings = resolve(recipe, dataset=dataset)
    assert (settings.optimizer, settings.momentum, settings.batch_size) == ("sgd", 0.9, 512)
    assert (settings.schedule, settings.weight_decay, settings.max_grad_norm) == ("cosine", 0, 1)
    assert (settings.image_size, settings.steps) == (384, steps)
    assert (settings.train_split, settings.eval_split) == (f"train[:{share}%]", f"train[{share}%:]")
    assert {resolve(recipe, dataset=dataset, rate=str(rate)).learning_rate for rate in rates} == rates


def test_vtab_and_the_sweep_of_augreg():
    """VTAB has one setting. Section 3.3 of arXiv 2106.10270: regularization, weight decay, 30 epochs besides 300."""
    settings = resolve("finetune_vtab.yaml")
    assert (settings.steps, settings.learning_rate, settings.image_size) == (2500, 0.01, 384)
    full = resolve("augreg_i21k.yaml", regularization="full", weight_decay="0.03", epochs="30")
    assert (full.dropout, full.drop_path, full.weight_decay, full.epochs) == (0.1, 0.1, 0.03, 30)


# Table 8: rows, and columns; parameters of B/16 without position embeddings, and of these
WITHOUT_POSITIONS = 86_567_656 + 768 * 769 - 197 * 768  # the head has a hidden layer
TABLE_8 = {
    "none": 0,
    "1d": 197 * 768,
    "1d-every-layer": 12 * 197 * 768,
    "1d-shared": 197 * 768,
    "2d": 768 + (14 + 14) * 384,
    "2d-every-layer": 12 * (768 + (14 + 14) * 384),
    "2d-shared": 768 + (14 + 14) * 384,
    "relative": 12 * (2 * 196 - 1 + 3) * 64,
}


@pytest.mark.parametrize(("row", "positions"), TABLE_8.items())
def test_table_8(row, positions):
    settings = resolve("paper_jft.yaml", positions=row)
    assert (settings.variant, settings.epochs, settings.learning_rate) == ("B/16", 7, 8e-4)
    with torch.device("meta"):
        model = HfViTForImageClassification(build_config(settings))
    classes = model.config.num_labels
    assert model.num_parameters() == WITHOUT_POSITIONS + positions - (1000 - classes) * 769


def test_table_8_has_the_same_rows_on_small_images():
    assert options("small.yaml")["positions"] == options("paper_jft.yaml")["positions"]
    assert options("paper_jft.yaml")["positions"].keys() == TABLE_8.keys()
    config = build_config(resolve("small.yaml", positions="2d-shared"))
    assert (config.position_embedding_type, config.hidden_size) == ("learned2d", 64)


def test_figure_9():
    """Section D.3: the class token goes through an MLP with one hidden layer, the mean through a linear layer."""
    heads = {"class_token": ("cls", 768, 8e-4), "mean": ("mean", None, 3e-4), "mean-8e-4": ("mean", None, 8e-4)}
    for head, (pooling, width, rate) in heads.items():
        settings = resolve("paper_jft.yaml", head=head)
        config = build_config(settings)
        assert (config.pooling, config.representation_size, settings.learning_rate) == (pooling, width, rate)
    settings = resolve("small.yaml", head="mean", rate="0.01")
    assert (build_config(settings).pooling, settings.learning_rate) == ("mean", 0.01)


@pytest.mark.parametrize(("data", "weight_decay"), [("i1k", 0.3), ("i21k", 0.03)])
def test_figure_3_starts_at_the_best_of_table_3(data, weight_decay):
    settings = resolve(f"paper_{data}.yaml")
    assert (settings.weight_decay, settings.dropout, settings.label_smoothing) == (weight_decay, 0.1, 0)
    for group in ("weight_decay", "dropout", "label_smoothing"):
        assert options(f"paper_{data}.yaml")[group] == options("small.yaml")[group]


def test_figure_4():
    """Section 4.3: random subsets of 9, 30 and 90 million images, and the same settings for all."""
    for millions in (9, 30, 90):
        assert resolve("paper_jft.yaml", images=f"{millions}M").train_split == f"train[:{millions}000000]"
    settings = resolve("paper_jft.yaml", images="300M", model="L/16")
    assert (settings.train_split, settings.learning_rate, settings.epochs) == ("train", 4e-4, None)
    assert settings.steps == int(7 * 303e6 / settings.batch_size)
    half, whole = (build_config(resolve("paper_jft.yaml", model=model)) for model in ("b/32", "B/32"))
    assert (2 * half.hidden_size, 2 * half.intermediate_size) == (whole.hidden_size, whole.intermediate_size)
    assert half.representation_size == half.hidden_size


def test_table_7():
    """SGD as section 3.3 of arXiv 1912.11370 has it: rate 0.03 for 256 images, decay after these of its 40 epochs."""
    for model in ("R50x1", "R152x2"):
        assert resolve("paper_jft.yaml", optimizer="adam", model=model) == resolve("paper_jft.yaml", model=model)
        settings = resolve("paper_jft.yaml", optimizer="sgd", model=model)
        assert (settings.optimizer, settings.momentum, settings.weight_decay) == ("sgd", 0.9, 1e-4)
        assert settings.learning_rate == pytest.approx(0.03 * settings.batch_size / 256)
        assert settings.warmup_steps == 5000
        shares = [step * settings.batch_size / (7 * 303e6) for step in settings.decay_steps]
        assert shares == pytest.approx([10 / 40, 23 / 40, 30 / 40, 37 / 40], abs=1e-5)


def test_figure_8_changes_one_dimension_of_the_base():
    """Section D.2: 8 layers, width 1024, MLP 2048, patch 32; depth up to 64."""
    fields = {"depth": "num_hidden_layers", "width": "hidden_size", "MLP": "intermediate_size", "patch": "patch_size"}
    base = build_config(resolve("paper_jft.yaml", model="8x1024/32"))
    assert isinstance(base, HfViTConfig)
    assert [getattr(base, field) for field in fields.values()] == [8, 1024, 2048, 32]
    assert base.representation_size == 1024
    changes = [change.split("-") for change in options("paper_jft.yaml")["change"] if change != "none"]
    assert max(int(value) for dimension, value in changes if dimension == "depth") == 64
    for dimension, value in changes:
        config = build_config(resolve("paper_jft.yaml", model="8x1024/32", change=f"{dimension}-{value}"))
        values = {field: getattr(config, field) for field in fields.values()}
        assert values == {field: getattr(base, field) for field in fields.values()} | {fields[dimension]: int(value)}
        assert config.hidden_size // config.num_attention_heads == 64
        assert config.image_size % config.patch_size == 0


def test_axial_models():
    """A ViT has every layer twice."""
    settings = resolve("paper_jft.yaml", model="AxialResNet")
    config = build_config(settings)
    assert (settings.variant, settings.epochs, settings.learning_rate) == ("R50x1", 7, 1e-3)
    assert (config.spatial_mixing, config.depths, config.embedding_size) == ("axial_attention", [3, 4, 6, 3], 64)
    for patch_size in (32, 16):
        config = build_config(resolve("paper_jft.yaml", model=f"Axial-ViT-B/{patch_size}"))
        assert (config.representation_size, config.patch_size) == (768, patch_size)  # as the paper's other models
        assert (config.attention_axes, config.num_hidden_layers, config.use_cls_token) == ("axial", 24, False)


def test_masked_patch_prediction():
    settings = resolve("masked_patch_prediction.yaml")
    assert (settings.corruption, settings.mask_share, settings.random_patch_share) == (0.5, 0.8, 0.1)
    assert (settings.steps, settings.learning_rate, settings.schedule) == (1_000_000, 2e-4, "cosine")
    assert (settings.batch_size, settings.warmup_steps, settings.variant) == (4096, 10_000, "B/16")
    assert resolve("masked_patch_prediction.yaml", target="pixels", length="100k").steps == 100_000


@pytest.mark.parametrize("path", sorted((ROOT / "training" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_understands_the_template(path):
    arguments = launch_command_parser().parse_args(["--config_file", str(path), "training/finetune.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.num_processes == yaml.safe_load(path.read_text())["num_processes"]
