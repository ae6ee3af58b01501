"""`hf-vit push`, `hf-vit verify` and `hf-vit card`."""

import argparse
from pathlib import Path

from ..files.output import write_text
from .arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Add `push`, `verify` and `card`."""
    _add_push(commands)
    _add_verify(commands)
    _add_card(commands)


def _add_push(commands: Commands) -> None:
    command = add_command(
        commands, "push", _push, "push a folder to the Hub: weights, processor and card in one commit"
    )
    command.add_argument("folder", type=Path, help="a folder that convert, training or save_pretrained wrote")
    command.add_argument("repository", help="repository, OWNER/NAME or a NAME of your own; created if missing")
    command.add_argument("--private", action="store_true", help="create the repository as private")
    command.add_argument("--revision", metavar="BRANCH", help="branch to push to; created if missing")
    command.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    command.add_argument("--code", action="store_true", help="add the code, for trust_remote_code=True without hf_vit")
    command.add_argument("--license", metavar="ID", help="licence such as apache-2.0, if the card does not have one")
    command.add_argument(
        "--allow-incomplete-card", action="store_true", help="push even if the card lacks something, such as a licence"
    )
    command.add_argument(
        "--message", default="Upload with hf_vit", help="message of the commit (default: Upload with hf_vit)"
    )
    command.add_argument("--dry-run", action="store_true", help="list the files to push, but push nothing")


def _push(arguments: argparse.Namespace) -> None:
    from ..hub.pushing import push

    pushed = push(
        arguments.folder,
        arguments.repository,
        private=True if arguments.private else None,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
        code=arguments.code,
        license=arguments.license,
        allow_incomplete_card=arguments.allow_incomplete_card,
        message=arguments.message,
        dry_run=arguments.dry_run,
    )
    print(*(f"{size:>15,}  {name}" for name, size in pushed.files.items()), sep="\n")
    print(*(f"{'deleted':>15}  {name}" for name in pushed.deleted), sep="\n", end="\n" if pushed.deleted else "")
    for problem in pushed.problems:
        print(f"the card: {problem}")
    if pushed.commit is None:
        print("nothing was pushed: this was a dry run")
    else:
        print(f"pushed: {pushed.commit.pr_url or pushed.commit.commit_url}")


def _add_verify(commands: Commands) -> None:
    command = add_command(commands, "verify", _verify, "check the files of a downloaded folder against its manifest")
    command.add_argument(
        "folder", type=Path, help="a folder with the manifest.json of a push, e.g. downloaded with `hf download`"
    )


def _verify(arguments: argparse.Namespace) -> None:
    from ..files.contents import in_words
    from ..files.reading import read_text
    from ..models.utils import MANIFEST, check_files, read_manifest

    manifest = arguments.folder / MANIFEST
    if not manifest.is_file():
        raise ValueError(f"cannot verify {arguments.folder}: it has no {MANIFEST}, which `hf-vit push` writes")
    checked = check_files(manifest, thorough=True)
    if not checked:
        raise ValueError(f"{manifest} is not the manifest of a push, or lists none of the files here")
    print(f"{len(checked)} files are unchanged since the push: {', '.join(checked)}")
    if missing := sorted((read_manifest(read_text(manifest)) or {}).keys() - set(checked)):
        print(f"not here: {in_words(missing)}")


def _add_card(commands: Commands) -> None:
    command = add_command(commands, "card", _card, "render the model card of a folder and check it, without pushing")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", nargs="?", type=Path, help="a folder that convert, training or save_pretrained wrote")
    what.add_argument("--published", type=Path, metavar="OUTPUT", help="write the cards of all published checkpoints")
    command.add_argument("--name", help="name of the repository in the examples (default: that of the folder)")
    command.add_argument("--license", metavar="ID", help="licence such as apache-2.0, if the card does not have one")
    command.add_argument(
        "--write", action="store_true", help="write the card to the folder's README.md; text of your own is kept"
    )


def _card(arguments: argparse.Namespace) -> None:
    if arguments.published is not None:
        if given := [name for name in ("name", "license", "write") if getattr(arguments, name)]:
            raise ValueError(f"--{given[0]} has no effect on --published; leave it out")
        from ..hub.published_cards import write_published_cards

        print(f"{len(write_published_cards(arguments.published))} cards written to {arguments.published}")
        return
    from ..hub.card_check import check_card
    from ..hub.cards import render_folder_card

    card = render_folder_card(arguments.folder, name=arguments.name, license=arguments.license)
    if arguments.write:
        write_text(arguments.folder / "README.md", card)
    else:
        print(card, end="")
    if problems := check_card(card):
        raise ValueError(f"the card has problems: {'; '.join(problems)}")
