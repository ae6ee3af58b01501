"""The models; importing the package registers them with transformers' Auto classes and `pipeline`."""

from . import processor_size as processor_size  # which `save_pretrained` looks for
from .auto import register_auto_classes

register_auto_classes()
