"""Push to the Hub: weights, configuration, processor, card and results in one commit, or nothing."""

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
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

from ..files.messages import join_names
from ..files.output import MARK, PUSHED, matches
from ..files.reading import parse_json
from ..files.versions import versions_of
from ..loading import copy_for
from ..models.image_processing_hf_vit import HfViTImageProcessor, output_size
from ..models.utils import (
    MANIFEST,
    as_pair,
    check_model_path,
    manifest_entry,
    manifest_text,
    read_manifest,
    redact_secrets,
)
from .cards import CARD_SOURCES, check_card, eval_results_file, read_source, render_card
from .remote_code import add_code, code_of

_logger = logging.getLogger(__name__)

_RESULTS, _OUR_RESULTS = ".eval_results/*.yaml", ".eval_results/hf_vit.yaml"
_NOT_REPORTED = (MARK, MANIFEST, ".eval_results", "1_Pooling", ".gitattributes")  # not pushed, without a message
_NOT_LISTED = ("README.md", ".eval_results/*")  # not in the manifest, because they are edited on the Hub
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_PROCESSOR = "preprocessor_config.json"
_RETRY_WAITS = (1, 2, 4)  # seconds before another attempt
_TEMPORARY = (412, 429, 500, 502, 503, 504)  # statuses of HTTP; 412: another commit came first

_Files = dict[str, Path | bytes]  # name in the repository -> file on disk, or content


class PushError(OSError):
    """Failed push, with the reason in one sentence; nothing was committed."""


class IncompleteCardError(PushError):
    """Push of a card with missing information, such as a license."""


class Pushed(NamedTuple):
    """Result of a push.

    commit: None for a dry run.
    files: names in the repository -> size in bytes.
    deleted: names of deleted files.
    problems: problems of the card, a sentence each.
    skipped: other files of the folder, which are not part of a model.
    """

    commit: CommitInfo | None
    files: dict[str, int]
    deleted: list[str]
    problems: list[str]
    skipped: tuple[str, ...] = ()


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

    Only files of a model are pushed (weights, configuration, processor, README, results, code, ONNX), with a manifest
    of their hashes, which is checked when the model is loaded. The card is rendered from the folder (see
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
        allow_incomplete_card: push even if `hf_vit.hub.cards` finds problems, such as a missing license.
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
    with tempfile.TemporaryDirectory() as temporary:
        if save_for is not None:
            copy = Path(temporary, Path(folder).resolve().name)
            copy_for(folder, copy, save_for, images)
            folder = copy
        files, skipped = _files_of(Path(folder))
        if skipped:
            _logger.warning(f"Not pushed (not part of a model): {join_names(skipped)}.")
        pushed = _Push(
            _with_code(files) if code else files,
            repo_id,
            private=private,
            revision=revision,
            create_pr=create_pr,
            license=license,
            tags=tags,
            space=space,
            allow_incomplete_card=allow_incomplete_card,
            message=message,
            token=token,
        ).run(dry_run)
    return pushed._replace(skipped=tuple(skipped))


def push_saved(
    saved: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    max_shard_size: int | str = "50GB",
    code: bool = False,
    **options: Any,
) -> CommitInfo:
    """Push a model or an image processor as `push` does, with the arguments of transformers' `push_to_hub`.

    Problems of the card are warnings, so that code written for any model works.

    Args:
        saved: an object with `save_pretrained`.
        max_shard_size: largest size of a weight file; a larger model is split.
        repo_id, code: as in `push`.
        commit_message, commit_description: texts of the commit.
        options: private, token, revision, create_pr, tags and license, as in `push`.

    Returns:
        The commit.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        saved.save_pretrained(folder, max_shard_size=max_shard_size)
        files: _Files = {file.name: file for file in sorted(folder.iterdir())}
        pushed = _Push(
            _with_code(files) if code and "config.json" in files else files,
            repo_id,
            allow_incomplete_card=True,
            message=commit_message or f"Upload {type(saved).__name__}",
            description=commit_description,
            **options,
        ).run()
    for problem in pushed.problems:
        _logger.warning(f"The card of {repo_id}: {problem}")
    assert pushed.commit is not None
    return pushed.commit


def _files_of(folder: Path) -> tuple[_Files, list[str]]:
    """Choose the files of a folder to push; also return the names of the others.

    Raises:
        OSError: the folder holds no model.
        ValueError: it holds no weights, or symbolic links.
    """
    if not folder.is_dir():
        raise ValueError(f"cannot push {folder}: it is not a folder; `hf-vit convert {folder} FOLDER` writes one")
    entries = sorted(folder.iterdir())
    code = code_of(folder)
    chosen = [entry for entry in entries if matches(entry.name, PUSHED) or entry in code]
    chosen += [*sorted(folder.glob(_RESULTS)), *folder.glob("1_Pooling/config.json")]
    for entry in (*chosen, folder / ".eval_results"):
        if entry.is_symlink():
            raise ValueError(
                f"cannot push {entry}: it is a symbolic link (to {os.readlink(entry)}); nothing was pushed. "
                "Replace it with a copy of the file, for example with `cp -rL`"
            )
    check_model_path(folder)
    files: _Files = {entry.relative_to(folder).as_posix(): entry for entry in chosen if entry.is_file()}
    for name in ("recipe.yaml", "card_data.json", "metrics.json"):  # the address of a data set may have a password
        if name in files and (public := redact_secrets(text := read_source(folder / name))) != text:
            files[name] = public.encode()
    skipped = [entry.name for entry in entries if entry.name not in files and entry.name not in _NOT_REPORTED]
    weights = [name for name in files if _WEIGHTS.fullmatch(name)]
    if not weights:
        raise ValueError(
            f"cannot push {folder}: it holds no *.safetensors; give a folder that convert, training or save_pretrained "
            "wrote"
        )
    return files, skipped


def _with_code(files: _Files) -> _Files:
    """Add the files for `trust_remote_code=True`, see `add_code`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("config.json", _PROCESSOR):
            if isinstance(file := files.get(name), Path):
                shutil.copyfile(file, folder / name)
        return files | {name: (folder / name).read_bytes() for name in add_code(folder)}


class _Remote(NamedTuple):
    """Revision of the repository: its commit (None if it does not exist yet) and its files."""

    sha: str | None
    names: list[str]


@dataclass
class _Push:
    """A push of files, with the options of `push`."""

    files: _Files
    repo_id: str
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False
    license: str | None = None
    tags: list[str] | None = None
    space: str | None = None
    allow_incomplete_card: bool = False
    message: str = "Upload with hf_vit"
    description: str | None = None
    token: str | bool | None = None

    @cached_property
    def api(self) -> HfApi:
        packages = versions_of(("hf_vit", "torch", "transformers"))
        own_version = packages.pop("hf_vit")
        return HfApi(library_name="hf_vit", library_version=own_version, token=self.token, user_agent=packages)

    @cached_property
    def hashes(self) -> dict[str, dict[str, Any]]:
        """Entries of the manifest, by name in the repository."""
        return {name: manifest_entry(file) for name, file in self.files.items() if not matches(name, _NOT_LISTED)}

    def run(self, dry_run: bool = False) -> Pushed:
        """Commit the files and their card; try again if the Hub fails, or another commit came in between."""
        with _failures_explained(self.api, self.repo_id):
            for wait in _RETRY_WAITS:
                try:
                    return self._attempt(dry_run)
                except (HfHubHTTPError, httpx.TransportError, ConnectionError) as error:
                    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
                    is_final = isinstance(error, httpx.ConnectError | OfflineModeIsEnabled)
                    if is_final or status not in (None, *_TEMPORARY) or "xet-write-token" in str(error):
                        raise
                    _logger.warning(f"The push failed ({status or type(error).__name__}); retrying in {wait} s.")
                time.sleep(wait)
            return self._attempt(dry_run)

    def _attempt(self, dry_run: bool) -> Pushed:
        if "/" not in self.repo_id:
            self.repo_id = f"{self.api.whoami(cache=True)['name']}/{self.repo_id}"
        remote = self._look_up()
        pushed, operations = self._plan(remote)
        if dry_run:
            return pushed
        if pushed.problems and not self.allow_incomplete_card:
            raise IncompleteCardError(
                f"{self.repo_id}: the card has problems: {'; '.join(pushed.problems)}. Nothing was pushed; "
                "allow_incomplete_card=True (--allow-incomplete-card) pushes it as it is"
            )
        if remote.sha is None:
            self._validate_card(operations)  # first, or an empty repository would stay behind
            self.api.create_repo(self.repo_id, private=self.private, exist_ok=True)
            return self._attempt(dry_run)
        if self.revision is not None and not self.create_pr and not self.revision.startswith("refs/pr/"):
            self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
        commit = self.api.create_commit(
            self.repo_id,
            operations,
            commit_message=self.message,
            commit_description=self.description,
            revision=self.revision,
            create_pr=self.create_pr,
            parent_commit=None if self.create_pr else remote.sha,  # refuses to overwrite a later commit
        )
        return pushed._replace(commit=commit)

    def _look_up(self) -> _Remote:
        """Return the revision; raise ValueError if the repository has another visibility than requested."""
        try:
            info = self.api.model_info(self.repo_id, revision=self.revision)
        except RevisionNotFoundError:  # a new branch begins as the default one
            info = self.api.model_info(self.repo_id)
        except RepositoryNotFoundError:
            return _Remote(None, [])
        if self.private not in (None, bool(info.private)):
            kinds = ("private", "public") if info.private else ("public", "private")
            raise ValueError(
                f"{self.repo_id} exists and is {kinds[0]}, not {kinds[1]}: "
                "change its visibility on the Hub first, or push without private= (--private)"
            )
        return _Remote(info.sha, [sibling.rfilename for sibling in info.siblings or []])

    def _plan(self, remote: _Remote) -> tuple[Pushed, list[CommitOperationAdd | CommitOperationDelete]]:
        texts = {name: text for name in CARD_SOURCES if (text := self._text(name, remote)) is not None}
        files, problems = dict(self.files), []
        if "config.json" in texts:
            card = render_card(texts, self.repo_id, license=self.license, tags=self.tags or (), space=self.space)
            files["README.md"], problems = card.encode(), [*_size_problems(texts), *check_card(card)]
            if (results := eval_results_file(texts, self.repo_id, self._task_of)) is not None:
                files = {_OUR_RESULTS: results.encode(), **files}
        else:  # a processor was pushed before its model: no card yet
            files.pop("README.md", None)
        outdated = []
        if any(_WEIGHTS.fullmatch(name) for name in files):
            outdated = [name for name in remote.names if _WEIGHTS.fullmatch(name) and name not in files]
        if (manifest := self._manifest(remote, outdated)) is not None:
            files[MANIFEST] = manifest.encode()
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [CommitOperationDelete(name) for name in outdated]
        sizes = {name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in files.items()}
        return Pushed(None, sizes, outdated, problems), operations

    def _text(self, name: str, remote: _Remote) -> str | None:
        """Return the text of a small file of the folder, else of the repository; for the README the other way round."""
        if name in remote.names and (name == "README.md" or name not in self.files):
            return read_source(self.api.hf_hub_download(self.repo_id, name, revision=remote.sha))
        content = self.files.get(name)
        return content.decode() if isinstance(content, bytes) else content and read_source(content)

    def _task_of(self, name: str) -> str | None:
        """Return the first task of a benchmark (a data set on the Hub with an eval.yaml); None for other data sets."""
        try:
            text = read_source(self.api.hf_hub_download(name, "eval.yaml", repo_type="dataset"))
            return str(yaml.safe_load(text)["tasks"][0]["id"])
        except (HfHubHTTPError, OSError, yaml.YAMLError, TypeError, KeyError, IndexError):
            return None

    def _manifest(self, remote: _Remote, outdated: list[str]) -> str | None:
        """Build the new manifest, with entries of unchanged files; None if another program's has this name."""
        found: dict[str, dict[str, Any]] | None = {}
        if (text := self._text(MANIFEST, remote)) is not None:
            with suppress(ValueError):  # damaged: replaced
                found = read_manifest(text)
        if found is None:
            return None
        kept = {name: entry for name, entry in found.items() if name in remote.names and name not in outdated}
        return manifest_text({**kept, **self.hashes})

    def _validate_card(self, operations: list[Any]) -> None:
        """Raise PushError if the Hub refuses the card's front matter."""
        for operation in operations:
            if operation.path_in_repo == "README.md":
                try:
                    ModelCard(operation.path_or_fileobj.decode(), ignore_metadata_errors=True).validate()
                except ValueError as error:
                    reasons = str(error)
                    with suppress(ValueError, TypeError, KeyError):
                        reasons = "; ".join(entry["message"] for entry in json.loads(reasons)["errors"])
                    raise PushError(
                        f"{self.repo_id}: the Hub rejected the card: {reasons}; nothing was pushed"
                    ) from error


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
        f"the model's image size is {taken}, but its image processor returns {made} (height, width); load both with "
        "hf_vit.load(..., image_size=...) and save them again"
    ]


@contextmanager
def _failures_explained(api: HfApi, repo_id: str) -> Iterator[None]:
    """Turn a failure of the Hub or the network into a PushError with advice."""
    try:
        yield
    except (HfHubHTTPError, httpx.TransportError, LocalTokenNotFoundError, ConnectionError, RuntimeError) as error:
        cause: Any = error
        if isinstance(error, RuntimeError):  # huggingface_hub wraps errors of an upload after its own retries
            if isinstance(error.__cause__, HfHubHTTPError | httpx.TransportError | OSError):
                cause = error.__cause__
            elif type(error) is not RuntimeError:
                raise
        raise PushError(f"{repo_id}: {_explain(api, cause)}") from error


def _explain(api: HfApi, error: Exception) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    reason = (error.server_message if isinstance(error, HfHubHTTPError) else " ".join(str(error).split())) or (
        f"HTTP {status}" if status else type(error).__name__
    )
    has_token = get_token() is not None or isinstance(api.token, str)
    if "xet-write-token" in str(error):
        return f"{api.endpoint} has no Xet storage; set HF_HUB_DISABLE_XET=1 and run the same command again"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, which disables pushing; unset it"
    if isinstance(error, LocalTokenNotFoundError) or (status == 401 and not has_token):
        return f"no token for {api.endpoint}: run `hf auth login`, or set HF_TOKEN to a token with write access"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        meaning = "the repository does not exist, or this token cannot read it"
    elif status in (402, 413, 507) or re.search(r"quota|storage.*limit", reason, re.IGNORECASE):
        meaning = "the upload is too large, or the storage quota is exceeded"
    else:
        meaning = {
            None: f"the upload to {api.endpoint} failed; run the same command again to continue",
            401: "the Hub rejected the token: log in again with `hf auth login`, or set HF_TOKEN",
            403: "this token has no write access; give create_pr=True (--create-pr) to open a pull request instead",
            412: "another commit was made at the same time; try again later",
        }.get(status, "the Hub returned an error; run the same command again to continue")
    return f"{meaning} ({reason}); nothing was committed"
