"""Description of a released file in words."""

from .released import (
    Released,
    bare_name,
    copies_of,
    data_set_name,
    families,
    find_released,
    refused,
    released,
    released_facts,
    variants,
)
from .searching import address_of


def explain(name: str) -> str:
    """Describe a released file in words.

    Args:
        name: name of a file, with or without its address and `.npz`: an AugReg name, `augreg:Ti/16`, `sam/ViT-B_16`,
            ... Where several files have the name, all of them are described.

    Raises:
        ValueError: no released file has this name.
    """
    name = address_of(name)
    bare = bare_name(name)
    entry = find_released(name)
    namesakes = [other for other in released() if other.name == bare]
    if entry is None and not namesakes:
        if (what := refused(name)) is not None:
            return f"{name}\nnot converted by hf_vit: {what}"
        raise ValueError(
            f"cannot explain {name!r}: it is no released file, no architecture (expected {', '.join(variants())}) "
            f"and no family (expected {', '.join(families())})"
        )
    return "\n\n".join(_in_words(entry) for entry in ([entry] if entry else namesakes))


def _in_words(entry: Released) -> str:
    facts = entry.facts
    resolution = facts.get("resolution")
    architecture = f"{'BiT' if entry.family.startswith('bit') else 'ViT'}-{entry.variant.removesuffix('-gap-norep')}"
    lines = [
        entry.location if "://" in facts["location"] else f"{entry.location} ({facts['location']})",
        f"{architecture}, {facts['title']}"
        + (f"; {resolution} x {resolution} pixels" if resolution else "; its resolution is read from the file"),
    ]
    if "beside" in facts:
        lines.append(f"  also in the file, not converted: {', '.join(facts['beside'])}")
    lines += [f"  {label}: {text}" for label, text in facts["hyper_parameters"].items()]
    for result in facts.get("results", ()):
        of = f" of {result['of']}" if "of" in result else ""
        lines.append(
            f"  {data_set_name(result['dataset'])} {result['metric']}{of}: {result['value']} % "
            f"({result['source']['name']}, {result['table']})"
        )
    path = bare_name(entry.location).removeprefix("gs://")
    if copies := copies_of(entry.location):
        lines.append(f"  the same numbers: {', '.join(copies)}")
    if (fingerprint := released_facts()["fingerprints"].get(path)) is not None:
        lines.append(f"  fingerprint: {fingerprint}")
    if entry.variant == "B/8" and entry.family == "augreg":
        lines.append("  note: B/8 was released at 224 x 224 pixels only")
    return "\n".join(lines)
