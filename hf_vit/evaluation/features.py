"""Features of images, computed once per image and cached on disk if there is an output folder.

`output_dir/features/<digest>/` contains them in pieces. An interrupted run resumes from the pieces, and another
protocol on the same model and images reuses them.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from ..data.fingerprint import fingerprint_data, fingerprint_model
from ..data.labels import match_to_split, require_labels
from ..data.splits import Split, open_named
from ..files.output import new_file, write_text
from ..loading import local_model
from ..settings.fields import EvaluateSettings
from .models import load_evaluated
from .predictions import EvaluationBatches, collect, model_inputs

_PIECE = 8192  # images per stored piece


@dataclass
class Features:
    """Features of the readable images, in the order of the data set."""

    values: torch.Tensor  # (images, features) float32
    labels: torch.Tensor  # (images,) class numbers
    index: np.ndarray  # (images,) indices in the split
    skipped: int = 0  # number of unreadable images

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and labels of the readable images with these indices in the split."""
        positions = np.searchsorted(self.index, np.intersect1d(index, self.index))
        return self.values[positions], self.labels[positions]


class Extractor:
    """Frozen model that computes features of images."""

    def __init__(self, settings: EvaluateSettings, accelerator: Accelerator):
        assert settings.model
        self.settings, self.accelerator = settings, accelerator
        self.model, self.processor = load_evaluated(settings, accelerator, needs_head=False)
        self.config = self.model.config
        self.model_fingerprint = fingerprint_model(str(local_model(settings.model))) if settings.output_dir else {}
        has_tokens = hasattr(self.config, "num_hidden_layers")
        available = {
            "pre_logits": getattr(self.config, "pooling", "cls") != "none",
            "class_token": has_tokens and getattr(self.config, "num_prefix_tokens", 1) > 0,
            "patch_mean": has_tokens,
        }
        if not available[settings.features]:
            others = " or ".join(name for name, has in available.items() if has)
            raise ValueError(f"{settings.model} has no {settings.features}; choose --features {others}")
        if (settings.feature_layer or 0) > (layers := getattr(self.config, "num_hidden_layers", 0)):
            raise ValueError(f"--feature-layer is {settings.feature_layer}, but {settings.model} has {layers} layers")

    def extract(self, split: Split, name: str, wanted: np.ndarray | None = None) -> Features:
        """Compute the features of a split, or load them if they are stored.

        Args:
            split: the images.
            name: name of the split.
            wanted: indices of images; None for all.

        Raises:
            ValueError: features are not finite, or no image can be read.
        """
        wanted = np.arange(len(split)) if wanted is None else np.unique(wanted)
        folder, pieces = self._folder_of(split, name), []
        for file in sorted(folder.glob("*.safetensors")) if folder is not None else ():
            if self.settings.overwrite:
                file.unlink(missing_ok=True)
            else:
                pieces.append(load_file(file))
        known = np.concatenate([piece["index"].numpy() for piece in pieces]) if pieces else np.array([], int)
        self.accelerator.wait_for_everyone()  # before the main process writes more pieces
        missing = np.setdiff1d(wanted, known)
        for start in range(0, len(missing), _PIECE):
            piece = self.compute(split, missing[start : start + _PIECE])
            if folder is not None and self.accelerator.is_main_process:
                with new_file(folder / f"{piece['index'].min():09}-{len(list(folder.glob('*')))}.safetensors") as file:
                    save_file(piece, file)
            pieces.append(piece)
        if not pieces:
            raise ValueError(f"split {name} is empty")
        columns = ("index", "label", "features")
        index, labels, values = (torch.cat([piece[name] for piece in pieces]) for name in columns)
        order = index.argsort()
        order = order[torch.isin(index[order], torch.from_numpy(wanted)) & ~values[order, 0].isnan()]
        if not len(order):
            raise ValueError(f"none of {len(wanted)} images of split {name} can be read")
        return Features(values[order], labels[order], index[order].numpy(), len(wanted) - len(order))

    def _folder_of(self, split: Split, name: str) -> Path | None:
        """Return the folder of the features of a split, named by a hash of everything that they depend on."""
        if not self.settings.output_dir:
            return None
        chosen = ["dataset", "dataset_config", "image_column", "label_column", "image_size", "mixed_precision"]
        chosen += ["features", "feature_layer", "patch_size", "backend"]
        about = {
            "model": self.model_fingerprint,
            "data": fingerprint_data(split),
            "processor": self.processor.to_dict(),
            "split": name,
            **{setting: getattr(self.settings, setting) for setting in chosen},
        }
        text = json.dumps(about, sort_keys=True, default=str)
        folder = Path(self.settings.output_dir) / "features" / hashlib.sha256(text.encode()).hexdigest()[:16]
        if self.accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "about.json", text + "\n")
        return folder

    def compute(self, split: Split, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """Compute the features of the images with these indices; those of unreadable images are NaN."""
        part = replace(split, samples=split.samples.select(numbers))
        batches = EvaluationBatches(self.settings, part, self.processor, self.config, self.accelerator)

        def choose(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            which = self.settings.features, self.settings.feature_layer
            return {"features": _choose_features(self.model, model_inputs(batch), *which).float()}

        columns = collect(self.accelerator, self.model, batches, choose)
        is_finite = np.isfinite(columns["features"]).all(axis=1)
        if not is_finite.all():
            first = numbers[columns["index"][~is_finite][0]]
            raise ValueError(f"features of {self.settings.model} are NaN or infinite, first for image {first}")
        features = torch.full((len(numbers), columns["features"].shape[1]), torch.nan)
        features[columns["index"]] = torch.from_numpy(columns["features"])
        labels = torch.full((len(numbers),), -1)
        labels[columns["index"]] = torch.from_numpy(columns["label"])
        return {"features": features, "label": labels, "index": torch.from_numpy(numbers)}


def _choose_features(model: Any, inputs: dict[str, torch.Tensor], which: str, layer: int | None) -> torch.Tensor:
    """Compute (batch, features) by one forward.

    Args:
        which: "pre_logits" (the head's input), "class_token", or "patch_mean" (the mean of the patches' tokens).
        layer: use the tokens after this number of layers, through the final LayerNorm; None: after all layers.
    """
    outputs = model(**inputs, output_hidden_states=layer is not None)
    if which == "pre_logits" and layer is None:
        return outputs.pooler_output.flatten(1)
    mask, prefix = inputs.get("pixel_attention_mask"), getattr(model.config, "num_prefix_tokens", 1)
    tokens = outputs.last_hidden_state if layer is None else outputs.hidden_states[layer]
    if which == "pre_logits":
        mask = None if mask is None else torch.nn.functional.pad(mask, (prefix, 0), value=1)
        if model.config.norm_after_pooling:
            return model.pooler(tokens, mask, model.layernorm)
        return model.pooler(model.layernorm(tokens), mask)
    tokens = tokens if layer is None else model.layernorm(tokens)
    if which == "class_token":
        return tokens[:, 0]
    patches = tokens[:, prefix:]
    weights = patches.new_ones(patches.shape[:2]) if mask is None else mask.to(patches.dtype)
    return (patches * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True)


def open_train_and_test(settings: EvaluateSettings) -> tuple[Split, Split]:
    """Open the training split and the test split, with one label per image and the same classes.

    Raises:
        ValueError: images have no label or several, or the classes differ.
    """
    names = settings.train_split, settings.split or "test"
    train, test = (open_named(settings, name) for name in names)
    for split, name in zip((train, test), names, strict=True):
        require_labels(split, name)
        split.class_numbers(f"--protocol is {settings.protocol}")
    if train.label_names is None and test.label_names is None:
        train.num_labels = test.num_labels = max(train.num_labels, test.num_labels)
    return train, match_to_split(train, test, settings.train_split, settings.split or "test")
