"""Models whose forward is a compiled program of OpenVINO or ONNX Runtime."""

import copy
import hashlib
import importlib.metadata
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModel, AutoModelForImageClassification
from transformers.utils.generic import ModelOutput

from ..files.fingerprint import fingerprint_weights
from ..files.versions import require
from ..models.packed_linear import forbid_changes
from ..models.sizes import as_pair
from . import programs
from .program_cache import cached
from .programs import PROGRAM_MODELS, make_onnx, make_openvino

Program = Callable[[torch.Tensor], list[torch.Tensor]]  # (batch, channels, height, width) float32 -> its outputs
_RECORDS = ("output_hidden_states", "output_attentions")
# Arguments that change no output: the image size is fixed, and every program returns all outputs.
_WITHOUT_EFFECT = ("interpolate_pos_encoding", "only_pooled")
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}
_PYTORCH = 'use PyTorch for it: backend="torch" (--backend torch)'
_MOST_IN_ONE_FILE = 2**31 - 2**24  # bytes of weights in an .onnx; the graph needs the rest of 2 GiB
_ERRORS = 3  # log level of ONNX Runtime


class ProgramModel(nn.Module):
    """A model that a program computes, for one image size and any batch, on the CPU, without gradients.

    It has no parameters and keeps no reference to the model that it was made from: later changes of that model have no
    effect. Its threads are PyTorch's (`torch.get_num_threads()`) at the time when it is made.

    Args:
        model: the encoder or classifier that the program computes.
        output_class: class of the outputs.
        names: names of the program's outputs, in order.
        program: function that computes them.
        fingerprint: `fingerprint_weights` of the model.

    Attributes:
        fingerprint: of the model that it was made from.
        config: a copy of the model's configuration.
        dtype: dtype of the outputs.
        device: the CPU.
        is_classifier: True if the output is logits.
    """

    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # read by `Trainer`
    input_modalities = ("image",)  # read by pipelines
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for auto_class in (AutoModel, AutoModelForImageClassification):  # pipelines accept registered classes
            auto_class.register(cls, cls, exist_ok=True)  # pyright: ignore[reportArgumentType] - has no config class

    def __init__(
        self, model: Any, output_class: type[ModelOutput], names: Sequence[str], program: Program, fingerprint: str
    ):
        super().__init__()
        self.fingerprint = fingerprint
        self.config, self.name_or_path = copy.deepcopy(model.config), model.name_or_path
        self.dtype, self.device = model.dtype, torch.device("cpu")
        self._output_class, self._names, self._program = output_class, tuple(names), program
        self.is_classifier = "logits" in names
        self._loss_function: Any = model.loss_function if self.is_classifier else None
        forbid_changes(self)
        self.eval()

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Any:
        """Compute the outputs; arguments and outputs as in the model's own forward.

        Raises:
            ValueError: the program cannot compute this call; the message names the argument.
        """
        self._check(pixel_values, labels, options)
        images = pixel_values.detach().to(self.dtype).float().contiguous()
        computed = self._program(images)
        outputs = {name: output.to(self.dtype) for name, output in zip(self._names, computed, strict=True)}
        if labels is not None:
            outputs["loss"] = self._loss_function(labels, outputs["logits"], self.config)
        result = self._output_class(**outputs)
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()

    def _check(self, pixel_values: torch.Tensor, labels: torch.Tensor | None, options: dict[str, Any]) -> None:
        asked = {name: getattr(self.config, name, False) for name in _RECORDS} | options
        asked["labels"] = None if self.is_classifier else labels
        asked["pixel_values.requires_grad"] = pixel_values.requires_grad and torch.is_grad_enabled()
        for name, value in asked.items():
            if name not in _WITHOUT_EFFECT and value is not None and value is not False:
                raise ValueError(f"{type(self).__name__} does not support {name}; {_PYTORCH}")
        expected = (self.config.num_channels, *as_pair(self.config.image_size))
        fits = tuple(pixel_values.shape[1:]) == expected and len(pixel_values) > 0
        if not (fits and pixel_values.is_floating_point() and pixel_values.device.type == "cpu"):
            found = f"{pixel_values.dtype} of shape {tuple(pixel_values.shape)} on {pixel_values.device}"
            raise ValueError(f"pixel_values is {found} (expected float of shape (batch, *{expected}) on cpu)")

    @property
    def base_model(self) -> "ProgramModel":
        """This model, if it is an encoder.

        Raises:
            ValueError: the program computes logits only.
        """
        if self.is_classifier:
            raise ValueError(f"{type(self).__name__} computes logits only; {_PYTORCH}")
        return self

    def can_generate(self) -> bool:
        """Tell pipelines that this is not a language model."""
        return False


class OpenVINOModel(ProgramModel):
    """A model that OpenVINO computes, in the precision of the model's dtype: float32 or bfloat16.

    The program is converted at the first use and then cached.

    Args:
        model: an encoder or classifier of this package on the CPU.
        batch_size: usual number of images of a forward. The program for it is 1 to 4% faster on two cores of an
            AVX-512 CPU (S/16, 1 and 8 images) than the one for any batch, which other batches use.

    Raises:
        ImportError: the extra `openvino` is not installed.
        ValueError: the model's class, dtype or device is not supported.

    Example:
        >>> import hf_vit
        >>> from hf_vit.runtimes import OpenVINOModel
        >>> model, processor = hf_vit.load("folder")
        >>> model = OpenVINOModel(model)
        >>> logits = model(**processor("photo.png", return_tensors="pt")).logits
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, model: Any, batch_size: int = 1):
        require("openvino")
        output_class, names = _outputs_of(model, self.dtypes)

        def convert(folder: Path) -> None:
            make_openvino(_float_copy(model), as_pair(model.config.image_size), folder / "program.xml", names)

        fingerprint = fingerprint_weights(model)
        entry = _entry_of(model, fingerprint, "openvino")
        program = cached(entry, convert, lambda folder: read_openvino(folder / "program.xml"))
        is_hybrid = hasattr(model.config, "stem_depths")  # OpenVINO 2026.4 crashes compiling it for a fixed batch
        usual = None if is_hybrid else batch_size
        compiled = OpenVINOProgram(program, model.dtype, usual)
        super().__init__(model, output_class, names, compiled, fingerprint)


class ONNXRuntimeModel(ProgramModel):
    """A model that ONNX Runtime computes, in float32; arguments and errors as in `OpenVINOModel`.

    One program serves every batch size. With a `batch_size` above 1, its threads sleep between calls, so that they do
    not slow down the reading of the next images; with 1, they wait actively and answer sooner.
    """

    def __init__(self, model: Any, batch_size: int = 1):
        require("onnxruntime")
        output_class, names = _outputs_of(model, self.dtypes)

        def convert(folder: Path) -> None:
            program = make_onnx(_float_copy(model), as_pair(model.config.image_size), names)
            weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            program.save(folder / "program.onnx", external_data=weights > _MOST_IN_ONE_FILE)

        fingerprint = fingerprint_weights(model)
        entry = _entry_of(model, fingerprint, "onnxruntime")
        program = cached(entry, convert, lambda folder: _load_onnx(folder, batch_size == 1))
        super().__init__(model, output_class, names, program, fingerprint)


def _outputs_of(model: Any, dtypes: Sequence[torch.dtype]) -> tuple[type[ModelOutput], list[str]]:
    """Return the class and the names of a model's outputs, by computing one image."""
    if not isinstance(model, PROGRAM_MODELS) or model.dtype not in dtypes or model.device.type != "cpu":
        found = f"{type(model).__name__} in {model.dtype} on {model.device}"
        raise ValueError(f"cannot compile a {found} (expected an encoder or classifier in one of {dtypes} on cpu)")
    images = torch.zeros(1, model.config.num_channels, *as_pair(model.config.image_size), dtype=model.dtype)
    was_training = model.training
    with torch.no_grad():
        outputs = model.eval()(images, output_hidden_states=False, output_attentions=False, return_dict=True)
    model.train(was_training)
    return type(outputs), [name for name, value in outputs.items() if isinstance(value, torch.Tensor)]


def _float_copy(model: Any) -> Any:
    """Return the model in float32, which is the dtype of a program's weights."""
    return model if model.dtype == torch.float32 else copy.deepcopy(model).float()


def _entry_of(model: nn.Module, fingerprint: str, package: str) -> str | None:
    """Return the sha256 of all that a program depends on: weights, configuration, modules, versions and code.

    None, so that nothing is cached, if there are modules of other packages (adapters, quantization), which have state
    of their own. A hook that changes values is not recognized.
    """
    parts = [*model.modules(), *model.state_dict().values()]
    if {type(part).__module__.split(".")[0] for part in parts} - {"torch", "transformers", "hf_vit"}:
        return None
    versions = {name: importlib.metadata.version(name) for name in (package, "torch", "transformers", "hf_vit")}
    text = f"{versions} {_digest_of_code()} {model!r} {fingerprint}"
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _digest_of_code() -> str:
    """Return the sha256 of the code that makes programs, which may change without the version."""
    files = [*Path(__file__).parents[1].joinpath("models").glob("*.py"), Path(programs.__file__), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


@cache
def _openvino_core() -> Any:
    """Return the OpenVINO of this process, which lives until the process ends.

    The CPU plugin of each `Core` sets an alternate stack for signals of the calling thread, and restores the one before
    it when the last use of that `Core` ends. After two of them end in the order in which they began, the thread has a
    stack that is unmapped: the next signal with a handler ends the process. `DataLoader` handles SIGCHLD, for example.
    """
    import openvino

    core = openvino.Core()
    core.set_property({"ENABLE_MMAP": False})  # the files may be replaced while a program is in use
    return core


def read_openvino(file: Path) -> Any:
    """Read an OpenVINO program into memory, as `openvino.Model`."""
    return _openvino_core().read_model(file)


class OpenVINOProgram:
    """Program compiled by OpenVINO for this CPU; several threads may call it, one computes at a time.

    Args:
        program: an `openvino.Model` for any batch.
        dtype: precision of the computation.
        batch_size: number of images for which it is compiled separately; None: one program for every batch.
    """

    def __init__(self, program: Any, dtype: torch.dtype, batch_size: int | None = None):
        self._program, self._batch_size = program, batch_size
        self._settings = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],  # the default is bfloat16, where the CPU has it
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self._lock = threading.Lock()
        self._requests = {batch_size: self._compile(batch_size)}

    def _compile(self, batch_size: int | None) -> Any:
        """Return an inference request of the program compiled for a batch size, or for any."""
        program = self._program
        if batch_size is not None:
            program = program.clone()
            shape = program.input(0).partial_shape
            shape[0] = batch_size
            program.reshape(shape)
        return _openvino_core().compile_model(program, "CPU", self._settings).create_infer_request()

    def __call__(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        import openvino

        batch_size = self._batch_size if len(pixel_values) == self._batch_size else None
        with self._lock:
            if batch_size not in self._requests:
                self._requests[batch_size] = self._compile(batch_size)
            request = self._requests[batch_size]
            request.set_input_tensor(openvino.Tensor(pixel_values.numpy(), shared_memory=True))
            request.infer()
            # copies, since the next call reuses this memory
            return [torch.from_numpy(output.data).clone() for output in request.output_tensors]


def _load_onnx(folder: Path, spins: bool) -> Program:
    """Compile a program by ONNX Runtime for this CPU; several threads may call it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = _ERRORS
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    session = onnxruntime.InferenceSession(folder / "program.onnx", options, providers=["CPUExecutionProvider"])

    def compute(pixel_values: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {"pixel_values": pixel_values.numpy()})]

    return compute
