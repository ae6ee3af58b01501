"""Training and evaluation on Hugging Face Jobs: the same command, on a rented machine."""

import shlex
from typing import Any

from huggingface_hub import HfApi, JobHardware, JobStage, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ..files.messages import check_choice

_ADDRESSES = ("augreg:", "gs://", "https://", "s3://", "hf://")


def run_job(
    command: str,
    options: list[str],
    settings: Any,
    *,
    flavor: str,
    package: str | None,
    result: str | None,
    timeout: str,
    dry_run: bool = False,
) -> None:
    """Run `hf-vit COMMAND OPTIONS` as a job; print its log, and where its result is.

    A job can read only the Hub, and costs money, so data, model and result are checked before it starts.

    Args:
        command: finetune, pretrain or evaluate.
        options: its options on the command line; a recipe that is a file is uploaded.
        settings: the settings that these options give.
        flavor: hardware, such as "a10g-small".
        package: pip requirement of hf_vit: the URL of a wheel, or git+https://...
        result: repository on the Hub for the result, OWNER/NAME or a NAME of your own.
        timeout: time limit, such as "6h".
        dry_run: check everything, print the job, and start nothing.

    Raises:
        ValueError: something is missing that the job needs, or the job failed.
    """
    check_choice("hardware", flavor, [one.value for one in JobHardware])
    token = get_token()
    if package is None or result is None or token is None:
        raise ValueError(
            "--job needs --package (the URL of a wheel of hf_vit, or git+https://...), --push NAME for the result, and "
            "a token (run `hf auth login`, or set HF_TOKEN)"
        )
    api = HfApi(library_name="hf_vit")
    _check_on_hub(api, "dataset", settings.dataset)
    _check_on_hub(api, "model", getattr(settings, "model", None))
    arguments = [command, *options, "--push", result]
    print(f"on {flavor}, for at most {timeout}: {shlex.join(['hf-vit', *arguments])}")
    if dry_run:
        print("no job was started: this was a dry run")
        return
    job = api.run_uv_job(
        "hf-vit",
        script_args=arguments,
        dependencies=[package],
        flavor=flavor,
        secrets={"HF_TOKEN": token},
        timeout=timeout,
        name=f"hf-vit-{command}",
    )
    print(f"started {job.url}; it keeps running after Ctrl+C; `hf jobs cancel {job.id}` stops it")
    for line in api.fetch_job_logs(job_id=job.id, follow=True):
        print(line, flush=True)
    status = api.inspect_job(job_id=job.id).status
    if status.stage != JobStage.COMPLETED:
        raise ValueError(f"the job ended with {status.stage}: {status.message or 'see its log above'}")


def _check_on_hub(api: HfApi, kind: str, name: str | None) -> None:
    """Raise ValueError if a dataset or a model is not where a job can read it."""
    if name is None or name == "digits" or name.startswith(_ADDRESSES):
        return
    try:
        api.repo_info(name, repo_type=kind)
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(f"a job can read only the Hub, and cannot read the {kind} {name} there: {error}") from error


def push_result(command: str, settings: Any, name: str) -> None:
    """Push what a run wrote into its `output_dir`: a model, or other results as a dataset."""
    if command in ("finetune", "pretrain"):
        from .pushing import push

        commit = push(settings.output_dir, name, allow_incomplete_card=True).commit
        print(f"pushed: {commit.commit_url if commit is not None else name}")
        return
    api = HfApi(library_name="hf_vit")
    repo_id = api.create_repo(name, repo_type="dataset", exist_ok=True).repo_id
    commit = api.upload_folder(repo_id=repo_id, folder_path=settings.output_dir, repo_type="dataset")
    print(f"pushed: {commit.commit_url}")
