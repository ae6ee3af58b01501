from typing import Any

import pytest
import torch
from huggingface_hub import constants

from hf_vit.backends.runtimes import RUNTIMES, Runtime


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory):
    """One cache for all tests, so that each program is converted once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path_factory.mktemp("assets")))
        yield


class TorchAsRuntime(Runtime):
    """Runtime whose program is a copy of the model: it is converted at once, and can be outdated."""

    made = 0

    def versions(self) -> dict[str, str]:
        return {"torch as a runtime": "1"}

    def module(self) -> Any:
        return self

    def convert(self, model, size, names, folder) -> None:
        type(self).made += 1
        torch.save((model, names), folder / "program")

    def load(self, folder, dtype, threads, batch):
        model, names = torch.load(folder / "program", weights_only=False)

        def program(pixel_values):
            outputs = model(pixel_values)
            return [outputs[name] for name in names]

        return program


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Use the runtime above, with its own cache, for `backend="openvino"`."""
    TorchAsRuntime.made = 0
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setitem(RUNTIMES, "openvino", TorchAsRuntime("openvino", (), (torch.float32, torch.bfloat16)))
    return TorchAsRuntime
