"""The catalog of released checkpoints: what a file name means, which files there are, which is the best."""

from .augreg import AUGREG_MODELS, INDEX, parse_augreg
from .explaining import explain
from .released import Released, find_released, released, released_facts, variants
from .searching import address_of, best_augreg, search

__all__ = [
    "AUGREG_MODELS",
    "INDEX",
    "Released",
    "address_of",
    "best_augreg",
    "explain",
    "find_released",
    "parse_augreg",
    "released",
    "released_facts",
    "search",
    "variants",
]
