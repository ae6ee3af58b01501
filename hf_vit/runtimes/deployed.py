"""An exported folder as a model with its image processor: for `hf_vit.load`, and what is built on it."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput

from ..files.image_sizes import output_size
from ..files.manifest import sha256_of
from ..models.image_processing_hf_vit import HfViTImageProcessor
from .program_model import ProgramModel
from .runner import Classifier

RUNTIMES = {".onnx": "ONNX Runtime", ".xml": "OpenVINO"}  # suffix of the program -> what computes it
_PROBLEMS = {"softmax": "single_label_classification", "sigmoid": "multi_label_classification", "none": "regression"}


class DeployedModel(ProgramModel):
    """The program of an exported folder: levels from 0 to 255 (batch, 3, height, width) -> logits or features.

    Args:
        deployed: the opened folder.
        output: "logits" or "pooler_output".
        config: labels, thresholds and image size.
    """

    def __init__(self, deployed: Classifier, output: str, config: PreTrainedConfig):
        file = deployed.folder / deployed.program["file"]
        self.runtime = RUNTIMES[file.suffix]
        output_class = ImageClassifierOutput if output == "logits" else BaseModelOutputWithPooling
        about = {"config": config, "name_or_path": str(deployed.folder), "dtype": torch.float32, "loss_function": None}

        def compute(levels: torch.Tensor) -> list[torch.Tensor]:
            return [torch.from_numpy(np.array(deployed.run(output, levels.numpy())))]

        super().__init__(SimpleNamespace(**about), output_class, [output], compute, sha256_of(file))
        self._deployed = deployed

    @property
    def base_model(self) -> ProgramModel:
        """The same program with its features as the output."""
        if not self.is_classifier:
            return self
        if "pooler_output" not in self._deployed.outputs:
            raise ValueError(f"the program in {self.name_or_path} computes logits only; export the model again")
        return DeployedModel(self._deployed, "pooler_output", self.config)


def load_deployed(folder: str | os.PathLike, arguments: dict[str, Any]) -> tuple[DeployedModel, HfViTImageProcessor]:
    """Load an exported folder: the model, and an image processor that makes its levels.

    Args:
        arguments: those of `hf_vit.load` by name; a program has none of them.

    Raises:
        ValueError: an argument is given, or the program takes images of any size.
    """
    for name, value in arguments.items():
        is_taken = name == "head" and value == "none"  # `base_model` is the features
        if value not in (None, False, "eager", "keep") and not is_taken:
            raise ValueError(f"{folder} is an exported program, which has no {name}; load the model itself")
    deployed = Classifier(folder)
    if deployed.program["resizes"]:
        raise ValueError(f"the program in {folder} resizes images itself; use hf-vit predict, or export a fixed size")
    processor = HfViTImageProcessor(**{**deployed.preprocessing, "do_rescale": False, "do_normalize": False})
    output = deployed.outputs[0]
    fields: dict[str, Any] = {"image_size": output_size(processor), "num_channels": 3}
    if output == "logits":
        thresholds = deployed.thresholds
        lowest = thresholds["auto"]
        fields |= {
            "id2label": deployed.labels,
            "problem_type": _PROBLEMS[deployed.program["scores"]],
            "label_thresholds": lowest if isinstance(lowest, list) else [lowest] * len(deployed.labels),
            "coverage_thresholds": thresholds["coverage"] or None,
            "rejection_thresholds": thresholds["rejection"],
        }
    return DeployedModel(deployed, output, PreTrainedConfig(**fields)), processor
