"""Push to the Hub: weights, configuration, processor, card and results in one commit, or nothing."""

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from ..files.contents import MARK, PUSHED, in_words, matches
from ..files.reading import parse_json
from ..files.versions import versions_of
from ..loading import copy_for
from ..models.image_processing_hf_vit import HfViTImageProcessor, output_size
from ..models.utils import MANIFEST, as_pair, check_place, manifest_entry, manifest_text, read_manifest, without_secrets
from .card_check import check_card
from .card_metadata import eval_results_file
from .cards import CARD_SOURCES, read_source, render_card
from .remote_code import add_code, code_of

_logger = logging.getLogger(__name__)

_RESULTS, _OUR_RESULTS = ".eval_results/*.yaml", ".eval_results/hf_vit.yaml"
_NOT_REPORTED = (MARK, MANIFEST, ".eval_results", "1_Pooling", ".gitattributes")  # not pushed, without a message
_NOT_LISTED = ("README.md", ".eval_results/*")  # not in the manifest, since people edit them on the Hub
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_PROCESSOR = "preprocessor_config.json"
_ATTEMPTS = 4
_RETRY_WAIT = 1.0  # seconds before the second attempt; doubled before each further one

_Files = dict[str, Path | bytes]  # name in the repository -> file on disk, or content
_Listed = dict[str, dict[str, Any]]  # name in the repository -> its entry in the manifest


class PushError(OSError):
    """Failed push, with the reason in one sentence; nothing was committed."""


class IncompleteCardError(PushError):
    """Push of a card with missing information, such as a license."""


class _Target(NamedTuple):
    """Target and options of a push; see `push`."""

    repo_id: str
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False
    message: str = "Upload with hf_vit"
    description: str | None = None


class Pushed(NamedTuple):
    """Result of a push.

    commit: None for a dry run.
    files: names in the repository -> size in bytes.
    deleted: names of deleted files.
    problems: problems of the card, a sentence each.
    left_out: other files of the folder, which do not belong to a model.
    """

    commit: CommitInfo | None
    files: dict[str, int]
    deleted: list[str]
    problems: list[str]
    left_out: tuple[str, ...] = ()


class _CardRequest(NamedTuple):
    """Additions to a card, and permission to push it with problems."""

    license: str | None
    tags: list[str]
    may_be_incomplete: bool
    space: str | None = None


class _Remote(NamedTuple):
    """Revision of the repository: its commit (None if it does not exist yet) and its files."""

    sha: str | None
    names: list[str]


def push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    code: bool = False,
    dry_run: bool = False,
    save_for: str | None = None,
    images: Sequence[Any] = (),
    license: str | None = None,
    tags: list[str] | None = None,
    space: str | None = None,
    allow_incomplete_card: bool = False,
    message: str = "Upload with hf_vit",
    token: str | bool | None = None,
) -> Pushed:
    """Push a folder of `save_pretrained` to the Hub in one commit.

    Only files that belong to a model are pushed (weights, configuration, processor, README, results, code, ONNX), with
    a manifest of their hashes, which is checked when the model is loaded. The card is rendered from the folder (see
    `hf_vit.hub.cards`); the user's own text in the README of the repository, or else of the folder, is kept. Weights of
    an earlier push that this one replaces are deleted. If anything fails, nothing is committed; another run uploads
    only what is missing.

    Args:
        folder: folder of `save_pretrained`, convert or training.
        repo_id: "owner/name", or "name" for your own repository; created if it does not exist.
        private: visibility of a new repository; None: the owner's default.
        revision: a branch, created if it does not exist.
        create_pr: open a pull request instead of committing.
        code: add the code, so that the model loads with `trust_remote_code=True` without hf_vit.
        dry_run: only return what would be pushed.
        save_for: push a copy of the model for these readers, "hf_vit" or "transformers" (transformers' own classes), as
            in `hf_vit.conversion.convert_to_folder`; None: the folder as it is.
        images: as in `convert_to_folder`.
        license: such as "apache-2.0"; needed once, if the README has none and the source is unknown.
        tags: more tags for the card.
        space: owner/name of a Space with the model's page, which the card links; None: that of the repository's card.
        allow_incomplete_card: push even if `hf_vit.hub.card_check` finds problems, such as a missing license.
        message: message of the commit.
        token: used instead of the token of `hf auth login` or HF_TOKEN; False for none.

    Returns:
        The commit, and the files that were pushed.

    Raises:
        OSError: the folder holds no model.
        ValueError: the folder holds no weights, or symbolic links; or transformers does not support the model; or the
            repository has another visibility than `private`.
        PushError: the card has problems, or the Hub cannot be reached or refuses; the message has the reason.
    """
    target = _Target(repo_id, private, revision, create_pr, message)
    card = _CardRequest(license, tags or [], allow_incomplete_card, space)
    with tempfile.TemporaryDirectory() as temporary:
        if save_for is not None:
            copy = Path(temporary, Path(folder).resolve().name)
            copy_for(folder, copy, save_for, images)
            folder = copy
        files, left_out = _files_of(Path(folder))
        if left_out:
            _logger.warning(f"Not pushed (not part of a model): {in_words(left_out)}.")
        pushed = _push_files(_with_code(files) if code else files, target, card, token=token, dry_run=dry_run)
    return pushed._replace(left_out=tuple(left_out))


def _files_of(folder: Path) -> tuple[_Files, list[str]]:
    """Choose the files of a folder to push; also return the names of the others.

    Raises:
        OSError: the folder holds no model.
        ValueError: it holds no weights, or symbolic links.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one that save_pretrained, convert or training wrote")
    entries = sorted(folder.iterdir())
    code = code_of(folder)
    chosen = [entry for entry in entries if matches(entry.name, PUSHED) or entry in code]
    chosen += [*sorted(folder.glob(_RESULTS)), *folder.glob("1_Pooling/config.json")]
    for entry in (*chosen, folder / ".eval_results"):
        if entry.is_symlink():
            raise ValueError(
                f"cannot push {entry}: it is a symbolic link (to {os.readlink(entry)}); nothing was pushed. "
                "Replace it by the file, for example with `cp -rL`"
            )
    check_place(folder)
    files: _Files = {entry.relative_to(folder).as_posix(): entry for entry in chosen if entry.is_file()}
    for name in ("recipe.yaml", "card_data.json", "metrics.json"):  # the address of a data set may have a password
        if name in files and (public := without_secrets(text := read_source(folder / name))) != text:
            files[name] = public.encode()
    left_out = [entry.name for entry in entries if entry.name not in files and entry.name not in _NOT_REPORTED]
    weights = [name for name in files if _WEIGHTS.fullmatch(name)]
    if not weights:
        raise ValueError(
            f"{folder} holds no *.safetensors; give a folder that save_pretrained, convert or training wrote"
        )
    return files, left_out


def _with_code(files: _Files) -> _Files:
    """Add the files for `trust_remote_code=True`, see `add_code`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("config.json", _PROCESSOR):
            if isinstance(file := files.get(name), Path):
                shutil.copyfile(file, folder / name)
        return files | {name: (folder / name).read_bytes() for name in add_code(folder)}


def _push_files(
    files: _Files, target: _Target, card: _CardRequest, *, token: str | bool | None = None, dry_run: bool = False
) -> Pushed:
    """Commit files and their card; retry if the Hub fails, or another commit came in between."""
    packages = versions_of(("hf_vit", "torch", "transformers"))
    api = HfApi(library_name="hf_vit", library_version=packages.pop("hf_vit"), token=token, user_agent=packages)

    listed = {name: manifest_entry(content) for name, content in files.items() if not matches(name, _NOT_LISTED)}

    def attempt() -> Pushed:
        full = target._replace(repo_id=_with_owner(api, target.repo_id))
        exists = _check_repository(api, full)
        if dry_run:
            return _plan(api, files, listed, _look_up(api, full), full, card)[0]
        if not exists:  # or an empty repository would stay behind
            planned, operations = _plan(api, files, listed, _Remote(None, []), full, card)
            _check_card(planned, full, card)
            _let_the_hub_check(operations, full)
        _create_repository(api, full, exists)
        return _commit(api, files, listed, full, card)

    with _failures_explained(api, target):
        return _with_retries(attempt)


def _with_owner(api: HfApi, repo_id: str) -> str:
    return repo_id if "/" in repo_id else f"{api.whoami(cache=True)['name']}/{repo_id}"


def _check_repository(api: HfApi, target: _Target) -> bool:
    """Return whether the repository exists; raise ValueError if it has another visibility than requested."""
    try:
        is_private = bool(api.model_info(target.repo_id).private)
    except RepositoryNotFoundError:
        return False
    if target.private is not None and target.private != is_private:
        kinds = {True: "private", False: "public"}
        raise ValueError(
            f"{target.repo_id} exists and is {kinds[is_private]}, not {kinds[target.private]}: "
            "change its visibility on the Hub first, or push without private= (--private)"
        )
    return True


def _create_repository(api: HfApi, target: _Target, exists: bool) -> None:
    """Create the repository and the branch; a pull request needs no branch, nor the right to create one."""
    if not exists:
        api.create_repo(target.repo_id, private=target.private, exist_ok=True)
    if target.revision is not None and not target.create_pr and not target.revision.startswith("refs/pr/"):
        api.create_branch(target.repo_id, branch=target.revision, exist_ok=True)


def _look_up(api: HfApi, target: _Target) -> _Remote:
    try:
        info = api.model_info(target.repo_id, revision=target.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return _Remote(None, [])
    return _Remote(info.sha, [sibling.rfilename for sibling in info.siblings or []])


def _commit(api: HfApi, files: _Files, listed: _Listed, target: _Target, card: _CardRequest) -> Pushed:
    remote = _look_up(api, target)
    pushed, operations = _plan(api, files, listed, remote, target, card)
    _check_card(pushed, target, card)
    commit = api.create_commit(
        target.repo_id,
        operations,
        commit_message=target.message,
        commit_description=target.description,
        revision=target.revision,
        create_pr=target.create_pr,
        parent_commit=None if target.create_pr else remote.sha,  # refuses to overwrite a later commit
    )
    return pushed._replace(commit=commit)


def _plan(
    api: HfApi, files: _Files, listed: _Listed, remote: _Remote, target: _Target, card: _CardRequest
) -> tuple[Pushed, list[CommitOperationAdd | CommitOperationDelete]]:
    texts = {name: text for name in CARD_SOURCES if (text := _text(api, files, remote, target, name)) is not None}
    problems: list[str] = []
    if "config.json" in texts:
        text = render_card(texts, target.repo_id, license=card.license, tags=card.tags, space=card.space)
        files, problems = {**files, "README.md": text.encode()}, [*_size_problems(texts), *check_card(text)]
        if (results := eval_results_file(texts, target.repo_id, partial(_task_of, api))) is not None:
            files = {_OUR_RESULTS: results.encode(), **files}
    else:  # a processor was pushed before its model: no card yet
        files = {name: content for name, content in files.items() if name != "README.md"}
    outdated = []
    if any(_WEIGHTS.fullmatch(name) for name in files):
        outdated = [name for name in remote.names if _WEIGHTS.fullmatch(name) and name not in files]
    if (manifest := _manifest(api, listed, remote, target, outdated)) is not None:
        files = {**files, MANIFEST: manifest.encode()}
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    operations += [CommitOperationDelete(name) for name in outdated]
    sizes = {name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in files.items()}
    return Pushed(None, sizes, outdated, problems), operations


def _task_of(api: HfApi, name: str) -> str | None:
    """Return the first task of a benchmark, a data set on the Hub with an eval.yaml; None for any other data set."""
    try:
        tasks = yaml.safe_load(read_source(api.hf_hub_download(name, "eval.yaml", repo_type="dataset")))["tasks"]
        return str(tasks[0]["id"])
    except (HfHubHTTPError, OSError, yaml.YAMLError, TypeError, KeyError, IndexError):
        return None


def _size_problems(texts: dict[str, str]) -> list[str]:
    """Describe a difference between the image sizes of model and image processor, of the whole repository."""
    if not {"config.json", _PROCESSOR} <= texts.keys():
        return []
    config, stored = (parse_json(texts[name], name) for name in ("config.json", _PROCESSOR))
    if stored.get("image_processor_type") != HfViTImageProcessor.__name__ or "image_size" not in config:
        return []
    made, taken = output_size(HfViTImageProcessor.from_dict(stored)), as_pair(config["image_size"])
    if made in (None, taken):
        return []
    return [
        f"the model takes images of {taken} pixels, but its image processor makes {made}; save both with hf_vit.load"
    ]


def _manifest(api: HfApi, listed: _Listed, remote: _Remote, target: _Target, outdated: list[str]) -> str | None:
    """Build the manifest after a push, with entries of unchanged files; None if another program's has this name."""
    earlier: _Listed = {}
    if (text := _text(api, {}, remote, target, MANIFEST)) is not None:
        try:
            found = read_manifest(text)
        except ValueError:  # damaged: replaced
            found = {}
        if found is None:
            return None
        earlier = {name: entry for name, entry in found.items() if name in remote.names and name not in outdated}
    return manifest_text({**earlier, **listed})


def _check_card(pushed: Pushed, target: _Target, card: _CardRequest) -> None:
    if pushed.problems and not card.may_be_incomplete:
        raise IncompleteCardError(
            f"{target.repo_id}: the card has problems: {'; '.join(pushed.problems)}. Nothing was pushed; "
            "allow_incomplete_card=True (--allow-incomplete-card) pushes it as it is"
        )


def _let_the_hub_check(operations: list[CommitOperationAdd | CommitOperationDelete], target: _Target) -> None:
    """Let the Hub check the front matter of the card; raise PushError if it refuses."""
    cards = (one for one in operations if isinstance(one, CommitOperationAdd) and one.path_in_repo == "README.md")
    for operation in cards:
        with operation.as_file() as file:
            card = ModelCard(file.read().decode(), ignore_metadata_errors=True)
        try:
            card.validate()
        except ValueError as error:
            reasons = str(error)
            with suppress(ValueError, TypeError, KeyError):
                reasons = "; ".join(entry["message"] for entry in json.loads(reasons)["errors"])
            raise PushError(f"{target.repo_id}: the Hub refuses the card: {reasons}; nothing was pushed") from error


def _text(api: HfApi, files: _Files, remote: _Remote, target: _Target, name: str) -> str | None:
    """Return the text of a small file of the folder, else of the repository; for the README the other way round."""
    here, there = name in files, name in remote.names
    if there and (name == "README.md" or not here):
        return read_source(api.hf_hub_download(target.repo_id, name, revision=remote.sha))
    if not here:
        return None
    content = files[name]
    return content.decode() if isinstance(content, bytes) else read_source(content)


def _with_retries(attempt: Callable[[], Pushed]) -> Pushed:
    for number in range(_ATTEMPTS - 1):
        try:
            return attempt()
        except HfHubHTTPError as error:
            if error.response.status_code not in (412, 429, 500, 502, 503, 504):
                raise
            _logger.warning(f"The Hub answered {error.response.status_code}; trying again.")
        except (httpx.TransportError, ConnectionError) as error:
            if isinstance(error, httpx.ConnectError | OfflineModeIsEnabled) or "xet-write-token" in str(error):
                raise
            _logger.warning(f"The connection broke ({type(error).__name__}); trying again.")
        time.sleep(_RETRY_WAIT * 2**number)
    return attempt()


@contextmanager
def _failures_explained(api: HfApi, target: _Target) -> Iterator[None]:
    try:
        with _uploads_unwrapped(target):
            yield
    except LocalTokenNotFoundError as error:
        raise PushError(f"{target.repo_id}: {_no_token(api)}") from error
    except HfHubHTTPError as error:
        raise PushError(f"{target.repo_id}: {_explain(api, target, error)}") from error
    except OfflineModeIsEnabled as error:
        raise PushError(f"{target.repo_id}: HF_HUB_OFFLINE forbids pushing; unset it") from error
    except (httpx.TransportError, ConnectionError) as error:
        if "xet-write-token" in str(error):
            raise PushError(f"{target.repo_id}: {_no_xet(api)}") from error
        raise PushError(
            f"{target.repo_id}: the connection to {api.endpoint} failed ({error or type(error).__name__}); nothing was "
            "committed; run the same command again to upload the rest"
        ) from error


@contextmanager
def _uploads_unwrapped(target: _Target) -> Iterator[None]:
    """Unwrap errors of an upload, which huggingface_hub wraps after its own retries."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, (HfHubHTTPError, httpx.TransportError, OSError)):
            raise error.__cause__ from None
        if type(error) is not RuntimeError:
            raise
        raise PushError(
            f"{target.repo_id}: {' '.join(str(error).split())}; nothing was committed; run the same command "
            "again to upload the rest"
        ) from error


def _explain(api: HfApi, target: _Target, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    said = error.server_message or f"HTTP {status}"
    if status == 401 and get_token() is None and not isinstance(api.token, str):
        return _no_token(api)
    if status == 404 and "xet-write-token" in str(error.response.url):
        return _no_xet(api)
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return f"the repository does not exist, or this token cannot read it ({said})"
    if status in (402, 413, 507) or re.search(r"quota|storage.*limit", said, re.IGNORECASE):
        return f"it is too large, or the storage quota is exceeded: {said}; nothing was committed"
    meaning = {
        401: "the Hub does not accept the token: log in again with `hf auth login`, or set HF_TOKEN",
        403: "this token has no write access; give create_pr=True (--create-pr) to open a pull request instead",
        412: "others are committing at the same time; nothing was committed; try again later",
    }.get(status, "the Hub failed; nothing was committed; run the same command again to continue")
    return f"{meaning} ({said})"


def _no_xet(api: HfApi) -> str:
    return f"{api.endpoint} has no Xet storage; set HF_HUB_DISABLE_XET=1 and run the same command again"


def _no_token(api: HfApi) -> str:
    return f"there is no token for {api.endpoint}: run `hf auth login`, or set HF_TOKEN to a token with write access"


def push_saved(
    saved: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
    code: bool = False,
    license: str | None = None,
) -> CommitInfo:
    """Push a model or an image processor as `push` does, with the arguments of transformers' `push_to_hub`.

    Problems of the card are warnings, so that code written for any model works.

    Args:
        saved: an object with `save_pretrained`.
        max_shard_size: largest size of a weight file; a larger model is split.
        repo_id, private, token, revision, create_pr, tags, code, license: as in `push`.
        commit_message, commit_description: texts of the commit.

    Returns:
        The commit.
    """
    message = commit_message or f"Upload {type(saved).__name__}"
    target = _Target(repo_id, private, revision, create_pr, message, commit_description)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        saved.save_pretrained(folder, max_shard_size=max_shard_size)
        files: _Files = {file.name: file for file in sorted(folder.iterdir())}
        if code and "config.json" in files:
            files = _with_code(files)
        pushed = _push_files(files, target, _CardRequest(license, tags or [], may_be_incomplete=True), token=token)
    for problem in pushed.problems:
        _logger.warning(f"The card of {repo_id}: {problem}")
    assert pushed.commit is not None
    return pushed.commit
