"""Kinds of text: config.json, preprocessor_config.json, recipes, AugReg's index, names of classes and maps of them."""

import json
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from PIL import Image
from transformers import ViTImageProcessorPil

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.catalog import best_augreg, search
from hf_vit.conversion.converting import convert, set_labels
from hf_vit.conversion.exporting import export
from hf_vit.data.labels import match_to_model
from hf_vit.data.splits import Split
from hf_vit.evaluation.classification import read_objectnet_classes, read_real_labels
from hf_vit.files.reading import parse_yaml
from hf_vit.inference.predictor import predict
from hf_vit.loading import load_processor, save_folder
from hf_vit.settings.fields import EvaluateSettings, FinetuneSettings, PretrainSettings
from hf_vit.settings.options import parse_settings
from hf_vit.settings.recipes import build, dump
from hf_vit.training.build import build_config

from ..doc_fixtures import write_index
from ..paths import PEERS, RECIPES
from ..tiny_models import save_tiny, tiny_bit
from .containers import SQUARE, files_below
from .gate import OUTPUT, Case, Kind
from .mutators import encode, mutate_bytes, mutate_json, mutate_lines, mutate_tree, odd_value, write_json, write_yaml

_PICTURE = Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3))


class Configuration(Kind):
    """The config.json of our folders, which predict, and of transformers' and timm's, which are converted."""

    name = "config"
    file = "input/config.json"

    def prepare(self, folder: Path) -> None:
        fields: dict[str, dict[str, Any]] = {
            "vit": {},
            "map": {"pooling": "map", "representation_size": 9},
            "hybrid": {"hybrid": True},
            "square": SQUARE,
        }
        self.originals = {name: files_below(save_tiny(folder / name, **values)) for name, values in fields.items()}
        save_folder(folder / "bit", tiny_bit(), HfViTImageProcessor("bit", size={"height": 43, "width": 64}))
        self.originals["bit"] = files_below(folder / "bit")
        model = HfViTForImageClassification.from_pretrained(folder / "square")
        export(model, folder / "transformers", "transformers", processor=HfViTImageProcessor("transformers", size=24))
        self.originals["transformers"] = files_below(folder / "transformers")
        self.originals["timm"] = files_below(PEERS / "timm_folder")
        self.trees = [json.loads(files[self.file]) for files in self.originals.values()]

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        is_other = name == "transformers" and random.random() < 0.5
        file = "input/preprocessor_config.json" if is_other else self.file
        text = mutate_json(self.originals[name][file], random, self.trees)
        return Case(name, {**self.originals[name], file: text})

    def use(self, case: Case, folder: Path) -> Any:
        if case.original == "timm":
            convert(folder / "input", position_grid=(5, 9), read_weights=False).save(folder / OUTPUT)
            return []
        if case.original == "transformers":
            convert(folder / "input", read_weights=False).save(folder / OUTPUT)
        try:
            return list(predict(folder / (OUTPUT if case.original == "transformers" else "input"), [_PICTURE]))
        finally:
            shutil.rmtree(folder / OUTPUT, ignore_errors=True)

    def judge(self, case: Case, result: Any) -> str | None:
        for prediction in (prediction for predictions in result for prediction in predictions):
            if not 0 <= prediction.score <= 1 or not isinstance(prediction.label, str):
                return f"a prediction is {prediction}"
        return None


class Processor(Kind):
    """The preprocessor_config.json of a folder, whose processor is given images."""

    name = "processor"
    file = "input/preprocessor_config.json"

    def prepare(self, folder: Path) -> None:
        whole = save_tiny(folder / "whole")
        self.config = (whole / "config.json").read_bytes()
        presets = ("vit_jax", "augreg", "timm", "transformers")
        processors: dict[str, Any] = {preset: HfViTImageProcessor(preset, size=24) for preset in presets}
        processors["native"] = HfViTImageProcessor("native", size={"height": 16, "width": 24}, patch_size=8)
        processors["theirs"] = ViTImageProcessorPil()
        self.originals = {}
        for name, processor in processors.items():
            processor.save_pretrained(folder / name)
            self.originals[name] = (folder / name / "preprocessor_config.json").read_bytes()
        self.trees = [json.loads(text) for text in self.originals.values()]

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        files = {"input/config.json": self.config, self.file: mutate_json(self.originals[name], random, self.trees)}
        return Case(name, files, random.choice(("pt", "np", None)))

    def use(self, case: Case, folder: Path) -> Any:
        processor = load_processor(folder / "input", HfViTConfig())
        if not isinstance(processor, HfViTImageProcessor):
            raise TypeError(f"the processor is {processor}")
        pictures = [_PICTURE, np.asarray(_PICTURE.rotate(90, expand=True))]
        return processor(pictures, return_tensors=case.value)["pixel_values"]

    def judge(self, case: Case, result: Any) -> str | None:
        finite = all(bool(np.isfinite(np.asarray(image)).all()) for image in result)
        return None if finite else "pixel values are not finite"


class Recipe(Kind):
    """A recipe, with its base and with settings of the command line, as far as a configuration."""

    name = "recipe"

    def prepare(self, folder: Path) -> None:
        names = (
            "small augreg_i1k finetune_vit_jax_augreg plain_s16 bit_hyperrule lora paper_jft finetune_table4 "
            "masked_patch_prediction digits"
        )
        self.files = {path.name: path.read_bytes() for path in RECIPES.glob("*.yaml")}
        self.originals = {f"{name}.yaml": yaml.safe_load(self.files[f"{name}.yaml"]) for name in names.split()}

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.originals))
        if random.random() < 0.3:
            text = mutate_bytes(self.files[name], random, [self.files[other] for other in self.originals])
        elif random.random() < 0.3:
            text = mutate_lines(self.files[name].decode(), random)
        else:
            text = write_yaml(mutate_tree(self.originals[name], random, list(self.originals.values())), random)
        arguments = ["--print_config"] if random.random() < 0.5 else ["--dataset=digits", "--output_dir=x", "--steps=9"]
        if random.random() < 0.3:
            options = "steps learning_rate config crop_area select crop image_size seed freeze".split()
            arguments += [f"--{random.choice(options)}", str(odd_value(random))]
        kind = FinetuneSettings if "finetune" in name or name == "lora.yaml" else PretrainSettings
        settings = random.choice((kind, kind, kind, EvaluateSettings))
        return Case(name, {**self.files, name: text}, (settings, arguments))

    def use(self, case: Case, folder: Path) -> Any:
        kind, arguments = case.value
        settings = parse_settings(kind, ["--recipe", str(folder / case.original), *arguments])
        text = dump(settings)
        if isinstance(settings, PretrainSettings) and (settings.variant or settings.config):
            build_config(settings)
        return settings, text

    def judge(self, case: Case, result: Any) -> str | None:
        settings, text = result
        settings.print_config = True
        again = build(type(settings), {**parse_yaml(text, "what was written"), "print_config": True})
        not_written = ("resume", "overwrite")
        vars(again).update({name: value for name, value in vars(settings).items() if name in not_written})
        return None if again == settings else "the recipe that is written says other settings"


class Index(Kind):
    """AugReg's index.csv, which is searched."""

    name = "index"

    def prepare(self, folder: Path) -> None:
        models = ("B_16", "R50_L_32", "Ti_16")
        names = [f"{model}-i21k-300ep-lr_0.001-aug_light{n}-wd_0.1-do_0.0-sd_0.0" for n in (0, 1) for model in models]
        rows = [(name, 0.5, resolution, 0.9) for name in names for resolution in (224, 384)]
        write_index(folder / "index.csv", rows)
        self.original = (folder / "index.csv").read_text()

    def make(self, random: Random) -> Case:
        way = random.choice(("bytes", "cells", "lines"))
        if way == "bytes":
            data = mutate_bytes(self.original.encode(), random)
        elif way == "cells":
            tree = mutate_tree([row.split(",") for row in self.original.split("\n")], random)
            rows = tree if isinstance(tree, list) else [tree]
            rows = [",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows]
            data = encode("\n".join(rows), random)
        else:
            data = mutate_lines(self.original, random)
        wanted = random.choice((None, "imagenet2012", "oxford_iiit_pet")), random.choice((None, 224, 384))
        return Case("index", {"index.csv": data}, (random.choice(("B/16", "Ti/16")), *wanted))

    def use(self, case: Case, folder: Path) -> Any:
        found = search(*case.value, index=folder / "index.csv")
        return found, best_augreg(case.value[0], folder / "index.csv")

    def judge(self, case: Case, result: Any) -> str | None:
        for found in result[0]:
            if not found.location.isprintable() or ".." in found.location:
                return f"it finds {found}"
        return None


class Labels(Kind):
    """A file with names of classes, which a model gets; the result is what its config.json says afterward."""

    name = "labels"

    def prepare(self, folder: Path) -> None:
        self.names = [f"Käse {number}, n0{number}" for number in range(11)]
        self.model = HfViTForImageClassification.from_pretrained(save_tiny(folder / "model"))

    def make(self, random: Random) -> Case:
        tree: Any = random.choice((self.names, {str(number): name for number, name in enumerate(self.names)}))
        file = random.choice(("labels.txt", "labels.json", "labels.json"))
        if file == "labels.txt":
            data = mutate_lines("\n".join(self.names), random)
        else:
            data = mutate_json(json.dumps(tree).encode(), random)
        return Case(file, {file: data})

    def use(self, case: Case, folder: Path) -> Any:
        set_labels(self.model, folder / case.original)
        self.model.config.save_pretrained(folder / OUTPUT)
        return dict(self.model.config.id2label), dict(HfViTConfig.from_pretrained(folder / OUTPUT).id2label)

    def judge(self, case: Case, result: Any) -> str | None:
        given, read = result
        if given != read:
            return f"the names {given} were written and read as {read}"
        return None if len(given) == 11 and all(name.strip() for name in given.values()) else f"the names are {given}"


class LabelMap(Kind):
    """Files that say which classes of data and model are the same, or which are right: YAML and JSON."""

    name = "label_map"

    def prepare(self, folder: Path) -> None:
        self.names = ["cat", "dog", "no", "1"]
        self.model = SimpleNamespace(id2label={0: "Cat", 1: "Dog", 2: "cow", 3: "1"}, num_labels=4)
        self.trees: dict[str, Any] = {
            "map": {"cat": "Cat", "dog": 1, "no": "cow"},
            "objectnet": {"cat": [0, 2], "dog": [1]},
            "real": [[0], [], [1, 2], [3]],
        }

    def make(self, random: Random) -> Case:
        name = random.choice(list(self.trees))
        tree = mutate_tree(self.trees[name], random, list(self.trees.values()))
        text = write_json(tree, random) if name == "real" or random.random() < 0.3 else write_yaml(tree, random)
        return Case(name, {"file": text})

    def use(self, case: Case, folder: Path) -> Any:
        place = str(folder / "file")
        if case.original == "real":
            return read_real_labels(place)
        if case.original == "objectnet":
            return list(read_objectnet_classes(place).values())
        split = Split(samples=None, image_column="image", label_column="label", label_names=self.names, num_labels=4)
        return [match_to_model(split, self.model, "the model", place).numbers or []]

    def judge(self, case: Case, result: Any) -> str | None:
        odd = [number for numbers in result for number in numbers if type(number) is not int or not 0 <= number < 10**6]
        return f"a class number is {odd[0]!r}" if odd else None
