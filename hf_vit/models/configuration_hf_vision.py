"""What the configurations of the family share: sizes, unknown arguments, and reading those of transformers."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig

from .configuration_checks import check_general, read_settings, wrong_types_refused

Size = int | list[int] | tuple[int, int]

# What transformers passes to a config besides the fields that the class declares.
_KNOWN_EXTRAS = frozenset(
    "_attn_implementation _commit_hash _name_or_path attn_implementation auto_map experts_implementation model_type "
    "name_or_path num_labels output_attentions quantization_config tie_last_hidden_states tie_word_embeddings "
    "torch_dtype use_cache".split()
)
# Arguments of `from_pretrained` that say how to find a config.json.
_WHERE = (
    "cache_dir force_download local_files_only proxies revision subfolder token trust_remote_code _from_auto "
    "_from_pipeline".split()
)
# Numbers of transformers' BiT: BitGroupNormActivation and WeightStandardizedConv2d of its modeling_bit.py.
TRANSFORMERS_BIT: dict[str, Any] = {
    "group_norm_eps": 1e-5,
    "weight_standardization_eps": 1e-8,
    "weight_standardization_form": "variance",
}


def as_pair(size: Size) -> tuple[int, int]:
    """`224` -> `(224, 224)`; `[224, 320]` -> `(224, 320)`: (height, width)."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def refuse_unknown(what: str, choice: str, known: Iterable[str]) -> None:
    if choice not in known:
        raise ValueError(f"unknown {what} {choice!r}; known: {', '.join(known)}")


def shared_settings(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json of transformers that have the same name here.

    Args:
        settings: the config.json.
        defaults: such fields of its architecture, with their values there where the file does not say; what every
            configuration has comes besides.
    """
    general = {field.name for field in fields(PreTrainedConfig)} | {"torch_dtype", "num_labels", "quantization_config"}
    ours = {name: value for name, value in settings.items() if name in general and name != "architectures"}
    return ours | {name: settings.get(name, default) for name, default in defaults.items()}


class HfVisionConfig(BackboneConfigMixin, PreTrainedConfig):
    """Base of the configurations; a subclass is `@strict` and declares `num_channels` and `image_size`."""

    num_channels: int = 3
    image_size: Size = 224
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    if TYPE_CHECKING:
        num_labels: int = 2  # transformers declares it as optional

    def __post_init__(self, **kwargs: Any):
        out_features, out_indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        if unknown := sorted(kwargs.keys() - _KNOWN_EXTRAS):
            raise ValueError(f"{type(self).__name__} does not know {', '.join(unknown)}")
        check_general(kwargs, self)
        self.validate_architecture()  # before anything is made of these numbers
        super().__post_init__(**kwargs)
        self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of a config.json, `in_our_words`.

        Args:
            stored_settings: the config.json, where it has been read already.
        """
        settings = kwargs.pop("stored_settings", None)
        if settings is None:
            where = {name: value for name, value in kwargs.items() if name in _WHERE}
            settings = read_settings(pretrained_model_name_or_path, **where)
        kwargs = {name: value for name, value in kwargs.items() if name not in _WHERE}
        with wrong_types_refused(f"the config.json of {pretrained_model_name_or_path}"):
            return cls.in_our_words(settings, str(pretrained_model_name_or_path)), kwargs

    @classmethod
    def in_our_words(cls, settings: dict[str, Any], folder: str) -> dict[str, Any]:
        """A config.json of one of transformers' own models as fields of this class; any other as it is.

        Args:
            folder: where it is from, for messages.
        """
        return settings

    def validate_architecture(self) -> None:
        """Called by `@strict` after construction, and by the model, since fields can be set later."""

    def check_images(self, shape: Sequence[int]) -> None:
        """Raise ValueError where the shape of a tensor is not (batch, num_channels, height, width)."""
        if len(shape) != 4 or shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values has shape {tuple(shape)}; expected (batch, {self.num_channels}, height, width)"
            )
