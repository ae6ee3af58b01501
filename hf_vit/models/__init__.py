"""The models; whoever imports anything of them can use transformers' Auto classes and `pipeline` with the family."""

from . import loading as loading  # which `save_pretrained` looks for
from .auto import register_auto_classes

register_auto_classes()
