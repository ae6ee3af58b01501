"""The page of a model as a static Space, published over HTTP to a local Hub."""

import pytest

from ..local_hub import readme_of


@pytest.mark.slow
def test_model_and_space_link_each_other(hub, client, folder, web_runtime):
    command = ["push", folder, "vit", "--license", "mit", "--static-space", "vit-page", "--runtime", web_runtime]
    assert "alice/vit-page" in client([*command, "--dry-run"])
    assert "spaces/alice/vit-page" in client(command)
    assert "spaces/alice/vit-page)" in readme_of(hub, "alice/vit")
    client(["push", folder, "vit"])
    assert "spaces/alice/vit-page)" in readme_of(hub, "alice/vit")  # the link stays
    found = client(
        """
        from huggingface_hub import hf_hub_download, list_repo_files
        print(sorted(list_repo_files("alice/vit-page", repo_type="space")))
        print(open(hf_hub_download("alice/vit-page", "README.md", repo_type="space"), encoding="utf-8").read())
        """
    )
    assert {"index.html", "worker.js", "onnx/model_quantized.onnx"} <= set(found.split("'"))
    assert "sdk: static" in found
    assert "- alice/vit\n" in found
