"""Every export is opened by its reader first: a writer that writes something else leaves nothing behind."""

import copy
import importlib

import pytest
import torch

from hf_vit import HfViTImageProcessor
from hf_vit.conversion import ConversionError, export

from ..tiny_models import tiny


def other_weights(model):
    other = copy.deepcopy(model)
    torch.nn.init.normal_(other.classifier.weight, std=5)
    return other


def of_another_model(function):
    """The function, called with other weights; the rest of the export sees the model itself."""
    return lambda model, *arguments, **options: function(other_weights(model), *arguments, **options)


def of_other_arrays(function):
    """A writer of a file that doubles the arrays; the first of its arguments that is no path has them."""

    def write(*arguments, **options):
        doubled = []
        for argument in arguments:
            if isinstance(argument, dict):
                argument = {name: 2 * array for name, array in argument.items()}
            elif hasattr(argument, "__iter__"):
                argument = [(name, 2 * array) for name, array in argument]
            doubled.append(argument)
        return function(*doubled, **options)

    return write


def of_another_epsilon(function):
    """transformers' model with a setting that no array shows."""

    def build(model):
        theirs = function(model)
        theirs.config.layer_norm_eps = 1.0
        return theirs

    return build


# format, name of the output, module and function that goes wrong, and how
FAULTS = [
    ("jax", "model.npz", "conversion.jax.checkpoints.write_npz", of_other_arrays),
    ("timm", "model.safetensors", "conversion.timm.save_file", of_other_arrays),
    ("timm", "folder", "conversion.timm.save_file", of_other_arrays),
    ("transformers", "folder", "conversion.transformers._their_model", of_another_model),
    ("transformers", "folder", "conversion.transformers._their_model", of_another_epsilon),
    ("torch-export", "model.pt2", "runtimes.programs.trace", of_another_model),
    pytest.param("onnx", "model.onnx", "runtimes.programs.make_onnx", of_another_model, marks=pytest.mark.slow),
    pytest.param("onnx", "folder", "runtimes.deployment.make_onnx", of_another_model, marks=pytest.mark.slow),
    pytest.param("openvino", "folder", "runtimes.deployment.make_openvino", of_another_model, marks=pytest.mark.slow),
    pytest.param("web", "folder", "runtimes.web.make_any_size_onnx", of_another_model, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("to", "name", "writer", "fault"), FAULTS)
def test_a_wrong_file_is_an_error(tmp_path, monkeypatch, request, to, name, writer, fault):
    options = {"runtime": request.getfixturevalue("web_runtime")} if to == "web" else {}
    model = tiny(num_hidden_layers=1)
    processor = HfViTImageProcessor.for_model(model.config, preset="timm")
    module, _, function = writer.rpartition(".")
    module = importlib.import_module(f"hf_vit.{module}")
    monkeypatch.setattr(module, function, fault(getattr(module, function)))
    with pytest.raises(ConversionError, match="wrong"):
        export(model, tmp_path / name, to, processor=processor, **options)
    assert not [entry for entry in tmp_path.iterdir() if name in entry.name]
