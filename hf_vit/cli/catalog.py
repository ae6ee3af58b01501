"""`hf-vit catalog`."""

from typing import Annotated

from .arguments import Count


def catalog(
    query: Annotated[
        str, 'an architecture ("B/16", "R50+L/32"), a family ("siglip2"), or a file ("augreg:Ti/16", or its name)'
    ],
    *,
    adapted_to: Annotated[
        str | None, "only files fine-tuned on this data: imagenet2012, oxford_iiit_pet, ...", {"metavar": "DATA"}
    ] = None,
    resolution: Annotated[int | None, "only files fine-tuned at 224 or 384 pixels", {"metavar": "PIXELS"}] = None,
    index: Annotated[str | None, "AugReg's index.csv of 51,509 files: a path, https://... or gs://..."] = None,
    limit: Annotated[Count, "largest number of files to list"] = 10,
) -> None:
    """Find released checkpoints, or explain a file name."""
    from ..catalog import INDEX, explain, families, files_of, search, variants

    narrowing = {"adapted-to": adapted_to, "resolution": resolution, "index": index}
    given = [option for option, value in narrowing.items() if value is not None]
    if given and query not in variants():
        raise ValueError(f"--{given[0]} needs an architecture such as B/16; {query} is none")
    if query in families():
        found = files_of(query)
    elif query in variants():
        found = search(query, adapted_to, resolution, index, limit)
    else:
        print(explain(query))
        return
    for location, about in found:
        print(location, f"  {about}", sep="\n")
    if query in families():
        return
    if index is None:
        print(f"{len(found)} found in the built-in list; --index {INDEX} searches all files of AugReg")
    elif not found:
        raise ValueError(f"{index} has no such file")
