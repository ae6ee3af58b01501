"""transformers' common tests, from its source distribution, which is downloaded once and cached."""

import importlib
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from unittest import mock

import pytest
import transformers
from filelock import FileLock
from huggingface_hub import cached_assets_path

PACKAGE = "transformers_tests"  # there they are called `tests`, as ours are
# Neighbors of the common tests that the distribution leaves out: tests of text generation and of another exporter,
# and what every configuration takes, for which any values do that are not the defaults.
COMMON = {"return_dict": False, "output_hidden_states": True, "output_attentions": True, "chunk_size_feed_forward": 5}
COMMON |= {"architectures": ["BertModel"], "id2label": {0: "label"}, "label2id": {"label": "0"}, "dtype": "float16"}
LEFT_OUT = {
    "exporters.test_export": {"ExportTesterMixin": object},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": {**COMMON, "problem_type": "regression"}},
}
DOWNLOADS = types.ModuleType("fetch_hub_objects_for_ci")  # of its helper for its own CI
DOWNLOADS.url_to_local_path = str


def fetch() -> Path:
    """Return the folder `tests` of the source distribution of the installed transformers; skip without a network."""
    version = transformers.__version__
    folder = cached_assets_path("hf_vit", "transformers_sdist", version)
    root = folder / f"transformers-{version}"
    with FileLock(folder / "lock"):  # the tests run in several processes
        if not root.is_dir():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            command += ["--dest", str(folder), f"transformers=={version}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{root.name}.tar.gz cannot be fetched: {done.stderr}", allow_module_level=True)
            with tarfile.open(folder / f"{root.name}.tar.gz") as file:
                members = [member for member in file if member.name.split("/")[1:2] == ["tests"]]
                file.extractall(folder, members, filter="data")
    return root / "tests"


def load(*names: str) -> list[types.ModuleType]:
    """Import some of its test modules without collecting their tests."""
    _make_package(PACKAGE, [str(fetch())])
    sys.modules.setdefault("fetch_hub_objects_for_ci", DOWNLOADS)
    for name, content in LEFT_OUT.items():
        _make_package(f"{PACKAGE}.{name.split('.')[0]}", [])
        module = sys.modules.setdefault(f"{PACKAGE}.{name}", types.ModuleType(name))
        vars(module).update(content)
    # The one of the configurations imports the package from a checkout that is not there.
    find_package = mock.patch("transformers.utils.direct_transformers_import", return_value=transformers)
    keep_path = mock.patch.object(sys, "path", [*sys.path])  # to which the one of the image processors appends
    any_mark = mock.patch.object(pytest.mark, "_config", None)  # its marks of slow tests and accelerators
    with find_package, keep_path, any_mark:
        return [importlib.import_module(f"{PACKAGE}.{name}") for name in names]


def _make_package(name: str, path: list[str]) -> None:
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__path__ = path
