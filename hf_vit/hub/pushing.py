"""Push to the Hub: weights, configuration, processor, card and results in one commit, or nothing."""

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from ..conversion.converting import FOLDER_FORMATS
from ..conversion.exporting import export
from ..conversion.source import record_of
from ..files.addresses import redact_secrets
from ..files.image_sizes import output_size
from ..files.manifest import MANIFEST, Entries, find_unlisted, manifest_entry, manifest_text, read_manifest
from ..files.messages import check_choice, join_names
from ..files.model_files import check_model_path
from ..files.output import MARK, listed_files
from ..files.reading import parse_json
from ..files.runs import REPORTS, copy_reports
from ..files.versions import versions_of
from ..loading import check_name, find_model, load, save_folder
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.sizes import as_pair
from .cards import CARD_SOURCES, check_card, eval_results_file, read_source, render_card
from .remote_code import code_files, code_of

_logger = logging.getLogger(__name__)

# Files of a model, which are pushed from any folder.
_PUSHED = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    *("config.json", "preprocessor_config.json", "conversion.json"),
    *("program.xml", "program.bin", "quantization.json"),
    *("modules.json", "sentence_bert_config.json"),  # of sentence-transformers
    *("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt"),
)
# Files that are pushed only if hf_vit wrote them: the user may have files with these names, too.
_PUSHED_IF_OURS = (*REPORTS, "*.onnx", "*.onnx.data")
_RESULTS, _OUR_RESULTS = ".eval_results/*.yaml", ".eval_results/hf_vit.yaml"
_NOT_REPORTED = (MARK, MANIFEST, ".eval_results", "1_Pooling", ".gitattributes")  # not pushed, without a message
_NOT_LISTED = ("README.md", ".eval_results/*")  # not in the manifest, because they are edited on the Hub
# Files with the address of a dataset, which may hold a password
_WITH_ADDRESSES = ("recipe.yaml", "card_data.json", "metrics.json", "soup.json")
_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_PROCESSOR = "preprocessor_config.json"
_RETRY_WAITS = (1, 2, 4)  # seconds before another attempt
_TEMPORARY = (None, 412, 429, 500, 502, 503, 504)  # statuses of HTTP; None: no answer; 412: another commit came first

_Files = dict[str, Path | bytes]  # name in the repository -> file on disk, or content


class PushError(OSError):
    """Failed push, with the reason in one sentence; nothing was committed."""


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
            in `hf_vit.conversion.Conversion.save`; None: the folder as it is.
        license: such as "apache-2.0"; needed once, if the README has none and the source is unknown.
        tags: more tags for the card.
        space: owner/name of a Space with the model's page, which the card links; None: that of the repository's card.
        allow_incomplete_card: push even if `hf_vit.hub.cards` finds problems, such as a missing license.
        message: message of the commit; text after an empty line is its description.
        token: used instead of the token of `hf auth login` or HF_TOKEN; False for none.

    Returns:
        The commit, and the files that were pushed.

    Raises:
        OSError: the folder holds no model.
        ValueError: the folder holds no weights, or symbolic links; or transformers does not support the model; or the
            repository has another visibility than `private`.
        PushError: the card has problems, or the Hub cannot be reached or refuses; the message has the reason.
    """
    check_name(folder)
    packages = versions_of(("hf_vit", "torch", "transformers"))
    api = HfApi(library_name="hf_vit", library_version=packages.pop("hf_vit"), token=token, user_agent=packages)
    with tempfile.TemporaryDirectory() as temporary, _failures_explained(repo_id):
        if save_for is not None:
            copy = Path(temporary, Path(folder).resolve().name)
            save_as(folder, copy, save_for)
            folder = copy
        local, skipped = _files_of(Path(folder))
        if skipped:
            _logger.warning(f"Not pushed (not part of the model, or not listed in {MARK}): {join_names(skipped)}.")
        if code:
            local |= {name: text.encode() for name, text in code_files(Path(folder)).items()}

        def attempt() -> Pushed:
            remote = _find_remote(api, repo_id, revision, private, dry_run)
            files, problems = _with_card(local, remote, license=license, tags=tags or (), space=space)
            outdated = _replaced_weights(remote.names, files)
            _add_manifest(files, local, remote, outdated)
            sizes = {name: _size_of(content) for name, content in files.items()}
            pushed = Pushed(None, sizes, outdated, problems, tuple(skipped))
            if dry_run:
                return pushed
            if problems and not allow_incomplete_card:
                raise PushError(
                    f"{remote.repo_id}: the card has problems: {'; '.join(problems)}. Nothing was pushed; "
                    "allow_incomplete_card=True (--allow-incomplete-card) pushes it as it is"
                )
            commit = _commit(remote, files, outdated, message, private=private, revision=revision, create_pr=create_pr)
            return pushed._replace(commit=commit)

        return _retry(attempt)


def _replaced_weights(remote_names: Sequence[str], files: _Files) -> list[str]:
    """Return the weights of an earlier push that those among the files replace."""
    if not any(_WEIGHTS.fullmatch(name) for name in files):
        return []
    return [name for name in remote_names if _WEIGHTS.fullmatch(name) and name not in files]


def _size_of(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _commit(
    remote: "_Remote",
    files: _Files,
    outdated: Sequence[str],
    message: str,
    *,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
) -> CommitInfo:
    """Commit files and deletions, in a new repository or branch if there is none."""
    api = remote.api
    assert api is not None  # which only a dry run lacks
    if remote.sha is None:
        card = files.get("README.md")
        if isinstance(card, bytes):  # first, so that no empty repository stays
            ModelCard(card.decode(), ignore_metadata_errors=True).validate()
        api.create_repo(remote.repo_id, private=private, exist_ok=True)
    if revision is not None and not create_pr and not revision.startswith("refs/pr/"):
        api.create_branch(remote.repo_id, branch=revision, exist_ok=True)
    title, _, description = message.partition("\n\n")
    return api.create_commit(
        remote.repo_id,
        [*map(CommitOperationAdd, files, files.values()), *map(CommitOperationDelete, outdated)],
        commit_message=title,
        commit_description=description,
        revision=revision,
        create_pr=create_pr,
        parent_commit=None if create_pr else remote.sha,  # refuses to overwrite a later commit
    )


def save_as(folder: str | os.PathLike, output: str | os.PathLike, format: str) -> None:
    """Copy a folder of `save_pretrained` with its card and reports, in one of `FOLDER_FORMATS`.

    Args:
        format: "hf_vit", or "transformers" for transformers' own classes.

    Raises:
        ValueError: transformers does not support the model, or the format is unknown.
    """
    check_choice("format of a folder", format, FOLDER_FORMATS)
    model, processor = load(folder, backend="eager")
    if format == "transformers":
        export(model, output, format, processor=processor)
    else:
        model.conversion_record = record_of(model) or None
        save_folder(output, model, processor)
    copy_reports(find_model(folder).find_report, output, "README.md")
    results = Path(folder, ".eval_results")
    if results.is_dir():
        shutil.copytree(results, Path(output, results.name))


def _retry(attempt: Callable[[], Pushed]) -> Pushed:
    """Repeat an attempt after failures that may be temporary, and return its result."""
    for wait in _RETRY_WAITS:
        try:
            return attempt()
        except httpx.HTTPError as error:
            status = _status_of(error)
            if status not in _TEMPORARY:
                raise
            _logger.warning(f"The push failed ({status or type(error).__name__}); trying again.")
            time.sleep(wait)
    return attempt()


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
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder, max_shard_size=max_shard_size)
        title = commit_message or f"Upload {type(saved).__name__}"
        pushed = push(
            folder,
            repo_id,
            code=code and Path(folder, "config.json").exists(),
            allow_incomplete_card=True,
            message=f"{title}\n\n{commit_description}" if commit_description else title,
            **options,
        )
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
    entries = sorted(folder.glob("*"))
    code = code_of(folder)
    ours = listed_files(folder)
    chosen = []
    skipped = []
    for entry in entries:
        patterns = (*_PUSHED, *_PUSHED_IF_OURS) if entry.name in ours else _PUSHED
        if entry in code or (_matches(entry.name, patterns) and not entry.is_dir()):
            chosen.append(entry)
        elif entry.name not in _NOT_REPORTED:
            skipped.append(entry.name)
    chosen += [*sorted(folder.glob(_RESULTS)), *folder.glob("1_Pooling/config.json")]
    for entry in (*chosen, folder / ".eval_results"):
        if entry.is_symlink():
            raise ValueError(
                f"cannot push {entry}: it is a symbolic link (to {os.readlink(entry)}); nothing was pushed. "
                "Replace it with a copy of the file, for example with `cp -rL`"
            )
    if entries != [folder / _PROCESSOR]:  # which may be pushed without a model
        check_model_path(folder)
        if not any(_WEIGHTS.fullmatch(entry.name) for entry in chosen):
            raise ValueError(f"cannot push {folder}: it holds no weights (expected *.safetensors)")
    files: _Files = {entry.relative_to(folder).as_posix(): entry for entry in chosen}
    for name in files.keys() & set(_WITH_ADDRESSES):
        text = read_source(folder / name)
        public = redact_secrets(text)
        if public != text:
            files[name] = public.encode()
    return files, skipped


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Remote(NamedTuple):
    """Revision of a repository: its commit (None if it does not exist yet) and its files.

    api: None if the Hub is not reached.
    """

    api: HfApi | None
    repo_id: str
    sha: str | None = None
    names: Sequence[str] = ()

    def text(self, name: str, local: _Files) -> str | None:
        """Return the text of a small file of the folder, else of the repository; for the README the other way round."""
        if self.api and name in self.names and (name == "README.md" or name not in local):
            return read_source(self.api.hf_hub_download(self.repo_id, name, revision=self.sha))
        content = local.get(name)
        if isinstance(content, Path):
            return read_source(content)
        return None if content is None else content.decode()

    def task_of(self, dataset: str) -> str | None:
        """Return the first task of a benchmark (a dataset on the Hub with an eval.yaml); None for other datasets."""
        if self.api is None:
            return None
        try:
            text = read_source(self.api.hf_hub_download(dataset, "eval.yaml", repo_type="dataset"))
            return str(yaml.safe_load(text)["tasks"][0]["id"])
        except (OSError, yaml.YAMLError, TypeError, KeyError, IndexError):
            return None


def _find_remote(api: HfApi, repo_id: str, revision: str | None, private: bool | None, dry_run: bool) -> _Remote:
    """Return the revision to push to; for a dry run without a network or a token, that of a new repository."""
    try:
        if "/" not in repo_id:
            repo_id = f"{api.whoami(cache=True)['name']}/{repo_id}"
        return _look_up(api, repo_id, revision, private)
    except (httpx.TransportError, OfflineModeIsEnabled, LocalTokenNotFoundError) as error:
        if not dry_run:
            raise
        reason = str(error).partition("\n")[0]
        _logger.warning(f"The Hub was not asked ({reason}): the list is that of a new repository.")
        return _Remote(None, repo_id)


def _look_up(api: HfApi, repo_id: str, revision: str | None, private: bool | None) -> _Remote:
    """Return the revision; raise ValueError if the repository has another visibility than requested."""
    try:
        info = api.model_info(repo_id, revision=revision)
    except RevisionNotFoundError:  # a new branch begins as the default one
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return _Remote(api, repo_id)
    if private not in (None, bool(info.private)):
        raise ValueError(f"{repo_id} exists with private={info.private}; change its visibility on the Hub first")
    return _Remote(api, repo_id, info.sha, [sibling.rfilename for sibling in info.siblings or []])


def _with_card(local: _Files, remote: _Remote, **options: Any) -> tuple[_Files, list[str]]:
    """Add the card and its results to the files; also return the problems of the card."""
    texts = {name: text for name in CARD_SOURCES if (text := remote.text(name, local)) is not None}
    if "config.json" not in texts:  # a processor was pushed before its model: no card yet
        return {name: content for name, content in local.items() if name != "README.md"}, []
    card = render_card(texts, remote.repo_id, **options)
    files: _Files = {**local, "README.md": card.encode()}
    if (results := eval_results_file(texts, remote.repo_id, remote.task_of)) is not None:
        files = {_OUR_RESULTS: results.encode(), **files}
    return files, [*_size_problems(texts), *check_card(card)]


def _add_manifest(files: _Files, local: _Files, remote: _Remote, outdated: list[str]) -> None:
    """Add the new manifest to the files, with entries of unchanged ones, unless another program's has this name.

    If the repository has weights that no manifest lists, and that this push does not replace, there is none.
    """
    found: Entries | None = {}
    if (text := remote.text(MANIFEST, local)) is not None:
        with suppress(ValueError):  # damaged: replaced
            found = read_manifest(text)
    if found is None:
        return
    kept = {name: entry for name, entry in found.items() if name in remote.names and name not in outdated}
    pushed = {name: manifest_entry(file) for name, file in local.items() if not _matches(name, _NOT_LISTED)}
    if not find_unlisted(set(remote.names).difference(outdated), {**kept, **pushed}):
        files[MANIFEST] = manifest_text({**kept, **pushed}).encode()
    elif MANIFEST in remote.names:
        outdated.append(MANIFEST)


def _size_problems(texts: dict[str, str]) -> list[str]:
    """Describe a difference between the image sizes of model and image processor, of the whole repository."""
    if not {"config.json", _PROCESSOR} <= texts.keys():
        return []
    config, stored = (parse_json(texts[name], name) for name in ("config.json", _PROCESSOR))
    if stored.get("image_processor_type") != HfViTImageProcessor.__name__ or not config.get("image_size"):
        return []
    made, taken = output_size(HfViTImageProcessor.from_dict(stored)), as_pair(config["image_size"])
    if made in (None, taken):
        return []
    return [
        f"the model's image size is {taken}, but its image processor returns {made} (height, width); load both with "
        "hf_vit.load(..., image_size=...) and save them again"
    ]


def _status_of(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


@contextmanager
def _failures_explained(repo_id: str) -> Iterator[None]:
    """Turn a failure of the Hub or the network into a PushError with advice."""
    try:
        yield
    except (httpx.HTTPError, ConnectionError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error  # of an upload
        reason = " ".join(str(cause).split()) or type(cause).__name__
        status = _status_of(cause)
        if "xet-write-token" in reason:
            reason = f"this Hub has no Xet storage: set HF_HUB_DISABLE_XET=1 and run the same command again ({reason})"
        elif status in (401, 403):
            reason += "; give a token with write access (`hf auth login`, or HF_TOKEN), or create_pr=True (--create-pr)"
        raise PushError(f"{repo_id}: {reason}; nothing was committed") from error
