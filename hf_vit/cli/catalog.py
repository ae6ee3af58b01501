"""`hf-vit catalog`."""

import argparse

from .arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Add `catalog`."""
    command = add_command(commands, "catalog", _catalog, "find released checkpoints, or explain a file name")
    command.add_argument(
        "query", help='an architecture ("B/16", "R50+L/32"), a family ("siglip2"), or the name of a file'
    )
    command.add_argument(
        "--adapted-to", metavar="DATA", help="only files fine-tuned on this data: imagenet2012, oxford_iiit_pet, ..."
    )
    command.add_argument("--resolution", type=int, metavar="PIXELS", help="only files fine-tuned at 224 or 384 pixels")
    command.add_argument("--index", help="AugReg's index.csv of 51,509 files: a path, https://... or gs://...")
    command.add_argument("--limit", type=int, default=10, help="largest number of files to list (default 10)")


def _catalog(arguments: argparse.Namespace) -> None:
    from ..catalog import INDEX, explain, families, files_of, search, variants

    if arguments.limit < 1:
        raise ValueError(f"--limit is {arguments.limit}; it must be at least 1")
    narrowing = [name for name in ("adapted_to", "resolution", "index") if getattr(arguments, name) is not None]
    if narrowing and arguments.query not in variants():
        option = narrowing[0].replace("_", "-")
        raise ValueError(f"--{option} needs an architecture such as B/16; {arguments.query} is none")
    if arguments.query in families():
        for location, about in files_of(arguments.query):
            print(location, f"  {about}", sep="\n")
        return
    if arguments.query not in variants():
        print(explain(arguments.query))
        return
    found = search(arguments.query, arguments.adapted_to, arguments.resolution, arguments.index, arguments.limit)
    for location, about in found:
        print(location, f"  {about}", sep="\n")
    if arguments.index is None:
        print(f"{len(found)} found in the built-in list; --index {INDEX} searches all files of AugReg")
    elif not found:
        raise ValueError(f"{arguments.index} has no such file")
