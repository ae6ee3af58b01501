"""What all models share: loading that never draws at random, saving, initialisation, another image size."""

import copy
import json
import math
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .attention import HfViTAttention
from .configuration_hf_vit import HfViTConfig, Size, as_pair
from .embeddings import HfViTEmbeddings
from .inference import optimize, restore
from .layers import HfViTLayer, HfViTMapPooling
from .position_tables import PositionTables
from .upstream_vit import REBUILDS_PIXELS, WEIGHT_NAMES, is_upstream

logger = logging.get_logger(__name__)

# Standard deviation of a normal distribution cut at two of its own: jax.nn.initializers corrects for it.
TRUNCATED_STD = 0.87962566103423978
# What `HfViTForMaskedPatchPrediction` has besides the encoder.
MASKED_PATCH_KEYS = [r"^mask_token$", r"^predictor\."]
CONVERSION_RECORD = "conversion.json"
# Arguments of `push_to_hub`, where `save_pretrained` is to call it.
HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


class HfViTPreTrainedModel(PreTrainedModel):
    config: HfViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _no_split_modules = ["HfViTEmbeddings", "HfViTLayer"]  # noqa: RUF012 - transformers declares the type
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}  # noqa: RUF012
    _input_embed_layer = "patch_embeddings"
    # A checkpoint with a head or a pooler may be loaded without: that loses nothing in silence, it is asked for.
    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"^pooler\.", *MASKED_PATCH_KEYS]  # noqa: RUF012

    # What may be missing from a checkpoint, or be of another shape: it is made anew, and said so.
    _new_when_missing: tuple[str, ...] = ("classifier.",)
    _new_in_words = "The classification head of {name} does not fit; it was re-created as zeros: train it."

    conversion_record: dict[str, Any] | None = None  # what the weights were converted from

    def __init__(self, config: HfViTConfig, *args, **kwargs):
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a model; nothing in it is random.

        Folders of transformers' own `vit`, `vit_mae` and (of version 4) `vit-hybrid` load too, with their numbers.

        `image_size=` other than the stored one resamples the position embeddings, once. A head that is missing, or of
        another number of labels, is re-created as zeros, and said so.

        Raises:
            ValueError: anything else is missing, left over or of another shape.
        """
        hub = {name: kwargs[name] for name in ("cache_dir", "local_files_only", "revision", "subfolder", "token")
               if name in kwargs}  # fmt: skip
        if pretrained_model_name_or_path is None:  # the weights come as `state_dict=`
            settings, stored_size = {}, config.image_size
        else:
            settings, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **hub)
            stored_size = cls.config_class.from_pretrained(pretrained_model_name_or_path, **hub).image_size
        upstream_names = cls.upstream_names(settings)
        if upstream_names:
            kwargs["key_mapping"] = {**upstream_names, **kwargs.get("key_mapping", {})}
        image_size = kwargs.pop("image_size", stored_size if config is None else config.image_size)
        if config is not None:
            config = copy.deepcopy(config)
            config.image_size = stored_size
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("ignore_mismatched_sizes", True)
        model, info = super().from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            pretrained_model_name_or_path, *model_args, config=config, output_loading_info=True, **kwargs
        )
        if upstream_names:
            _settle_upstream(model, info)
        _check_loading(cls, info, pretrained_model_name_or_path or "the state_dict")
        if as_pair(image_size) != as_pair(stored_size):
            model.set_image_size(image_size)
        return (model, info) if wants_info else model

    @classmethod
    def upstream_names(cls, settings: dict[str, Any]) -> dict[str, str]:
        """Names in the files of transformers' own model -> ours; empty where a config.json is not one of its."""
        return WEIGHT_NAMES if is_upstream(settings) else {}

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """As in transformers; writes `conversion.json` too, if the model was converted."""
        hub_options = {name: kwargs.pop(name) for name in HUB_OPTIONS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, **kwargs)
        self._save_record(save_directory)
        if push_to_hub:
            repo_id = hub_options.pop("repo_id", Path(save_directory).resolve().name)
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub_options)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Push the model with `hf_vit.hub.pushing.push_saved`, or as transformers does where there is no hf_vit."""
        # The only reach upward from the files that travel: what pushes does not travel with them.
        try:
            pushing = import_module("hf_vit.hub.pushing")
        except ModuleNotFoundError:
            return super().push_to_hub(repo_id, **kwargs)
        return pushing.push_saved(self, repo_id, **kwargs)

    def save_description(self, save_directory) -> None:
        """What `save_pretrained` writes besides the weights."""
        self.config.architectures = [type(self).__name__]
        self.config.dtype = self.dtype
        self.config.save_pretrained(save_directory)
        self._save_record(save_directory)

    def _save_record(self, save_directory) -> None:
        if self.conversion_record is not None:
            text = json.dumps(self.conversion_record, indent=2)
            (Path(save_directory) / CONVERSION_RECORD).write_text(text + "\n")

    @torch.no_grad()
    def set_image_size(self, image_size: Size) -> None:
        """Resample the position embeddings to another image size, an int or (height, width) in pixels, for good."""
        config, new_grid = self.config, self.config.grid_of(*as_pair(image_size))
        embeddings: Any = self.base_model.embeddings
        if isinstance(embeddings.position_embeddings, nn.Parameter):
            embeddings.position_embeddings = nn.Parameter(embeddings.resampled(new_grid))
        for module in self.modules():
            if isinstance(module, PositionTables):
                module.resample(new_grid)
        config.image_size_history = [*(config.image_size_history or []), config.image_size]
        config.image_size = image_size

    def optimize_for_inference(self, batch_size: int = 1):
        """Compute the same faster, where gradients are not wanted; see `hf_vit.models.inference`.

        Takes as much memory again as the weights. Call it once the model has its weights, dtype and device. It may be
        called again; `train()` takes it back; saving and exporting do not see it, and a compiled model packs nothing.

        Args:
            batch_size: images at a time, as they will usually come.

        Returns:
            the model itself, in evaluation mode.
        """
        optimize(self, rows=batch_size * self.tokens_per_image)
        return self.eval()

    @property
    def tokens_per_image(self) -> int:
        rows, columns = self.config.grid_size
        return self.config.num_prefix_tokens + rows * columns

    def train(self, mode: bool = True):
        if mode:
            restore(self)
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """The original's initialisation (vit_jax/models_vit.py, models_resnet.py; flax's defaults elsewhere).

        transformers initialises only modules that own parameters, so that each says for itself what it is.
        """
        super()._init_weights(module)
        if isinstance(module, HfViTEmbeddings):
            if isinstance(module.position_embeddings, nn.Parameter):
                init.normal_(module.position_embeddings, std=self.config.initializer_range)
            if module.cls_token is not None:
                init.zeros_(module.cls_token)
        elif isinstance(module, PositionTables):
            for table in module.parameters():
                init.normal_(table, std=self.config.initializer_range)
        elif isinstance(module, HfViTMapPooling):
            init.xavier_uniform_(module.probe)
        elif isinstance(module, nn.Conv2d):
            _lecun_normal_(module.weight)
        elif isinstance(module, nn.GroupNorm) and getattr(module, "role", None) == "last":
            init.zeros_(module.weight)  # a new residual unit passes its input on
        elif isinstance(module, nn.Linear):
            _init_linear(module, getattr(module, "role", "projection"))


def _init_linear(linear: nn.Linear, role: str) -> None:
    """`role` is what the model calls the layer: "projection", "mlp", "pre_logits" or "head"."""
    if role == "head":
        init.zeros_(linear.weight)
    elif role == "pre_logits":
        _lecun_normal_(linear.weight)
    else:
        init.xavier_uniform_(linear.weight)
    if role == "mlp":
        init.normal_(linear.bias, std=1e-6)


def _lecun_normal_(weight: torch.Tensor) -> None:
    std = 1 / math.sqrt(weight[0].numel()) / TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _settle_upstream(model: HfViTPreTrainedModel, info: dict) -> None:
    """What only the weights of one of transformers' ViTs say, and the names in which the model is saved again."""
    pooler = getattr(model.base_model, "pooler", None)
    missing = {key for key in info["missing_keys"] if key.removeprefix("vit.").startswith("pooler.dense.")}
    if pooler is not None and missing:  # its config.json does not say whether it has a pooler
        pooler.dense = None
        model.config.representation_size = None
        info["missing_keys"] = set(info["missing_keys"]) - missing
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [change for change in conversions if not isinstance(change, WeightRenaming)]


def _check_loading(model_class: type[HfViTPreTrainedModel], info: dict, name: str) -> None:
    """Only the head may differ from the checkpoint."""
    may_be_new = model_class._new_when_missing
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(may_be_new))
    mismatched = [entry for entry in info["mismatched_keys"] if not entry[0].startswith(may_be_new)]
    unexpected = sorted(key for key in info["unexpected_keys"] if not re.search(REBUILDS_PIXELS, key))
    if missing or mismatched or unexpected:
        problems = [f"{key} is missing" for key in missing]
        problems += [f"{key} has shape {tuple(theirs)}, not {tuple(ours)}" for key, theirs, ours in mismatched]
        problems += [f"{key} is not used" for key in unexpected]
        raise ValueError(f"{name} does not fit its configuration: {'; '.join(problems)}")
    if info["missing_keys"] or info["mismatched_keys"]:
        logger.warning(model_class._new_in_words.format(name=name))
