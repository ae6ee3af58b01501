"""Runs on Hugging Face Jobs: a local Hub runs the command of a job as a process."""

import json

import pytest

from ..local_hub import commits_of, readme_of
from ..tiny_models import save_tiny, write_images

PACKAGE = "hf_vit @ https://example.org/hf_vit.whl"
JOB = ["--job", "a10g-small", "--package", PACKAGE, "--push", "result", "--output-dir", "out"]
RUN = ["--recipe", "digits", "--steps", "1", "--warmup-steps", "0", "--num-workers", "0", "--report-to", "none"]


@pytest.fixture
def pushed(client, folder):
    client(["push", folder, "alice/tiny", "--license", "mit"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--job", "a10g-smal"], "a10g-small"),
        (["--package"], "--package"),
        (["--push"], "--push"),
        (["--dataset", "alice/nothing"], "alice/nothing"),
        (["--model", "folder"], "folder"),
        (["--learning-rate", "fast"], "fast"),
    ],
)
def test_nothing_is_started_that_would_fail(hub, client, pushed, given, expected):
    options = ["--model", "alice/tiny", "--dataset", "digits", "--steps", "1", *JOB, *given]
    if len(given) == 1:  # an option that is left out
        place = options.index(given[0])
        options = options[:place] + options[place + 2 : -1]
    before = len(hub.jobs)
    assert expected in client(["finetune", *options], status=2)
    assert len(hub.jobs) == before


def test_a_dry_run_starts_nothing(hub, client, pushed):
    before = len(hub.jobs)
    output = client(["evaluate", "--model", "alice/tiny", "--dataset", "digits", *JOB, "--dry-run"])
    assert "hf-vit evaluate --model alice/tiny" in output
    assert len(hub.jobs) == before


@pytest.mark.slow
def test_the_result_of_a_job_is_pushed(hub, client, tmp_path):
    output = client(["pretrain", *RUN, *JOB, "--timeout", "90m"])
    assert "accuracy" in output  # the log of the run
    assert "model.safetensors" in commits_of(hub, "alice/result")[0]["files"]
    assert "digits" in readme_of(hub, "alice/result")
    spec = list(hub.jobs.values())[-1]["spec"]
    assert (spec["flavor"], spec["timeoutSeconds"], spec["secrets"]) == ("a10g-small", 5400, {"HF_TOKEN": "hf_alice"})
    assert spec["command"][:5] == ["uv", "run", "--with", PACKAGE, "hf-vit"]
    assert "hf_alice" not in json.dumps(spec["command"])


@pytest.mark.slow
def test_a_job_that_fails_fails(hub, client, pushed, tmp_path):
    save_tiny(tmp_path / "hybrid", hybrid=True)
    client(["push", tmp_path / "hybrid", "alice/hybrid", "--license", "mit"])
    options = ["--model", "alice/hybrid", "--dataset", "digits", "--steps", "1", "--for", "transformers", *JOB]
    error = client(["finetune", *options], status=2)
    assert "ERROR" in error


PARTS = ["alice/tiny", "hf://datasets/alice/photographs", "--output", "hf://buckets/alice/features/a"]
RENTED = ["--job", "cpu-upgrade", "--package", PACKAGE]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*PARTS, "--job", "cpu-upgrade"], "--package"),
        ([*PARTS, "--package", PACKAGE], "--job"),
        ([*PARTS[:3], "parts/", *RENTED], "parts/"),
        ([*PARTS[:3], "hf://buckets/alice", *RENTED], "OWNER/NAME"),
        ([PARTS[0], "photographs", *PARTS[2:], *RENTED], "photographs"),
        (["alice/nothing", *PARTS[1:], *RENTED], "alice/nothing"),
        ([*PARTS, "--job", "cpu", "--package", PACKAGE], "cpu-basic"),
    ],
)
def test_no_job_of_parts_is_started_that_would_fail(hub, client, pushed, words, expected):
    before = len(hub.jobs)
    assert expected in client(["embed", *words], status=2)
    assert len(hub.jobs) == before


@pytest.mark.slow
def test_a_job_writes_parts_into_a_bucket(hub, client, pushed, tmp_path):
    write_images(tmp_path / "photographs", 9)
    client(f"""
from huggingface_hub import HfApi
HfApi().create_repo("alice/photographs", repo_type="dataset", exist_ok=True)
HfApi().upload_folder(repo_id="alice/photographs", folder_path={str(tmp_path / "photographs")!r}, repo_type="dataset")
""")
    command = ["embed", *PARTS, *RENTED, "--batch-size", "4", "--timeout", "30m"]
    before = len(hub.jobs)
    assert "no job" in client([*command, "--dry-run"])
    assert (len(hub.jobs), hub.buckets) == (before, {})
    assert "9 images" in client([*command, "--unit-size", "4"])
    files = hub.buckets["alice/features"]
    assert sum("part-" in name for name in files) == 3
    assert "9 images" in client(command)  # the same job again finds the parts
    assert hub.buckets["alice/features"] == files
