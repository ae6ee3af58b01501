"""Base class of all models: loading and saving, initialization, and changes to the image size and channels."""

import copy
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs

from .configuration_hf_vit import HfVisionConfig
from .sizes import Size, as_pair, check_arguments, check_removed_arguments, check_size

logger = logging.get_logger(__name__)

_Model = TypeVar("_Model", bound="HfVisionPreTrainedModel")

CONVERSION_RECORD = "conversion.json"
QUANTIZATION_RECORD = "quantization.json"
HEAD_KEYS = r"^classifier\."  # pattern of a classification head's parameters
_ADAPTED = ("image_size", "patch_size", "num_channels")  # `from_pretrained` adapts the weights if these fields change
# Arguments of `forward` of any model of transformers, used or not
_FORWARD_ARGUMENTS = {*TransformersKwargs.__annotations__, "interpolate_pos_encoding", "return_dict", "use_cache"}
# Standard deviation of a standard normal distribution truncated at -2 and 2 (jax.nn.initializers.variance_scaling).
_TRUNCATED_STD = 0.87962566103423978
# What a new head is, by the configuration's `head_init`, for a message.
_HEADS = {
    "zeros": "to zeros, for rates such as 0.03 of SGD or 1e-3 of AdamW; at small rates such as 5e-5, Trainer's default,"
    " head_init='normal' learns faster",
    "normal": "to random weights, for small rates such as 5e-5 of AdamW",
}


class HfViTHead(nn.Linear):
    """Linear head, initialized with zeros, as in the paper, or normally distributed.

    Args:
        initial_std: standard deviation of the initial weights; 0: zeros.
        options: other arguments of `Linear`.
    """

    def __init__(self, in_features: int, out_features: int, initial_std: float = 0.0, **options: Any):
        self.initial_std = initial_std
        super().__init__(in_features, out_features, **options)

    def initialize(self) -> None:
        """Set the initial weights; transformers sets the biases to zero."""
        if self.initial_std:
            init.normal_(self.weight, std=self.initial_std)
        else:
            init.zeros_(self.weight)


class HfVisionPreTrainedModel(PreTrainedModel):
    """Base class of the Vision Transformers, the hybrids and the ResNets."""

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

    # Prefixes of parameters that may be missing from a checkpoint or differ in shape; they are reinitialized.
    _new_when_missing: tuple[str, ...] = ("classifier.",)
    _reinit_message = (
        "The classification head of {name} is missing or has a different shape, and was reinitialized ({head}). "
        "Train it before use."
    )
    _has_warned_about_image_size = False  # so that each model warns once
    conversion_record: dict[str, Any] | None = None  # source of converted weights

    def __init__(self, config: HfVisionConfig, *args: Any, **kwargs: Any):
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    def check_forward_arguments(self, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for an argument of `forward` that neither transformers' models nor these have.

        None is not given: VitPose passes such a `dataset_index` to every backbone.
        """
        given = [name for name, value in kwargs.items() if value is not None]
        check_removed_arguments("forward", given)
        check_arguments(f"{type(self).__name__}.forward", given, _FORWARD_ARGUMENTS)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters without weight decay: all but kernels. timm's optimizer factory asks for them."""
        layers = (nn.Linear, nn.Conv2d)
        kernels = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, layers)}
        return {name for name, _ in self.named_parameters() if name not in kernels}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameters by layer, for the layer-wise decay of timm's optimizer factory.

        Embeddings (a ResNet's root) come first, then the layers or stages, and the rest is with the head, as under
        `hf-vit finetune --layer-decay`.
        """
        stem = r".*embeddings\.|(?:bit\.)?resnet\.(?:convolution|norm)\."
        return {"stem": stem, "blocks": r"(?:vit\.|bit\.resnet\.|resnet\.)?(?:layers|stages)\.(\d+)\."}

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: Any = None,
        **kwargs: Any,
    ) -> _Model:
        """Load a model; a missing weight is an error, where transformers would initialize it randomly.

        The arguments are those of transformers, and:

        * `image_size=` resamples the position embeddings permanently; `patch_size=` also resizes the kernel of the
          patch embedding. In a flexible model, neither changes any weights.
        * `num_channels=` adapts the first convolution, see `set_num_channels`.

        Some weights may be missing, with a warning. A head that is missing, or has a different number of labels, is
        reinitialized as the configuration's `head_init` says; the predictor of `HfViTForMaskedPatchPrediction` to
        zeros. A missing mask token is initialized to zeros, in `HfViTForMaskedPatchPrediction` randomly.

        For the models of other libraries, use `hf_vit.load` or `hf-vit convert`.

        Returns:
            The model, in evaluation mode; with `output_loading_info=True`, a tuple of the model and the missing,
            unexpected and mismatched keys.

        Raises:
            ValueError: a parameter is missing, unexpected or has the wrong shape, apart from these exceptions. For a
                damaged file, transformers' or torch's error; `hf_vit.load` raises ValueError, and names the file.
        """
        name = pretrained_model_name_or_path
        config_class: Any = cls.config_class
        check_removed_arguments("from_pretrained", kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        requested = {field: kwargs.pop(field) for field in _ADAPTED if kwargs.get(field) is not None}
        if isinstance(config, str | os.PathLike):
            config = config_class.from_pretrained(config)
        if config is not None and name is not None:
            # The weights are loaded in the sizes of the folder, and then adapted to those of `config`.
            of_folder, _ = config_class.get_config_dict(name, **kwargs)
            stored = config_class.from_dict(of_folder)
            config = copy.deepcopy(config)
            for field in _ADAPTED:
                if hasattr(config, field):
                    requested.setdefault(field, getattr(config, field))
                    setattr(config, field, getattr(stored, field))
        kwargs.setdefault("ignore_mismatched_sizes", True)
        loaded: Any = super().from_pretrained(name, *model_args, config=config, output_loading_info=True, **kwargs)
        model, info = loaded
        model._check_loading(info, name or "the state_dict")
        model._adapt(requested)
        return loaded if wants_info else model

    def _adapt(self, sizes: Mapping[str, Any]) -> None:
        """Set the sizes of `_ADAPTED` that differ from the configuration."""
        changed = {}
        for field, size in sizes.items():
            check_size(field, size)
            if as_pair(size) != as_pair(getattr(self.config, field, 0)):  # a ResNet has no patch_size
                changed[field] = size
        if "num_channels" in changed:
            self.set_num_channels(changed["num_channels"])
        if "patch_size" in changed:
            self.set_patch_size(changed["patch_size"], sizes.get("image_size"))
        elif "image_size" in changed:
            self.set_image_size(changed["image_size"])

    def post_init(self) -> None:
        """Finish the construction; a classifier must not ignore a head in the checkpoint."""
        super().post_init()
        if hasattr(self, "classifier") and self._keys_to_ignore_on_load_unexpected:
            # transformers adds the patterns that the encoder ignores, which include the head
            self._keys_to_ignore_on_load_unexpected = set(self._keys_to_ignore_on_load_unexpected) - {HEAD_KEYS}

    def _check_loading(self, info: dict[str, Any], name: str | os.PathLike) -> None:
        """Raise ValueError for keys that do not match, unless they are all keys of one prefix in `_new_when_missing`.

        Args:
            info: transformers' loading info: "missing_keys", "unexpected_keys" and "mismatched_keys".
            name: name of the checkpoint, for messages.
        """
        differs = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
        heads = [{key for key in self.state_dict() if key.startswith(prefix)} for prefix in self._new_when_missing]
        may_be_new = set[str]().union(*(head for head in heads if head <= differs))
        problems = [f"{key} is missing" for key in sorted(set(info["missing_keys"]) - may_be_new)]
        for key, theirs, ours in info["mismatched_keys"]:
            if key not in may_be_new:
                problems.append(f"{key} has shape {tuple(theirs)}, not {tuple(ours)}")
        problems += [f"{key} is not used" for key in sorted(info["unexpected_keys"])]
        if problems:
            raise ValueError(f"the weights of {name} do not match its configuration: {'; '.join(problems)}")
        if differs:
            self.config.clear_calibration()
            logger.warning(self._reinit_message.format(name=name, head=_HEADS[self.config.head_init]))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save the model with transformers, and the conversion record (conversion.json) if the model was converted."""
        super().save_pretrained(save_directory, *args, **kwargs)
        self._save_record(save_directory)

    def save_without_weights(self, save_directory: str | os.PathLike) -> None:
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
        """True if gradient checkpointing is on. PEFT 0.21 reads this property, for which transformers would warn."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

    def set_image_size(self, image_size: Size) -> None:
        """Set another image size; learned position embeddings are resampled permanently.

        Args:
            image_size: an int or (height, width) in pixels.

        Raises:
            ValueError: the size is not valid for this model.
        """
        self.config.image_size = image_size
        self.config.validate_architecture()

    def set_patch_size(self, patch_size: Size, image_size: Size | None = None) -> None:
        """Set another patch size.

        Raises:
            ValueError: the model has no patches, or its code is that of a plain ViT alone.
        """
        raise ValueError(f"cannot set patch_size {patch_size}: {type(self).__name__} has a fixed one, or none")

    @torch.no_grad()
    def set_num_channels(self, num_channels: int) -> None:
        """Set another number of image channels, and adapt the kernel of the first convolution as timm does.

        For one channel, the kernel is summed over the old channels. Otherwise, the old channels are repeated in order,
        or the first ones are kept, and multiplied by old / new number of channels.

        Raises:
            ValueError: the number is invalid, or the model's outputs depend on it.
        """
        before = self.config.num_channels
        self.config.num_channels = num_channels  # raises if invalid
        convolution = next(module for module in self.modules() if isinstance(module, nn.Conv2d))
        kernel = convolution.weight
        if num_channels == 1:
            adapted = kernel.sum(dim=1, keepdim=True)
        else:
            repeats = math.ceil(num_channels / before)
            adapted = kernel.repeat(1, repeats, 1, 1)[:, :num_channels] * (before / num_channels)
        convolution.weight = nn.Parameter(adapted, kernel.requires_grad)
        convolution.in_channels = num_channels

    def check_images(self, pixel_values: torch.Tensor) -> tuple[int, int]:
        """Return (height, width) of images.

        Raises:
            ValueError: `pixel_values` is not (batch, num_channels, height, width).
        """
        shape = tuple(pixel_values.shape)
        channels = self.config.num_channels
        if len(shape) != 4 or shape[1] != channels:
            raise ValueError(f"pixel_values has shape {shape}; expected (batch, {channels}, height, width)")
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - it is public; tensors there
            return int(shape[2]), int(shape[3])
        return shape[2], shape[3]

    def warn_about_image_size(self, pixel_values: torch.Tensor, is_intended: bool | None) -> None:
        """Warn once if the images do not have the configured size; never while torch traces the model.

        Args:
            pixel_values: (batch, num_channels, height, width)
            is_intended: suppress the warning.
        """
        if is_intended or is_tracing() or self._has_warned_about_image_size:
            return
        size = (pixel_values.shape[-2], pixel_values.shape[-1])
        own = as_pair(self.config.image_size)
        if size != own:
            self._has_warned_about_image_size = True
            logger.warning(
                f"The images have {size[0]} x {size[1]} pixels, but the model's image_size is {own[0]} x {own[1]}. "
                "Use hf_vit.load(..., image_size=...), or pass interpolate_pos_encoding=True if this is intended."
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module as in the original (vit_jax/models_vit.py and models_resnet.py, or flax's defaults).

        transformers calls this for each module with parameters. transformers' own initialization (random weights, norms
        one, biases zero) runs first. A module with a different rule has a method `initialize`.
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
    """Return whether torch traces the model, for torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - it is public


def lecun_normal_(weight: torch.Tensor) -> None:
    """Initialize with flax's default, LeCun normal: truncated at two standard deviations, variance 1 / fan_in."""
    std = 1 / math.sqrt(weight[0].numel()) / _TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
