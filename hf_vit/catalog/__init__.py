"""The catalog of released checkpoints: meaning of file names, list of files, choice of the best one."""

from .released import (
    AUGREG_MODELS,
    INDEX,
    Released,
    copies_of,
    families,
    find_released,
    layers_missing_in,
    original_of,
    parse_augreg,
    refused,
    released,
    released_facts,
    released_with,
    variants,
    with_cards,
)
from .searching import address_of, best_augreg, explain, files_of, search

__all__ = [
    "AUGREG_MODELS",
    "INDEX",
    "Released",
    "address_of",
    "best_augreg",
    "copies_of",
    "explain",
    "families",
    "files_of",
    "find_released",
    "layers_missing_in",
    "original_of",
    "parse_augreg",
    "refused",
    "released",
    "released_facts",
    "released_with",
    "search",
    "variants",
    "with_cards",
]
