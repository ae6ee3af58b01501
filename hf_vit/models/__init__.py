"""The models; whoever imports anything of them can use transformers' Auto classes and `pipeline` with the family."""

from .auto import register_auto_classes

register_auto_classes()
