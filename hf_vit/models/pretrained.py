"""Base of all models: loading without random weights, saving, initialisation, change of the image size."""

import copy
import io
import json
import math
import mmap
import os
import pickletools
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .configuration_hf_vision import (
    HfVisionConfig,
    Size,
    as_pair,
    is_allowed,
    read_settings,
    refuse_arguments,
    wrong_types_refused,
)
from .manifest import check_pushed, drop_manifest, warn_of_int8
from .packed_linear import freeze

logger = logging.get_logger(__name__)

_Model = TypeVar("_Model", bound="HfVisionPreTrainedModel")

CONVERSION_RECORD = "conversion.json"
HEAD_KEYS = r"^classifier\."  # parameters of a checkpoint besides the encoder's
# Parameters and tensors that a config.json may describe beyond its weights, for a head or a pre-logits layer. A head of
# ViT-g/14 for ImageNet-21k has 31 million parameters, a fourth of this limit.
_MORE_PARAMETERS = 2**27
_MORE_TENSORS = 1_000
_MAX_HEADER_BYTES = 2**24  # of a .safetensors; ViT-H/14's has 60 kB
_LEGACY_PICKLES = 5  # in a file of PyTorch before 1.6, before its numbers
_MAX_PICKLE_BYTES = 2**26  # of a .bin or .pth; a longer pickle is truncated, which is an error
_MAX_OPERATIONS = 500_000  # of a pickle, 25 times those of ViT-H/14's weights; each may take 100 bytes
_MAX_PICKLED_TEXT = 4_096  # characters; PyTorch needs three minutes to search an error message of 65,000
# Standard deviation of the standard normal distribution truncated at 2; jax.nn.initializers divides by it.
_TRUNCATED_STD = 0.87962566103423978
# Arguments of `from_pretrained` that locate a config.json.
WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Arguments of `push_to_hub` that `save_pretrained` passes on.
_HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


def _sizes_of(settings: Any, config_class: Any) -> dict[str, Any]:
    """Return the image size, and the patch size if there is one, of a configuration or a config.json."""
    found = settings if isinstance(settings, dict) else vars(settings)
    fields = [field for field in ("image_size", "patch_size") if hasattr(config_class, field)]
    return {field: found.get(field, getattr(config_class, field)) for field in fields}


class HfViTHead(nn.Linear):
    """A linear head; a new one is initialised with zeros, as in the paper."""

    def initialize(self) -> None:
        """Set the weights to zero."""
        init.zeros_(self.weight)


class HfVisionPreTrainedModel(PreTrainedModel):
    """Base of the Vision Transformers, the hybrids and the ResNets."""

    if TYPE_CHECKING:
        config: Any  # a subclass says which
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    # Parameters that may be missing from a checkpoint or have another shape; they are re-initialised with a warning.
    _new_when_missing: tuple[str, ...] = ("classifier.",)
    _new_in_words = "The classification head of {name} does not fit; it was re-created as zeros: train it."
    # Parameters in files of transformers that are ignored, besides `_keys_to_ignore_on_load_unexpected`.
    _upstream_extras = r"(?!)"

    _image_size_noted = False  # the warning about images of another size was given, or is not needed
    conversion_record: dict[str, Any] | None = None  # source of converted weights

    def __init__(self, config: HfVisionConfig, *args: Any, **kwargs: Any):
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> _Model:
        """Load a model, without any random weights.

        Folders of transformers' own `vit`, `vit_mae`, `bit` and (of version 4) `vit-hybrid` load too, and compute the
        same. `image_size=` resamples the position embeddings once, at load; `patch_size=` also resizes the kernel of
        the patch embedding. A flexible model keeps both as stored. A head that is missing, or has another number of
        labels, is re-created as zeros, with a warning. `verify=True` hashes all files again, see
        `hf_vit.models.manifest`.

        Returns:
            The model, in evaluation mode; with `output_loading_info=True` a tuple of the model and the keys that did
            not fit.

        Raises:
            ValueError: an argument is unknown; a parameter other than the head's is missing, unused or of another
                shape; or a file is not the one that was pushed.
        """
        name = pretrained_model_name_or_path
        config_class: Any = cls.config_class
        if isinstance(config, str | os.PathLike):
            config = config_class.from_pretrained(config)
        settings: dict[str, Any] = {}
        own_sizes = stored_sizes = _sizes_of({} if config is None else config, config_class)
        if name is not None:  # else the weights come as `state_dict=`
            where = {key: kwargs[key] for key in WHERE if key in kwargs}
            settings = read_settings(name, **where)
            with wrong_types_refused(f"the config.json of {name}"):
                stored_sizes = _sizes_of(config_class.in_our_words(settings, str(name)), config_class)
        asked = {field: kwargs.pop(field) for field in stored_sizes if field in kwargs}
        sizes = {**(stored_sizes if config is None else own_sizes), **asked}
        if config is not None:
            config = copy.deepcopy(config)
            for field, size in stored_sizes.items():
                setattr(config, field, size)
        elif name is not None:
            kwargs["stored_settings"] = settings  # so that config.json is not read again
        if upstream_names := cls.upstream_names(settings):
            kwargs["key_mapping"] = {**upstream_names, **kwargs.get("key_mapping", {})}
        verify, warns_of_int8 = kwargs.pop("verify", False), kwargs.pop("_warns_of_int8", True)
        if name is not None and not kwargs.get("force_download"):
            check_pushed(name, settings, kwargs, thorough=verify)
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("ignore_mismatched_sizes", True)
        result: Any = cls._load(name, *model_args, config=config, output_loading_info=True, **kwargs)
        if name is not None:  # once more, for files that were downloaded just now
            check_pushed(name, settings, kwargs)
            if warns_of_int8:
                warn_of_int8(name, settings, kwargs)
        model, info = result
        if upstream_names:
            model._settle_upstream(info)
        model._check_loading(info, name or "the state_dict")
        model._take_sizes(sizes, stored_sizes)
        return result if wants_info else model

    @classmethod
    def _load(cls, name: str | os.PathLike | None, *model_args: Any, **kwargs: Any) -> Any:
        """Load a model, as in transformers; report damaged weights and unknown arguments in one sentence."""
        try:
            with _damage_refused(f"the weights of {name}"):
                return super().from_pretrained(name, *model_args, **kwargs)
        except TypeError as error:
            cls._refuse_leftover(error)
            raise

    def _take_sizes(self, sizes: dict[str, Any], stored: dict[str, Any]) -> None:
        """Set the requested sizes, where they differ from the stored ones."""
        changed = [field for field, size in sizes.items() if as_pair(size) != as_pair(stored[field])]
        if "patch_size" in changed:
            self.set_patch_size(**sizes)
        elif changed:
            self.set_image_size(sizes["image_size"])  # warns that the image processor keeps its size

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the weights, as in transformers; refuse first a model that is much larger than its files."""
        if checkpoint_files:
            _check_size(model, checkpoint_files)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    @classmethod
    def _refuse_leftover(cls, error: TypeError) -> None:
        """Raise ValueError where the constructor got an argument that is neither a field nor an option of loading."""
        if found := re.search(r"__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)):
            config_class: Any = cls.config_class
            known = {*config_class.argument_names(), *WHERE, "device_map", "verify"}
            refuse_arguments(cls.__name__, [found[1]], known)

    @classmethod
    def upstream_names(cls, settings: dict[str, Any]) -> dict[str, str]:
        """Return names in the files of transformers' own model -> ours; empty for any other config.json."""
        return {}

    def _settle_upstream(self, info: dict[str, Any]) -> None:
        """Forget transformers' names, so that the model is saved with ours."""
        conversions = vars(self).get("_weight_conversions") or []
        vars(self)["_weight_conversions"] = [one for one in conversions if not isinstance(one, WeightRenaming)]

    def post_init(self) -> None:
        """Finish the construction, as in transformers."""
        super().post_init()
        if hasattr(self, "classifier") and self._keys_to_ignore_on_load_unexpected:
            # transformers adds the keys that the encoder ignores, but a classifier must not ignore its head
            self._keys_to_ignore_on_load_unexpected = set(self._keys_to_ignore_on_load_unexpected) - {HEAD_KEYS}

    def _check_loading(self, info: dict[str, Any], name: str | os.PathLike) -> None:
        """Raise ValueError unless only the head differs from the checkpoint, and as a whole."""
        differs = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
        heads = [{key for key in self.state_dict() if key.startswith(prefix)} for prefix in self._new_when_missing]
        may_be_new = set[str]().union(*(head for head in heads if head <= differs))
        missing = sorted(set(info["missing_keys"]) - may_be_new)
        mismatched = [entry for entry in info["mismatched_keys"] if entry[0] not in may_be_new]
        unexpected = sorted(key for key in info["unexpected_keys"] if not re.search(self._upstream_extras, key))
        if missing or mismatched or unexpected:
            problems = [f"{key} is missing" for key in missing]
            problems += [f"{key} has shape {tuple(theirs)}, not {tuple(ours)}" for key, theirs, ours in mismatched]
            problems += [f"{key} is not used" for key in unexpected]
            raise ValueError(f"{name} does not fit its configuration: {'; '.join(problems)}")
        if differs:
            logger.warning(self._new_in_words.format(name=name))

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save the model, as in transformers, and `conversion.json` if the model was converted."""
        hub_options = {name: kwargs.pop(name) for name in _HUB_OPTIONS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, **kwargs)
        self._save_record(save_directory)
        processor_size = sys.modules.get("hf_vit.processor_size")  # absent in remote code
        if processor_size is not None and kwargs.get("is_main_process", True):
            processor_size.settle_processor(save_directory)
        if push_to_hub:
            repo_id = hub_options.pop("repo_id", Path(save_directory).resolve().name)
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub_options)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Push the model with a card, see `hf_vit.push`; as remote code, without hf_vit, as in transformers."""
        hf_vit = sys.modules.get("hf_vit")  # not imported: this file travels to the Hub without hf_vit
        if hf_vit is None:
            return super().push_to_hub(repo_id, **kwargs)  # pyright: ignore[reportArgumentType] - a copied function
        return hf_vit.push_saved(self, repo_id, **kwargs)

    def save_description(self, save_directory: str | os.PathLike) -> None:
        """Write the files of `save_pretrained` except the weights."""
        self.config.architectures = [type(self).__name__]
        self.config.dtype = self.dtype
        self.config.save_pretrained(save_directory)
        self._save_record(save_directory)

    def _save_record(self, save_directory: str | os.PathLike) -> None:
        drop_manifest(save_directory)
        if self.conversion_record is not None:
            text = json.dumps(self.conversion_record, indent=2)
            (Path(save_directory) / CONVERSION_RECORD).write_text(text + "\n", encoding="utf-8")

    def set_image_size(self, image_size: Size, processor_follows: bool = False) -> None:
        """Set another image size; learned position embeddings are resampled permanently.

        Args:
            image_size: an int or (height, width) in pixels.
            processor_follows: suppress the warning that the image processor keeps its size, because the caller changes
                it too, as `hf_vit.load` does.

        Raises:
            ValueError: the model cannot have this size.
        """
        before = self.config.image_size
        self._take_image_size(image_size)
        base: Any = self.base_model
        base._image_size_noted = False
        if not processor_follows:
            self._say_image_size(before)

    def _say_image_size(self, before: Size) -> None:
        """Warn that the model's image size has changed, and the image processor's has not."""
        image_size = self.config.image_size
        if as_pair(image_size) == as_pair(before):
            return
        logger.warning_once(
            f"{self.name_or_path or 'The model'} now takes images of {_in_words(image_size)} pixels, not "
            f"{_in_words(before)}, but its image processor was not changed: load both with hf_vit.load("
            f"{self.name_or_path or 'FOLDER'!r}, image_size={image_size}), or change the processor yourself and call "
            "set_image_size(..., processor_follows=True)."
        )

    def _take_image_size(self, image_size: Size) -> None:
        """Set another image size, and change the parameters that depend on it."""
        self.config.image_size = image_size
        self.config.validate_architecture()

    def set_patch_size(self, patch_size: Size, image_size: Size | None = None, processor_follows: bool = False) -> None:
        """Set another patch size.

        Raises:
            ValueError: the model has no patches.
        """
        raise ValueError(f"cannot set patch_size {patch_size}: {type(self).__name__} has no patches")

    def note_image_size(self, pixel_values: torch.Tensor, is_asked: bool | None) -> None:
        """Warn, once for this model, that images have another size; a compiled or exported forward never warns.

        Args:
            pixel_values: (batch, num_channels, height, width)
            is_asked: the caller wants positions to follow the images, so that no warning is needed.
        """
        if is_asked or is_recorded() or self._image_size_noted:
            return
        size, own = (pixel_values.shape[-2], pixel_values.shape[-1]), as_pair(self.config.image_size)
        if size != own:
            self._image_size_noted = True
            logger.warning(
                f"The images have {_in_words(size)} pixels, but the model is for {_in_words(own)}, to which its image "
                f"processor resizes: load both at one size with hf_vit.load({self.name_or_path or 'FOLDER'!r}, "
                "image_size=...), or pass interpolate_pos_encoding=True if this size is intended."
            )

    def optimize_for_inference(self: _Model, batch_size: int = 1, backend: str = "torch") -> _Model:
        """Return a frozen copy of the model, which is faster on some CPUs and computes the same to rounding.

        Linear layers own their packed weights, and a ResNet's convolutions their standardized ones (see
        `hf_vit.models.packed_linear`); there is no second copy of a weight. The copy is for inference only, on the
        device and in the dtype of the original. Training, changing, moving, copying, saving or exporting it raises
        `FrozenModelError`: do this with the original, and call `optimize_for_inference` again.

        Args:
            batch_size: usual number of images of a forward.
            backend: "torch", "openvino", "onnxruntime", or "auto" for the fastest installed; see `hf_vit.use_backend`.

        Returns:
            The copy, in evaluation mode; with another backend than torch, the model itself.

        Example:
            >>> import hf_vit
            >>> model, processor = hf_vit.load("folder")
            >>> model = model.optimize_for_inference()
        """
        if backend != "torch":
            hf_vit = sys.modules.get("hf_vit")  # as in `push_to_hub`
            if hf_vit is None:
                raise ImportError(f"cannot use backend={backend!r}; pip install 'hf_vit[openvino]' and import hf_vit")
            return hf_vit.use_backend(self, backend, batch_size)
        return freeze(self, batch_size * self.tokens_per_image)

    @property
    def tokens_per_image(self) -> int:
        """Number of rows that an image has in the linear layers."""
        return 1

    def train(self: _Model, mode: bool = True) -> _Model:
        """Set the training mode, as in PyTorch; `train()` removes a backend."""
        if mode and hasattr(vars(self).get("forward"), "by_torch"):
            del self.forward
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module as the original does (vit_jax/models_vit.py, models_resnet.py; else flax's defaults).

        A module with its own rule has a method `initialize`. transformers calls this for modules that own parameters;
        its own rule (random weights, norms one, biases zero) comes first.
        """
        super()._init_weights(module)
        initialize = getattr(module, "initialize", None)
        if initialize is not None:
            initialize()
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)


def is_recorded() -> bool:
    """Tell whether torch records the computation for other inputs: torch.compile, torch.export, torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - is public


@contextmanager
def _damage_refused(what: str) -> Iterator[None]:
    """Turn the errors of safetensors and PyTorch about a damaged file into one ValueError."""
    try:
        yield
    except (MemoryError, PickleBudgetError):
        raise
    except Exception as error:
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        modules = {frame.f_globals.get("__name__") for frame in frames}
        functions = [frame.f_code.co_name for frame in frames]
        if "get_checkpoint_shard_files" in functions and not isinstance(error, OSError):
            raise ValueError(f"{what} have an index that is no table of files: {error!r:.300}") from error
        if any(str(module).startswith("peft.") for module in modules) and not isinstance(error, OSError):
            raise ValueError(f"{what} have an adapter that cannot be loaded: {error!s:.300}") from error
        from_reader = type(error).__name__ == "SafetensorError" or modules & {"torch.serialization", "zipfile"}
        from_reader = from_reader or "check_pickles" in functions
        from_reader = from_reader or functions[-1] == "_load_pretrained_model"  # a pickle that is not a dictionary
        if not from_reader or getattr(error, "filename", None):  # a file that cannot be opened
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise ValueError(f"{what} are damaged: {reason}") from error


def _check_size(model: nn.Module, files: Sequence[str]) -> None:
    """Check that a model, not yet allocated, is not far larger than its weights.

    Raises:
        ValueError: it is; or the header of a file is damaged or too large.
    """
    counts = [_count_stored(Path(file)) for file in files]
    if is_allowed("large"):
        return
    stored, stored_tensors = (sum(column) for column in zip(*counts, strict=True))
    sizes = [parameter.numel() for parameter in model.parameters()]
    if sum(sizes) > stored + max(stored, _MORE_PARAMETERS) or len(sizes) > stored_tensors + _MORE_TENSORS:
        raise ValueError(
            f"the config.json of {Path(files[0]).parent} describes {sum(sizes):,} parameters in {len(sizes):,} "
            f"tensors; its weights have {stored:,} in {stored_tensors:,} (HF_VIT_ALLOW=large builds it nevertheless)"
        )


def _count_stored(file: Path) -> tuple[int, int]:
    """Return upper bounds of the parameters and the tensors in a file of weights."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        check_pickles(file)
        return size, size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, size):
            limit = f"at most {_MAX_HEADER_BYTES:,} are read"
            raise ValueError(f"{file} declares a header of {length:,} bytes in a file of {size:,}; {limit}")
        header = stream.read(length)
    try:
        numbers = [_count_numbers(tensor) for name, tensor in json.loads(header).items() if name != "__metadata__"]
        return sum(numbers), len(numbers)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: its header is no table of tensors") from error


class PickleBudgetError(ValueError):
    """Pickle that is too large or dangerous to read."""


def is_legacy(file: Path) -> bool:
    """Tell whether a PyTorch file is from before version 1.6, by PyTorch's own criterion: it is no zip archive."""
    with open(file, "rb") as stream:
        return stream.read(4) != b"PK\3\4"


def check_pickles(file: Path) -> None:
    """Check the pickles of a PyTorch file before it is loaded.

    Raises:
        PickleBudgetError: too many operations, too long a text, or a `bytearray` (50 bytes can ask for 20 GB).
        ValueError: one is damaged.
    """
    if is_legacy(file):
        # mapped to memory, so that `read` cannot allocate more than the file has
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for _ in range(_LEGACY_PICKLES):
                _check_operations(content, file.name)
        return
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.lower().endswith("data.pkl"):  # PyTorch ignores case in names
                del member.CRC  # some files have none
                with archive.open(member) as stream:
                    _check_operations(io.BytesIO(stream.read(_MAX_PICKLE_BYTES)), file.name)


def _check_operations(stream: Any, name: str) -> None:
    for number, (_, argument, _) in enumerate(pickletools.genops(stream)):
        if number >= _MAX_OPERATIONS:
            raise PickleBudgetError(f"the pickle in {name} has more than {_MAX_OPERATIONS:,} operations")
        text = argument if isinstance(argument, str) else ""
        if len(text) > _MAX_PICKLED_TEXT and not is_allowed("large"):
            most = f"at most {_MAX_PICKLED_TEXT:,} are read (HF_VIT_ALLOW=large reads more)"
            raise PickleBudgetError(f"the pickle in {name} has a text of {len(text):,} characters; {most}")
        if "bytearray" in text:
            raise PickleBudgetError(f"the pickle in {name} makes a bytearray, which can take any amount of memory")


def _count_numbers(tensor: dict[str, Any]) -> int:
    """Return an upper bound of the parameters in a tensor of a .safetensors; integers may be packed, 4 bits each."""
    start, end = tensor["data_offsets"]
    return 2 * (end - start) if tensor["dtype"][0] in "IU" else math.prod(tensor["shape"])


def _in_words(size: Size) -> str:
    """Format a size: `224` -> "224 x 224"."""
    return " x ".join(map(str, as_pair(size)))


def lecun_normal_(weight: torch.Tensor) -> None:
    """Draw from a normal distribution truncated at two standard deviations, variance 1 / inputs (flax's default)."""
    std = 1 / math.sqrt(weight[0].numel()) / _TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
