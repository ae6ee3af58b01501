"""`hf-vit push`, `hf-vit verify` and `hf-vit card`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from ..files.output import write_text
from .arguments import SaveFor

_FOLDER = "a folder that convert, training or save_pretrained wrote"
_License = Annotated[str | None, "license such as apache-2.0, if the card does not have one", "ID"]


def push(
    folder: Annotated[Path, _FOLDER],
    repository: Annotated[str, "repository: OWNER/NAME, or NAME in your own account; created if missing"],
    *,
    private: Annotated[bool, "create the repository as private"] = False,
    revision: Annotated[str | None, "branch to push to; created if missing", "BRANCH"] = None,
    create_pr: Annotated[bool, "open a pull request instead of committing"] = False,
    save_for: SaveFor = None,
    static_space: Annotated[
        str | None,
        "also publish the page of `hf-vit demo --static` as this Space, OWNER/NAME or NAME; the card links to it",
        "NAME",
    ] = None,
    runtime: Annotated[Path | None, "for --static-space: as in `hf-vit demo --static`", "PACKAGE"] = None,
    code: Annotated[
        bool, "also push the model's code, so that the model loads without hf_vit, with trust_remote_code=True"
    ] = False,
    license_: _License = None,
    allow_incomplete_card: Annotated[bool, "push even if the card lacks something, such as a license"] = False,
    message: Annotated[str, "commit message"] = "Upload with hf_vit",
    dry_run: Annotated[bool, "list the files to push, but push nothing"] = False,
) -> None:
    """Push a folder to the Hub: weights, processor and card in one commit."""
    from ..hub.pushing import push
    from ..hub.static_space import full_space_name, push_static_space

    if runtime and not static_space:
        raise ValueError("--runtime needs --static-space")
    visibility = True if private else None
    space = None
    if static_space:
        space = full_space_name(static_space)
    with TemporaryDirectory() as scratch:
        page = Path(scratch, "page")
        if space and not dry_run:
            from ..demo.page import write_static_page

            write_static_page([folder], page, runtime=runtime, repositories=[full_space_name(repository)])
        pushed = push(
            folder,
            repository,
            private=visibility,
            revision=revision,
            create_pr=create_pr,
            code=code,
            save_for=save_for,
            license=license_,
            space=space,
            allow_incomplete_card=allow_incomplete_card,
            message=message,
            dry_run=dry_run,
        )
        if space and not dry_run:
            print(f"pushed the page: {push_static_space(page, space, visibility)}")
    for name, size in pushed.files.items():
        print(f"{size:>15,}  {name}")
    for name in pushed.deleted:
        print(f"{'deleted':>15}  {name}")
    for problem in pushed.problems:
        print(f"model card: {problem}")
    if pushed.commit is not None:
        print(f"pushed: {pushed.commit.pr_url or pushed.commit.commit_url}")
    elif space:
        print(f"nothing was pushed: this was a dry run (the page would be the Space {space})")
    else:
        print("nothing was pushed: this was a dry run")


def verify(
    folder: Annotated[
        Path, "a folder with a manifest.json, written by convert, training or push, or downloaded with `hf download`"
    ],
) -> None:
    """Check the files of a folder against its manifest."""
    from ..files.manifest import MANIFEST, check_files, read_manifest
    from ..files.messages import join_names
    from ..files.reading import read_text

    manifest = folder / MANIFEST
    checked = check_files(manifest, thorough=True)
    if not checked:
        raise ValueError(f"{manifest} is not an hf_vit manifest, or lists no file of this folder")
    print(f"{len(checked)} files are unchanged: {', '.join(checked)}")
    listed = read_manifest(read_text(manifest)) or {}
    missing = sorted(listed.keys() - checked)
    if missing:
        print(f"missing: {join_names(missing)}")


def card(
    folder: Annotated[Path | None, _FOLDER] = None,
    *,
    published: Annotated[Path | None, "write the cards of all published checkpoints to this folder", "OUTPUT"] = None,
    name: Annotated[str | None, "name of the repository in the examples (default: the name of the folder)"] = None,
    license_: _License = None,
    write: Annotated[bool, "write the card to the folder's README.md; your own text in it is kept"] = False,
) -> None:
    """Render the model card of a folder and check it, without pushing."""
    if (folder is None) == (published is None) or (published and (name or license_ or write)):
        raise ValueError("give a folder, or --published OUTPUT without other options")
    if published is not None:
        from ..hub.published_cards import write_published_cards

        print(f"{len(write_published_cards(published))} cards written to {published}")
        return
    from ..hub.cards import check_card, render_folder_card

    assert folder is not None
    text = render_folder_card(folder, name=name, license=license_)
    if write:
        write_text(folder / "README.md", text)
    else:
        print(text, end="")
    problems = check_card(text)
    if problems:
        raise ValueError(f"the card has problems: {'; '.join(problems)}")
