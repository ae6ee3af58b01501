"""Runs on Hugging Face Jobs: a local Hub runs the command of a job as a process."""

import json

import pytest

from ..local_hub import commits_of, readme_of
from ..tiny_models import save_tiny

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
