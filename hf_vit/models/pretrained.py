"""What all models share: loading that never draws at random, saving, initialisation, another image size."""

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
from typing import IO, TYPE_CHECKING, Any, TypeVar

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
from .inference import is_recorded, optimize, use_training_products
from .manifest import check_pushed, drop_manifest

logger = logging.get_logger(__name__)

_Model = TypeVar("_Model", bound="HfVisionPreTrainedModel")

CONVERSION_RECORD = "conversion.json"
HEAD_KEYS = r"^classifier\."  # what a checkpoint has besides the encoder
# What a config.json may describe beyond the weights beside it: a head, a pre-logits layer. A head of ViT-g/14 for
# ImageNet-21k has 31 million parameters, a fourth.
_MORE_PARAMETERS = 2**27
_MORE_TENSORS = 1_000
_MAX_HEADER_BYTES = 2**24  # of a .safetensors; ViT-H/14's has 60 kB
MAX_PICKLE_BYTES = 2**26  # of a .bin or .pth; what is cut off there ends in an error
_MAX_OPERATIONS = 500_000  # of a pickle, 25 times those of ViT-H/14's weights; each may take 100 bytes
_MAX_PICKLED_TEXT = 4_096  # characters; PyTorch's search in a message with 65,000 takes three minutes
# Standard deviation of a normal distribution cut at two of its own: jax.nn.initializers corrects for it.
_TRUNCATED_STD = 0.87962566103423978
# Arguments of `from_pretrained` that say where a config.json is.
WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Arguments of `push_to_hub`, where `save_pretrained` is to call it.
_HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


def _sizes_of(settings: Any, config_class: Any) -> dict[str, Any]:
    """The image size, and the patch size where there is one, of a configuration or a config.json."""
    found = settings if isinstance(settings, dict) else vars(settings)
    fields = [field for field in ("image_size", "patch_size") if hasattr(config_class, field)]
    return {field: found.get(field, getattr(config_class, field)) for field in fields}


class HfViTHead(nn.Linear):
    """A linear head; a new one is initialised with zeros, as in the paper."""

    def initialize(self) -> None:
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
    # Parameters of a checkpoint of transformers that may be left over, besides `_keys_to_ignore_on_load_unexpected`.
    _upstream_extras = r"(?!)"

    _image_size_noted = False  # whether images of another size were said, or need not be
    conversion_record: dict[str, Any] | None = None  # what the weights were converted from

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
        """Load a model; nothing in it is random.

        Folders of transformers' own `vit`, `vit_mae`, `bit` and (of version 4) `vit-hybrid` load too, with their
        numbers.

        `image_size=` other than the stored one resamples the position embeddings, once; `patch_size=` the kernel of the
        patch embedding too. A flexible model keeps both as stored. A head that is missing, or of another number of
        labels, is re-created as zeros, and said so.

        Returns:
            The model, in evaluation mode; with `output_loading_info=True` a tuple of it and of what did not fit.

        Raises:
            ValueError: an argument is unknown; anything else is missing, left over or of another shape; or a file is
                not the one that was pushed, see `hf_vit.models.manifest`. `verify=True` hashes all files, whatever is
                known of them.
        """
        name = pretrained_model_name_or_path
        config_class: Any = cls.config_class
        settings: dict[str, Any] = {}
        own_sizes = _sizes_of({} if config is None else config, config_class)
        stored_sizes = own_sizes
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
        verify = kwargs.pop("verify", False)
        if name is not None and not kwargs.get("force_download"):
            check_pushed(name, settings, kwargs, thorough=verify)
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("ignore_mismatched_sizes", True)
        result: Any = cls._load(name, *model_args, config=config, output_loading_info=True, **kwargs)
        if name is not None:  # once more, for what was downloaded just now
            check_pushed(name, settings, kwargs)
        model, info = result
        if upstream_names:
            model._settle_upstream(info)
        model._check_loading(info, name or "the state_dict")
        model._take_sizes(sizes, stored_sizes)
        return result if wants_info else model

    @classmethod
    def _load(cls, name: str | os.PathLike | None, *model_args: Any, **kwargs: Any) -> Any:
        """As in transformers; damaged weights and unknown arguments are one sentence."""
        try:
            with _damage_refused(f"the weights of {name}"):
                return super().from_pretrained(name, *model_args, **kwargs)
        except TypeError as error:
            cls._refuse_leftover(error)
            raise

    def _take_sizes(self, sizes: dict[str, Any], stored: dict[str, Any]) -> None:
        """Take the sizes that were asked for, where they are not the stored ones."""
        changed = [field for field, size in sizes.items() if as_pair(size) != as_pair(stored[field])]
        if "patch_size" in changed:
            self.set_patch_size(**sizes)
        elif changed:
            self.set_image_size(sizes["image_size"])  # which says that the image processor does not follow

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, whose model has no memory yet; it gets none where its files cannot fill it."""
        if checkpoint_files:
            _check_size(model, checkpoint_files)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    @classmethod
    def _refuse_leftover(cls, error: TypeError) -> None:
        """Raise ValueError where the constructor got an argument that is neither a field nor about loading."""
        if found := re.search(r"__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)):
            config_class: Any = cls.config_class
            known = {*config_class.argument_names(), *WHERE, "device_map", "verify"}
            refuse_arguments(cls.__name__, [found[1]], known)

    @classmethod
    def upstream_names(cls, settings: dict[str, Any]) -> dict[str, str]:
        """Names in the files of transformers' own model -> ours; empty where a config.json is not one of its."""
        return {}

    def _settle_upstream(self, info: dict[str, Any]) -> None:
        """Save the model in our names again, not in those of transformers that it was loaded from."""
        conversions = vars(self).get("_weight_conversions") or []
        vars(self)["_weight_conversions"] = [one for one in conversions if not isinstance(one, WeightRenaming)]

    def post_init(self) -> None:
        super().post_init()
        if hasattr(self, "classifier") and self._keys_to_ignore_on_load_unexpected:
            # transformers adds what parts of a model ignore; to a classifier, its encoder's head is no leftover
            self._keys_to_ignore_on_load_unexpected = set(self._keys_to_ignore_on_load_unexpected) - {HEAD_KEYS}

    def _check_loading(self, info: dict[str, Any], name: str | os.PathLike) -> None:
        """Only the head may differ from the checkpoint, and only as a whole."""
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
        """As in transformers; writes `conversion.json` too, if the model was converted."""
        hub_options = {name: kwargs.pop(name) for name in _HUB_OPTIONS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, **kwargs)
        self._save_record(save_directory)
        loading = sys.modules.get("hf_vit.models.loading")  # as remote code, there is none
        if loading is not None and kwargs.get("is_main_process", True):
            loading.settle_processor(save_directory)
        if push_to_hub:
            repo_id = hub_options.pop("repo_id", Path(save_directory).resolve().name)
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub_options)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Push the model as `hf_vit.push` does, with a card; without hf_vit, as remote code, as transformers does."""
        hf_vit = sys.modules.get("hf_vit")  # this file travels without what pushes, so it cannot import that
        if hf_vit is None:
            return super().push_to_hub(repo_id, **kwargs)  # pyright: ignore[reportArgumentType] - a copied function
        return hf_vit.push_saved(self, repo_id, **kwargs)

    def save_description(self, save_directory: str | os.PathLike) -> None:
        """Write what `save_pretrained` writes besides the weights."""
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
        """Take images of another size from now on; learned positions are resampled, for good.

        Args:
            image_size: an int or (height, width) in pixels.
            processor_follows: the caller sets the image processor to this size too; otherwise a warning says that it
                has another. `hf_vit.load` does both.

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
        """Say that the model has another image size than before, and the image processor was not told."""
        image_size = self.config.image_size
        if as_pair(image_size) == as_pair(before):
            return
        logger.warning_once(
            f"{self.name_or_path or 'The model'} takes images of {_in_words(image_size)} pixels from now on, not "
            f"{_in_words(before)}, and its image processor was not told: hf_vit.load({self.name_or_path!r}, "
            f"image_size={image_size}) gives both at that size, set_image_size(..., processor_follows=True) says that "
            "the processor has it too."
        )

    def _take_image_size(self, image_size: Size) -> None:
        """State another image size; what depends on it follows."""
        self.config.image_size = image_size
        self.config.validate_architecture()

    def set_patch_size(self, patch_size: Size, image_size: Size | None = None, processor_follows: bool = False) -> None:
        """Set another size of the patches.

        Raises:
            ValueError: the model has none.
        """
        raise ValueError(f"{type(self).__name__} has no patches, whose size could be {patch_size}")

    def note_image_size(self, pixel_values: torch.Tensor, is_asked: bool | None) -> None:
        """Say, once for this model, that images have another size than it, unless that was asked for.

        A compiled or exported forward says nothing.

        Args:
            pixel_values: (batch, num_channels, height, width)
            is_asked: whether the caller wants positions to follow the images.
        """
        if is_asked or is_recorded() or self._image_size_noted:
            return
        size, own = (pixel_values.shape[-2], pixel_values.shape[-1]), as_pair(self.config.image_size)
        if size != own:
            self._image_size_noted = True
            logger.warning(
                f"Images of {_in_words(size)} pixels for a model of {_in_words(own)}, to which its image processor "
                f"should bring them: hf_vit.load({self.name_or_path!r}, image_size=...) gives both at one size, and "
                "interpolate_pos_encoding=True says that this is meant."
            )

    def optimize_for_inference(self: _Model, batch_size: int = 1, backend: str = "torch") -> _Model:
        """Compute the same faster, where gradients are not wanted; see `hf_vit.models.inference`.

        Takes as much memory again as the weights. A weight may change in any way at any time: where PyTorch cannot tell
        whether it did, as while somebody holds a view of it, the layer computes as before. Call it once the model has
        its weights, dtype and device: weights in memory that PyTorch did not allocate (a mapped file, a NumPy array)
        are moved out of it. It may be called again; `train()` takes it back; saving and exporting do not see it, and a
        compiled model packs nothing.

        Args:
            batch_size: images at a time, as they will usually come; the torch backend does not depend on it.
            backend: "torch", "openvino", "onnxruntime", or "auto" for the fastest installed; see `hf_vit.use_backend`.

        Returns:
            the model itself, in evaluation mode.
        """
        if backend != "torch":
            hf_vit = sys.modules.get("hf_vit")  # as in `push_to_hub`
            if hf_vit is None:
                raise ImportError(f"backend={backend!r} needs pip install 'hf_vit[openvino]', and import hf_vit")
            return hf_vit.use_backend(self, backend, batch_size)
        optimize(self)
        return self.eval()

    @property
    def tokens_per_image(self) -> int:
        """Rows that the linear layers see of an image."""
        return 1

    def train(self: _Model, mode: bool = True) -> _Model:
        use_training_products(self, mode)
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The original's initialisation (vit_jax/models_vit.py, models_resnet.py; flax's defaults elsewhere).

        A module with a rule of its own says so by a method `initialize`. transformers initialises only modules that
        own parameters, and has drawn here the weights of plain layers, and set norms to one and biases to zero.
        """
        super()._init_weights(module)
        initialize = getattr(module, "initialize", None)
        if initialize is not None:
            initialize()
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)


@contextmanager
def _damage_refused(what: str) -> Iterator[None]:
    """Turn what the readers of safetensors and of PyTorch raise for a damaged file into one sentence.

    Raises:
        ValueError: the file is damaged.
    """
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
        from_reader = from_reader or "check_operations" in functions
        from_reader = from_reader or functions[-1] == "_load_pretrained_model"  # a pickle of no dictionary
        if not from_reader or getattr(error, "filename", None):  # a file that cannot be opened
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise ValueError(f"{what} are damaged: {reason}") from error


def _check_size(model: nn.Module, files: Sequence[str]) -> None:
    """Check that a model without memory is not far larger than its weights.

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
    """The most parameters and tensors that a file of weights can hold."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        _check_pickle(file)
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


def _check_pickle(file: Path) -> None:
    """Check the pickle of a file of PyTorch; before 1.6 it is at the beginning."""
    if not zipfile.is_zipfile(file):
        with open(file, "rb") as stream, map_file(stream) as content:
            check_operations(content, file.name)
        return
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.lower().endswith("data.pkl"):  # PyTorch asks for it in any case
                del member.CRC  # some files have none
                with archive.open(member) as stream:
                    check_operations(io.BytesIO(stream.read(MAX_PICKLE_BYTES)), file.name)


class PickleBudgetError(ValueError):
    """Why a pickle is not followed, in one sentence that names its file."""


def map_file(stream: IO[bytes]) -> Any:
    """A file in which `read` takes no memory for more than there is."""
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def check_operations(stream: Any, name: str) -> None:
    """Check a pickle before it is followed.

    Args:
        stream: in memory, or of `map_file`.

    Raises:
        PickleBudgetError: it has too many operations or too long a text, or makes a `bytearray` (20 GB need 50 bytes).
        ValueError: it is damaged.
    """
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
    """The most parameters in a tensor of a .safetensors; integers may be packed, from 4 bits each."""
    start, end = tensor["data_offsets"]
    return 2 * (end - start) if tensor["dtype"][0] in "IU" else math.prod(tensor["shape"])


def _in_words(size: Size) -> str:
    """`224` -> "224 x 224"."""
    return " x ".join(map(str, as_pair(size)))


def lecun_normal_(weight: torch.Tensor) -> None:
    """Draw from a normal distribution cut at two standard deviations, variance 1 / inputs (flax's default)."""
    std = 1 / math.sqrt(weight[0].numel()) / _TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
