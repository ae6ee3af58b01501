"""Base of all models: loading without random weights, saving, initialization, change of the image size."""

import copy
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .configuration_hf_vision import HfVisionConfig, read_settings
from .packed_linear import freeze
from .utils import WHERE, DropsManifest, Size, allowed, as_pair, check_pushed, find_file, read_json_object

logger = logging.get_logger(__name__)

_Model = TypeVar("_Model", bound="HfVisionPreTrainedModel")

CONVERSION_RECORD, QUANTIZATION_RECORD = "conversion.json", "quantization.json"
HEAD_KEYS = r"^classifier\."  # parameters of a checkpoint besides the encoder's
# Parameters that a config.json may describe beyond its weights, for a head or a pre-logits layer. A head of ViT-g/14
# for ImageNet-21k has 31 million parameters, a fourth of this limit.
_MORE_PARAMETERS = 2**27
_ADAPTED = ("image_size", "patch_size", "num_channels")  # fields to which `from_pretrained` adapts weights
# Standard deviation of the standard normal distribution truncated at 2; jax.nn.initializers divides by it.
_TRUNCATED_STD = 0.87962566103423978


class HfViTHead(nn.Linear):
    """A linear head; a new one is initialized with zeros, as in the paper."""

    def initialize(self) -> None:
        """Set the weights to zero."""
        init.zeros_(self.weight)


class HfVisionPreTrainedModel(DropsManifest, PreTrainedModel):
    """Base of the Vision Transformers, the hybrids and the ResNets."""

    if TYPE_CHECKING:
        config: Any  # set by subclasses
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    # Parameters that may be missing from a checkpoint or have another shape; they are re-initialized with a warning.
    _new_when_missing: tuple[str, ...] = ("classifier.",)
    _reinit_message = (
        "The classification head of {name} does not fit and was reinitialized to zeros. Train it before use."
    )
    _has_warned_of_image_size = False  # the warning about images of another size was given, or is not needed
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

        `image_size=` resamples the position embeddings once, at load; `patch_size=` also resizes the kernel of the
        patch embedding. A flexible model keeps both as stored. `num_channels=` adapts the first convolution, see
        `set_num_channels`. A head that is missing, or has another number of labels, is reinitialized to zeros, with a
        warning. `verify=True` hashes all files again, see
        `hf_vit.models.utils.check_files`.

        Models of other libraries are converted: by `hf_vit.load`, or `hf-vit convert`.

        Returns:
            The model, in evaluation mode; with `output_loading_info=True` a tuple of the model and the keys that did
            not fit.

        Raises:
            ValueError: an argument is unknown; a parameter other than the head's is missing, unused or of another
                shape; a file is damaged or does not match the manifest; or the model belongs to another library.
        """
        name, config_class, stored = pretrained_model_name_or_path, cast(Any, cls.config_class), config
        verify, warns_of_int8 = kwargs.pop("verify", False), kwargs.pop("_warns_of_int8", True)
        wants_info = kwargs.pop("output_loading_info", False)
        asked = {field: kwargs.pop(field) for field in _ADAPTED if field in kwargs}
        if isinstance(config, str | os.PathLike):
            config = config_class.from_pretrained(config)
        if name is not None:  # else the weights come as `state_dict=`
            where = {key: kwargs[key] for key in WHERE if key in kwargs}
            settings = read_settings(name, **where)
            config_class.check_model_type(settings, str(name))
            if not kwargs.get("force_download"):
                check_pushed(name, where, thorough=verify)
            for index in Path(name).glob("*.index.json"):  # transformers reads it without limits
                read_json_object(index)
            of_loading = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs}
            fields = kwargs if config is None else {}
            try:
                stored, unused = config_class.from_dict(settings, return_unused_kwargs=True, **fields)
            except ValueError as error:
                raise ValueError(f"cannot load {name}: {error}") from error
            config, kwargs = (stored, unused) if config is None else (config, kwargs)
            kwargs |= of_loading
        wanted = {**{field: getattr(config, field) for field in _ADAPTED if hasattr(config, field)}, **asked}
        config = copy.deepcopy(config)
        for field in wanted:
            setattr(config, field, getattr(stored, field))
        kwargs.setdefault("ignore_mismatched_sizes", True)
        model, info = loaded = cls._load(name, *model_args, config=config, output_loading_info=True, **kwargs)
        if name is not None:
            check_pushed(name, where)  # once more, for files that were downloaded just now
            if warns_of_int8 and find_file(name, QUANTIZATION_RECORD, where, needs_hub=False) is not None:
                logger.warning(
                    f"{name} holds an int8 program, which from_pretrained does not use: the model computes in float32. "
                    f"hf_vit.load({str(name)!r}) uses it; a pipeline takes the model and the processor that it returns."
                )
        model._check_loading(info, name or "the state_dict")
        model._adapt(wanted)
        return loaded if wants_info else model

    @classmethod
    def _load(cls, name: str | os.PathLike | None, *model_args: Any, **kwargs: Any) -> Any:
        """Load a model, as in transformers; a damaged file or an unknown argument is a ValueError."""
        try:
            return super().from_pretrained(name, *model_args, **kwargs)
        except (OSError, ImportError, MemoryError, NotImplementedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            caused_by_caller = not kwargs["ignore_mismatched_sizes"] or torch.get_default_device().type == "meta"
            if isinstance(error, RuntimeError) and caused_by_caller:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0][:1000]
            raise ValueError(f"cannot load {name or 'the state_dict'}: {reason}") from error

    def _adapt(self, wanted: dict[str, Any]) -> None:
        """Change image size, patch size and number of channels to the wanted ones."""
        changed = {
            field: size for field, size in wanted.items() if as_pair(size) != as_pair(getattr(self.config, field))
        }
        if "num_channels" in changed:
            self.set_num_channels(changed["num_channels"])
        if "patch_size" in changed:
            self.set_patch_size(changed["patch_size"], wanted["image_size"])
        elif "image_size" in changed:
            self.set_image_size(changed["image_size"])  # warns that the image processor keeps its size

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        """Load the weights, as in transformers; refuse files outside the folder, and a model much larger than them."""
        folder, files = model.config.name_or_path, [Path(file) for file in checkpoint_files or []]
        for file in files if os.path.isdir(folder) else []:
            is_adapter = (file.parent / "adapter_config.json").is_file()  # of `load_adapter`, in its own folder
            if not is_adapter and not os.path.abspath(file).startswith(os.path.abspath(folder) + os.sep):
                raise ValueError(f"the index of the weights of {folder} names a file outside of it: {file.name}")
        described = sum(parameter.numel() for parameter in model.parameters())
        stored = sum(file.stat().st_size for file in files)
        if files and described > 2 * stored + _MORE_PARAMETERS and not allowed("large"):  # 4 bits for a parameter
            raise ValueError(
                f"the config.json of {files[0].parent} describes {described:,} parameters, but its weights have "
                f"{stored:,} bytes (HF_VIT_ALLOW=large builds it nevertheless)"
            )
        try:
            return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)
        except OSError as error:  # of a damaged .bin, without its name
            raise OSError(f"cannot read the weights of {folder}: {error}") from error

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
        unexpected = sorted(info["unexpected_keys"])
        if missing or mismatched or unexpected:
            problems = [f"{key} is missing" for key in missing]
            problems += [f"{key} has shape {tuple(theirs)}, not {tuple(ours)}" for key, theirs, ours in mismatched]
            problems += [f"{key} is not used" for key in unexpected]
            raise ValueError(f"{name} does not fit its configuration: {'; '.join(problems)}")
        if differs:
            logger.warning(self._reinit_message.format(name=name))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the model, as in transformers, and `conversion.json` if the model was converted."""
        super().save_pretrained(save_directory, *args, **kwargs)
        self._save_record(save_directory)

    def save_description(self, save_directory: str | os.PathLike) -> None:
        """Write the files of `save_pretrained` except the weights."""
        self.config.architectures = [type(self).__name__]
        self.config.dtype = self.dtype
        self.config.save_pretrained(save_directory)
        self._save_record(save_directory)

    def _save_record(self, save_directory: str | os.PathLike) -> None:
        if self.conversion_record is not None:
            text = json.dumps(self.conversion_record, indent=2)
            (Path(save_directory) / CONVERSION_RECORD).write_text(text + "\n", encoding="utf-8")

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether activations are recomputed. PEFT 0.21 reads this name, at which transformers itself warns."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

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
        self._apply_image_size(image_size)
        self._warn_of_new_size(before, processor_follows)

    def _warn_of_new_size(self, before: Size, processor_follows: bool) -> None:
        """Warn that the image size has changed, unless the caller changes the image processor too."""
        cast(Any, self.base_model)._has_warned_of_image_size = False
        (old_height, old_width), (height, width) = as_pair(before), as_pair(self.config.image_size)
        if not processor_follows and (height, width) != (old_height, old_width):
            logger.warning_once(
                f"{self.name_or_path or 'The model'} now takes images of {height} x {width} pixels, not {old_height} x "
                f"{old_width}. Its image processor was not changed: load both with hf_vit.load(..., image_size=...), "
                "or change it and call set_image_size(..., processor_follows=True)."
            )

    def _apply_image_size(self, image_size: Size) -> None:
        """Set another image size, and change the parameters that depend on it."""
        self.config.image_size = image_size
        self.config.validate_architecture()

    def set_patch_size(self, patch_size: Size, image_size: Size | None = None, processor_follows: bool = False) -> None:
        """Set another patch size.

        Raises:
            ValueError: the model has no patches.
        """
        raise ValueError(f"cannot set patch_size {patch_size}: {type(self).__name__} has no patches")

    @torch.no_grad()
    def set_num_channels(self, num_channels: int) -> None:
        """Set another number of image channels; the kernel of the first convolution is adapted, as timm does.

        One channel takes the sum of the kernels of all channels. More channels repeat the kernels in their order,
        multiplied by old / new number of channels.

        Raises:
            ValueError: the number is invalid, or the model predicts pixels.
        """
        before, self.config.num_channels = self.config.num_channels, num_channels  # an invalid number is refused here
        convolution = next(module for module in self.modules() if isinstance(module, nn.Conv2d))
        kernel = convolution.weight
        if num_channels == 1:
            adapted = kernel.sum(dim=1, keepdim=True)
        else:
            repeats = math.ceil(num_channels / before)
            adapted = kernel.repeat(1, repeats, 1, 1)[:, :num_channels] * (before / num_channels)
        convolution.weight = nn.Parameter(adapted, kernel.requires_grad)
        convolution.in_channels = num_channels

    def check_images(self, pixel_values: torch.Tensor) -> None:
        """Raise ValueError unless images are (batch, num_channels, height, width)."""
        shape, channels = tuple(pixel_values.shape), self.config.num_channels
        if len(shape) != 4 or shape[1] != channels:
            raise ValueError(f"pixel_values has shape {shape}; expected (batch, {channels}, height, width)")

    def warn_of_image_size(self, pixel_values: torch.Tensor, is_intended: bool | None) -> None:
        """Warn, once for this model, that images have another size; a compiled or exported forward never warns.

        Args:
            pixel_values: (batch, num_channels, height, width)
            is_intended: the caller wants positions to follow the images, so that no warning is needed.
        """
        if is_intended or is_tracing() or self._has_warned_of_image_size:
            return
        size, own = (pixel_values.shape[-2], pixel_values.shape[-1]), as_pair(self.config.image_size)
        if size != own:
            self._has_warned_of_image_size = True
            logger.warning(
                f"The images have {size[0]} x {size[1]} pixels, but the model is for {own[0]} x {own[1]}: load both "
                "with hf_vit.load(..., image_size=...), or pass interpolate_pos_encoding=True."
            )

    def optimize_for_inference(self: _Model, batch_size: int = 1) -> _Model:
        """Return a frozen copy of the model, which is faster on some CPUs and computes the same to rounding.

        Linear layers own their packed weights, and a ResNet's convolutions their standardized ones (see
        `hf_vit.models.packed_linear`); there is no second copy of a weight. The copy is for inference only, on the
        device and in the dtype of the original. Training, changing, moving, copying, saving or exporting it raises
        `FrozenModelError`: do this with the original, and call `optimize_for_inference` again.

        Args:
            batch_size: usual number of images of a forward.

        Returns:
            The copy, in evaluation mode.

        Example:
            >>> import hf_vit
            >>> model, processor = hf_vit.load("folder")
            >>> model = model.optimize_for_inference()
        """
        return freeze(self, batch_size * self.tokens_per_image)

    @property
    def tokens_per_image(self) -> int:
        """Number of rows that an image has in the linear layers."""
        return 1

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module as the original does (vit_jax/models_vit.py, models_resnet.py; else flax's defaults).

        A module with its own rule has a method `initialize`. transformers calls this for modules that own parameters;
        transformers' own initialization (random weights, norms one, biases zero) runs first.
        """
        super()._init_weights(module)
        initialize = getattr(module, "initialize", None)
        if initialize is not None:
            initialize()
        elif isinstance(module, nn.Conv2d):
            lecun_normal_(module.weight)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)


def is_tracing() -> bool:
    """Return whether torch records the computation for other inputs: torch.compile, torch.export, torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - is public


def lecun_normal_(weight: torch.Tensor) -> None:
    """Draw from a normal distribution truncated at two standard deviations, variance 1 / inputs (flax's default)."""
    std = 1 / math.sqrt(weight[0].numel()) / _TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
