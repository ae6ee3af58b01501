import pytest
from huggingface_hub import constants


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory):
    """One cache for all tests, so that each program is converted once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path_factory.mktemp("assets")))
        yield
