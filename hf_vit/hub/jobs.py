"""Commands on Hugging Face Jobs: the same command, on a rented machine."""

import shlex
from typing import Any

from huggingface_hub import HfApi, JobHardware, JobStage, Volume, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from ..files.messages import check_choice

_ADDRESSES = ("augreg:", "gs://", "https://", "s3://", "hf://")
_BUCKETS = "hf://buckets/"
_MOUNT = "/parts"  # folder of the bucket in a job


def run_job(command: str, options: list[str], settings: Any, *, result: str | None, **where: Any) -> None:
    """Run finetune, pretrain or evaluate as a job, which pushes its result.

    Args:
        command, options, where: as in `start_job`; a recipe that is a file is uploaded.
        settings: the settings that these options give.
        result: repository on the Hub for the result, OWNER/NAME or a NAME of your own.

    Raises:
        ValueError: as in `start_job`, or there is no `result`.
    """
    if result is None:
        raise ValueError("--job needs --push NAME for the result")
    inputs = [("dataset", settings.dataset), ("model", getattr(settings, "model", None))]
    start_job(command, [*options, "--push", result], inputs, **where)


def run_parts_job(command: str, options: list[str], arguments: dict[str, Any], **where: Any) -> None:
    """Run embed or predict as a job, whose parts are in a bucket of the Hub, mounted into the job.

    Args:
        command, where: as in `start_job`.
        options: its options on the command line.
        arguments: the arguments that these give.

    Raises:
        ValueError: as in `start_job`, an image is a file of this machine, or the output is no bucket.
    """
    output = str(arguments["output"])
    owner_name_folder = output.removeprefix(_BUCKETS).strip("/").split("/", 2)
    if not output.startswith(_BUCKETS) or len(owner_name_folder) < 2:
        raise ValueError(f"--output is {output} (expected {_BUCKETS}OWNER/NAME for the parts of a job)")
    local = [image for image in arguments["images"] if not image.startswith(_ADDRESSES)]
    if local:
        raise ValueError(f"a job can read only the Hub and other stores, not {local[0]}")
    owner, name, *folder = owner_name_folder
    bucket = Volume(type="bucket", source=f"{owner}/{name}", mount_path=_MOUNT, path="".join(folder) or None)
    given = (output, f"--output={output}")
    options = [word.replace(output, f"{_MOUNT}/") if word in given else word for word in options]
    start_job(command, options, [("dataset", arguments["dataset"]), ("model", arguments["folder"])], bucket, **where)


def start_job(
    command: str,
    options: list[str],
    inputs: list[tuple[str, str | None]],
    bucket: Volume | None = None,
    *,
    flavor: str,
    package: str | None,
    timeout: str,
    dry_run: bool = False,
) -> None:
    """Run `hf-vit COMMAND OPTIONS` as a job, and print its log.

    A job can read only the Hub, and costs money, so what it reads is checked before it starts.

    Args:
        command: a command of hf-vit.
        options: its options on the command line.
        inputs: what it reads, ("dataset" or "model", name).
        bucket: the bucket that it writes to; it is created, private, if there is none.
        flavor: hardware, such as "a10g-small".
        package: pip requirement of hf_vit: the URL of a wheel, or git+https://...
        timeout: time limit, such as "6h".
        dry_run: check everything, print the job, and start nothing.

    Raises:
        ValueError: something is missing that the job needs, or the job failed.
    """
    check_choice("hardware", flavor, [one.value for one in JobHardware])
    token = get_token()
    if package is None or token is None:
        raise ValueError(
            "--job needs --package (the URL of a wheel of hf_vit, or git+https://...) and a token (run `hf auth "
            "login`, or set HF_TOKEN)"
        )
    api = HfApi(library_name="hf_vit")
    for kind, name in inputs:
        _check_on_hub(api, kind, name)
    print(f"on {flavor}, for at most {timeout}: {shlex.join(['hf-vit', command, *options])}")
    if dry_run:
        print("no job was started: this was a dry run")
        return
    if bucket is not None:
        api.create_bucket(bucket.source, private=True, exist_ok=True)
    job = api.run_uv_job(
        "hf-vit",
        script_args=[command, *options],
        dependencies=[package],
        flavor=flavor,
        secrets={"HF_TOKEN": token},
        timeout=timeout,
        name=f"hf-vit-{command}",
        volumes=[] if bucket is None else [bucket],
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
