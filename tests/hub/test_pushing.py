"""Pushing over HTTP to a local Hub; every client is a separate process with a new cache."""

import hashlib
import json
import os
import shutil
import signal
import textwrap
import time

import pytest
import torch
import yaml

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.conversion import convert, export
from hf_vit.files.output import add_to_marker
from hf_vit.files.readme import BEGIN
from hf_vit.hub.cards import split_readme
from hf_vit.hub.pushing import save_as

from ..local_hub import commits_of, read_file, readme_of
from ..tiny_models import TINY, save_tiny, tiny

MIT = ("--license", "mit")


def push(*arguments):
    return ["push", *arguments]


def run_with(folder, client, code, **options):
    """Run code of a client that has loaded a folder."""
    imports = "import hf_vit\nfrom hf_vit import push_saved\nfrom tests.comparing import assert_same_weights\n"
    return client(imports + f"model, processor = hf_vit.load({str(folder)!r})\n" + textwrap.dedent(code), **options)


def test_pushed_and_loaded_in_a_fresh_cache(hub, client, folder, tmp_path):
    hub.fail("/api/models/alice/vit/commit/", "POST", status=503, times=2)
    output = client(push(folder, "vit", "--license", "mit"))
    assert "model.safetensors" in output
    assert f"pushed: {hub.url}/alice/vit/commit/" in output
    assert len(commits_of(hub, "alice/vit")) == 2  # the Hub's first one, and ours
    agents = {request["agent"] for request in hub.requests if "/commit/" in request["path"]}
    assert all("hf_vit/0." in agent and "torch/2." in agent and "transformers/5." in agent for agent in agents)
    code = """
        from pathlib import Path
        from huggingface_hub import model_info, snapshot_download
        from PIL import Image
        from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, pipeline

        assert_same_weights(model, AutoModelForImageClassification.from_pretrained("alice/vit"))
        image = Image.effect_noise((50, 40), 99)
        assert len(pipeline("image-classification", model="alice/vit")(image, top_k=3)) == 3
        pixels = AutoImageProcessor.from_pretrained("alice/vit")(image, return_tensors="pt")
        assert AutoModel.from_pretrained("alice/vit")(**pixels).pooler_output.shape == (1, 14)
        info = model_info("alice/vit")
        assert (info.library_name, info.pipeline_tag) == ("hf_vit", "image-classification")
        assert {"hf_vit", "vit", "license:mit"} <= set(info.tags)
        print(*sorted(file.name for file in Path(snapshot_download("alice/vit")).iterdir()))
    """
    files = ".gitattributes README.md config.json manifest.json model.safetensors preprocessor_config.json"
    assert run_with(folder, client, code, token=None).splitlines()[-1] == files


def test_own_text_is_kept_and_replaced_weights_are_deleted(hub, client, folder, tmp_path):
    code = """
    from huggingface_hub import HfApi, ModelCard
    push_saved(model, "alice/vit", max_shard_size="4KB", private=True, tags=["flowers"], license="mit", code=True)
    names = set(HfApi().list_repo_files("alice/vit"))
    assert "model.safetensors.index.json" in names and "modeling_hf_vit.py" in names, names
    card = ModelCard.load("alice/vit")
    card.text = "# Mine\\n\\nGrown in a garden.\\n" + card.text + "\\nThanks to my cat.\\n"
    card.data["thumbnail"] = "flower.png"
    card.push_to_hub("alice/vit")
    assert push_saved(processor, "alice/vit").commit_url.startswith(HfApi().endpoint)
    """
    run_with(folder, client, code)
    assert "| vit_jax |" in readme_of(hub, "alice/vit")  # the processor came after its model
    client(push(folder, "alice/vit"))  # its license stands in the README there
    names = commits_of(hub, "alice/vit")[0]["files"]
    assert "model.safetensors" in names
    assert not [name for name in names if "-of-" in name or name.endswith("index.json")]
    metadata, before, after = split_readme(readme_of(hub, "alice/vit"))
    assert before == "# Mine\n\nGrown in a garden."
    assert after == "Thanks to my cat."
    assert readme_of(hub, "alice/vit").count(BEGIN) == 1
    assert (metadata["license"], metadata["thumbnail"]) == ("mit", "flower.png")
    assert "flowers" in metadata["tags"]


def test_transformers_default_card_never_appears(hub, client, folder):
    code = """
    from transformers import ViTConfig, ViTModel
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    ViTModel(config).push_to_hub("alice/vit")
    push_saved(model, "alice/vit", tags=["mine"])
    """
    run_with(folder, client, code)
    readme = readme_of(hub, "alice/vit")
    assert "More Information Needed" not in readme
    assert "# vit" in readme
    assert "- mine" in readme


def test_branches_pull_requests_and_dry_runs(hub, client, folder):
    assert "license" in client(push(folder, "acme/vit", "--dry-run"))
    assert {request["method"] for request in hub.requests} == {"GET"}
    client(push(folder, "acme/vit", *MIT, "--private", "--revision", "dev/x"))
    assert list(commits_of(hub, "acme/vit")[0]["files"]) == [".gitattributes"]
    assert "model.safetensors" in commits_of(hub, "acme/vit", "dev/x")[0]["files"]
    client("from huggingface_hub import HfApi; HfApi().update_repo_settings('acme/vit', private=False)")
    output = client(push(folder, "acme/vit", *MIT, "--create-pr", "--code"))
    assert f"pushed: {hub.url}/acme/vit/discussions/1" in output
    assert "modeling_hf_vit.py" in commits_of(hub, "acme/vit", "refs/pr/1")[0]["files"]
    assert list(commits_of(hub, "acme/vit")[0]["files"]) == [".gitattributes"]


@pytest.mark.parametrize("name", ["alice/vit", "vit"])
def test_a_dry_run_needs_no_network(name, folder, run_command, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr("hf_vit.hub.pushing._RETRY_WAITS", ())
    arguments = push(folder, name, *MIT)
    printed = run_command([*arguments, "--dry-run"])
    assert all(file in printed for file in ("model.safetensors", "README.md", "manifest.json"))
    assert run_command(arguments, status=2)


def test_failures_are_one_sentence_and_commit_nothing(hub, client, folder, tmp_path):
    hub.fail("/commit/", "POST", status=413, times=1)
    odd = shutil.copytree(folder, tmp_path / "odd")
    (odd / "README.md").write_text("---\nmetrics: 5\n---\n")
    client(
        f"""
        import pytest
        from huggingface_hub import HfApi
        from hf_vit import push

        def is_refused(message, folder, *arguments, **options):
            with pytest.raises((OSError, ValueError), match=message):
                push(folder, *arguments, license="mit", **options)

        HfApi().create_repo("alice/taken")
        folder = {str(folder)!r}
        is_refused("alice/taken", folder, "alice/taken")
        is_refused("token", folder, "alice/taken", token="hf_wrong")
        is_refused("create_pr", folder, "alice/taken", token="hf_bob")
        is_refused("alice/new", folder, "alice/new", token="hf_reader")
        is_refused("private", folder, "alice/taken", private=True)
        is_refused("config.json", {str(tmp_path)!r}, "alice/taken")
        is_refused("must be a string or an array of strings", {str(odd)!r}, "alice/odd")
        """
    )
    assert [repo_id for _, repo_id in hub.repos] == ["alice/taken"]
    assert len(commits_of(hub, "alice/taken")) == 1
    no_token = client(push(folder, "alice/taken", *MIT), status=2, token=None)
    assert "`hf auth login`" in no_token
    assert len(no_token.splitlines()) == 1
    moved = "from huggingface_hub import constants; constants.ENDPOINT = 'http://127.0.0.1:9'\n"
    error = client(f"{moved}from hf_vit import push\npush({str(folder)!r}, 'a/b')", status=1)
    assert "a/b" in error


def test_a_killed_push_continues_where_it_stopped(hub, client, tmp_path):
    torch.manual_seed(3)
    large = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048, "num_hidden_layers": 5}
    model = HfViTForImageClassification(HfViTConfig(**{**TINY, **large}))
    model.save_pretrained(tmp_path / "large", max_shard_size="20MB")
    shards = list((tmp_path / "large").glob("*.safetensors"))
    assert len(shards) >= 3
    assert sum(shard.stat().st_size for shard in shards) > 50e6

    def uploads():
        return [request["path"].split("?")[0] for request in hub.requests if request["method"] == "PUT"]

    hub.fail("/api/models/alice/large/commit/", "POST", status=0, delay=60)
    pushing = client.begin(push(tmp_path / "large", "alice/large", *MIT))
    while len(uploads()) < len(shards) and pushing.is_running():
        time.sleep(0.05)
    os.kill(pushing.pid, signal.SIGKILL)
    assert len(commits_of(hub, "alice/large")) == 1
    hub.faults.clear()
    client(push(tmp_path / "large", "alice/large", *MIT))
    assert len(uploads()) == len(shards)  # none of them a second time
    run_with(tmp_path / "large", client, "assert_same_weights(model, type(model).from_pretrained('alice/large'))")


def test_two_pushes_at_the_same_time(hub, client, tmp_path):
    client("from huggingface_hub import HfApi; HfApi().create_repo('acme/vit')")
    pushers = []
    for number in range(2):
        save_tiny(tmp_path / f"from{number}", seed=number)
        (tmp_path / f"from{number}" / f"model{number}.onnx").write_text("mine")
        add_to_marker(tmp_path / f"from{number}", f"model{number}.onnx")
        pushers.append(client.begin(push(tmp_path / f"from{number}", "acme/vit", *MIT)))
    for pusher in pushers:
        output, error = pusher.wait()
        assert pusher.status == 0, output + error
    files = commits_of(hub, "acme/vit")[0]["files"]
    assert {"model0.onnx", "model1.onnx", "README.md", "model.safetensors"} <= set(files)
    assert len(commits_of(hub, "acme/vit")) == 3


def test_evaluation_results_reach_the_hub(hub, client, folder):
    beans, base = "AI-Lab-Makerere/beans", "google/vit-base-patch16-224-in21k"
    run = {"base_model": base, "dataset": beans, "eval_split": "test", "date": "2026-11-21"}
    run |= {"metrics": {"accuracy": 0.875, "seconds": 12.5}, "command": f"finetune --dataset {beans}"}
    (folder / "card_data.json").write_text(json.dumps(run))
    add_to_marker(folder, "card_data.json")
    client(push(folder, "alice/vit", "--license", "apache-2.0"))
    assert ".eval_results/hf_vit.yaml" not in commits_of(hub, "alice/vit")[0]["files"]  # the dataset has no eval.yaml
    code = f"""
    from huggingface_hub import HfApi
    HfApi().create_repo({beans!r}, repo_type="dataset")
    benchmark = {{"path_in_repo": "eval.yaml", "path_or_fileobj": b"name: CIFAR-10\\ntasks:\\n- id: test\\n"}}
    HfApi().upload_file(repo_id={beans!r}, repo_type="dataset", **benchmark)
    """
    client(code, token="hf_me")
    client(push(folder, "alice/vit", "--license", "apache-2.0"))
    code = """
    from huggingface_hub import model_info
    info = model_info("alice/vit", expand=["evalResults", "cardData"])
    entry, = info.eval_results
    result, = info.card_data.eval_results
    print(entry.dataset_id, entry.value, result.metric_value, info.card_data.base_model, info.card_data.datasets)
    """
    assert client(code) == f"{beans} 0.875 0.875 {base} {[beans]}"
    card = readme_of(hub, "alice/vit")
    assert "| accuracy | 87.50% |" in card
    assert f"```\nfinetune --dataset {beans}\n" in card
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0"


def test_a_push_for_readers_of_transformers_and_back(hub, client, folder, tmp_path):
    client(push(folder, "alice/vit", *MIT, "--for", "transformers"))
    files = commits_of(hub, "alice/vit")[0]["files"]
    assert {"modules.json", "1_Pooling/config.json", "manifest.json", "README.md"} <= set(files)
    assert "library_name: transformers" in readme_of(hub, "alice/vit")
    back = str(tmp_path / "back")
    code = f"""
    from huggingface_hub import snapshot_download
    its_model, its_processor = hf_vit.load("alice/vit")
    assert_same_weights(model, its_model)
    assert processor.to_dict() == its_processor.to_dict()
    snapshot_download("alice/vit", local_dir={back!r})
    hf_vit.push({back!r}, "alice/back", license="mit", save_for="hf_vit")
    """
    run_with(folder, client, code)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "vit"
    assert "library_name: hf_vit" in readme_of(hub, "alice/back")
    assert "modules.json" not in commits_of(hub, "alice/back")[0]["files"]


def test_a_hub_without_xet_is_named(hub, client, folder):
    enabled = "import os; os.environ['HF_HUB_DISABLE_XET'] = '0'\nfrom huggingface_hub import constants\n"
    enabled += "constants.HF_HUB_DISABLE_XET = False\n"
    error = client(f"{enabled}import hf_vit; hf_vit.push({str(folder)!r}, 'alice/vit', license='mit')", status=1)
    assert "HF_HUB_DISABLE_XET=1" in error


def test_an_incomplete_card_is_refused_unless_allowed(hub, client, folder):
    error = client(push(folder, "alice/vit"), status=2)
    assert error.startswith("hf-vit push: alice/vit: ")
    assert "--allow-incomplete-card" in error
    assert not [request for request in hub.requests if "repos/create" in request["path"]]
    output = client(push(folder, "alice/vit", "--allow-incomplete-card"))
    assert "license" in output
    assert "model.safetensors" in commits_of(hub, "alice/vit")[0]["files"]
    client(push(folder, "alice/vit"), status=2)
    assert len(commits_of(hub, "alice/vit")) == 2
    run_with(folder, client, "push_saved(model, 'alice/other')")
    assert "model.safetensors" in commits_of(hub, "alice/other")[0]["files"]


SECRETS = ("id_rsa", "token.txt", ".env", "settings.py", "notes.md", "training_args.bin", "model.ckpt", "state.json")


def test_only_what_belongs_to_a_model_is_pushed_and_the_rest_is_named(hub, client, folder):
    for name in (*SECRETS, ".git/config", "best/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    (folder / "conversion.json").write_text("{}")
    address = "https://me:hidden@example.org/x-{0..9}.tar?signature=hidden"
    run = {"dataset": address, "command": f"finetune --dataset '{address}'"}
    (folder / "card_data.json").write_text(json.dumps(run))
    (folder / "metrics.json").write_text("{}")
    reports = {"card_data.json", "metrics.json", "recipe.yaml", "learning_curve.png", "confusion_matrix.png"}
    reports |= {"vit.onnx"}
    for name in reports - {"card_data.json", "metrics.json"}:
        (folder / name).write_text("part of it")
    add_to_marker(folder, *reports)
    _, error = client.begin(push(folder, "alice/vit", *MIT)).wait()
    assert ".env, .git, best, id_rsa, model.ckpt and 5 more" in error
    ours = {"README.md", "model.safetensors", "manifest.json", ".gitattributes"}
    ours |= reports | {"config.json", "preprocessor_config.json", "conversion.json"}
    assert set(commits_of(hub, "alice/vit")[0]["files"]) == ours
    for name in ("README.md", "card_data.json"):
        content = read_file(hub, "alice/vit", name)
        assert b"example.org/x-{0..9}.tar" in content
        assert b"hidden" not in content


@pytest.mark.parametrize(
    "name", ["recipe.yaml", "metrics.json", "card_data.json", "calibration.json", "confusion_matrix.png", "my.onnx"]
)
def test_the_users_own_files_are_not_pushed(name, hub, client, folder):
    """They have names of reports, but hf_vit did not write them."""
    (folder / name).write_text("{}")
    _, error = client.begin(push(folder, "alice/vit", *MIT)).wait()
    assert name in error
    assert name not in commits_of(hub, "alice/vit")[0]["files"]


@pytest.mark.parametrize("name", ["model.safetensors", "metrics.json", "token.txt", ".eval_results"])
def test_symbolic_links_are_never_followed(name, hub, client, folder, tmp_path):
    secret = tmp_path / "secret"
    file = secret / "a.yaml" if name == ".eval_results" else secret
    file.parent.mkdir(exist_ok=True)
    file.write_text("secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    add_to_marker(folder, "metrics.json")
    if name == "token.txt":
        client(push(folder, "alice/vit", *MIT))
        assert name not in commits_of(hub, "alice/vit")[0]["files"]
        return
    error = client(push(folder, "alice/vit", *MIT), status=2)
    assert f"{folder / name}: " in error
    assert not hub.requests


def test_the_manifest_lists_what_was_pushed_and_follows_later_pushes(hub, client, folder):
    def manifest():
        return json.loads(read_file(hub, "alice/vit", "manifest.json"))["files"]

    client(push(folder, "alice/vit", *MIT))
    assert manifest().keys() == {"config.json", "model.safetensors", "preprocessor_config.json"}
    for name, entry in manifest().items():
        content = (folder / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    weights = manifest()["model.safetensors"]
    run_with(folder, client, "processor.image_mean = [0.25] * 3; push_saved(processor, 'alice/vit')")
    pushed = read_file(hub, "alice/vit", "preprocessor_config.json")
    assert manifest()["preprocessor_config.json"]["sha256"] == hashlib.sha256(pushed).hexdigest()
    assert manifest()["model.safetensors"] == weights
    code = """
    push_saved(model, "alice/vit", max_shard_size="4KB")
    assert_same_weights(model, type(model).from_pretrained("alice/vit"))
    """
    run_with(folder, client, code)
    assert "model.safetensors" not in manifest()
    assert "model.safetensors.index.json" in manifest()


def test_a_plain_push_of_transformers_leaves_an_outdated_manifest_that_the_next_push_replaces(hub, client, folder):
    client(push(folder, "alice/vit", *MIT))
    code = f"""
    import pytest
    model.classifier.weight.data += 1
    processor.image_mean = [0.25] * 3
    for part in (model, processor):
        part.push_to_hub("alice/vit")
        with pytest.raises(ValueError, match="manifest.json"):
            hf_vit.load("alice/vit")
        hf_vit.push({str(folder)!r}, "alice/vit", license="mit")
        hf_vit.load("alice/vit")
    """
    run_with(folder, client, code)


def test_a_manifest_never_lists_half_of_a_repository(hub, client, folder):
    """transformers pushed the model, and hf_vit only the processor."""
    code = """
    model.push_to_hub("alice/vit")
    push_saved(processor, "alice/vit")
    hf_vit.load("alice/vit")
    hf_vit.push_saved(model, "alice/vit")
    hf_vit.load("alice/vit")
    """
    run_with(folder, client, code)
    assert "manifest.json" not in commits_of(hub, "alice/vit")[0]["files"]


def test_a_damaged_download_is_refused_until_it_is_repeated(hub, client, folder):
    client(push(folder, "alice/vit", *MIT))
    code = """
    import pytest
    from huggingface_hub import snapshot_download
    from pathlib import Path
    import hf_vit

    hf_vit.load("alice/vit")
    file = Path(snapshot_download("alice/vit", local_files_only=True), "model.safetensors").resolve()
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors"):
        hf_vit.load("alice/vit")
    hf_vit.load("alice/vit", force_download=True)
    hf_vit.load("alice/vit")
    """
    client(code)


def test_a_permanent_upload_failure_is_one_sentence(hub, client, folder):
    hub.fail(".*", "PUT", status=500, times=10**6)
    code = f"""
    import time
    time.sleep = lambda seconds: None
    from hf_vit.cli import main
    raise SystemExit(main(["push", {str(folder)!r}, "alice/vit", "--license", "mit"]))
    """
    error = client(code, status=2)
    (said,) = [line for line in error.splitlines() if line.startswith("hf-vit push: ")]
    assert "injected fault" in said
    assert "Traceback" not in error
    assert list(commits_of(hub, "alice/vit")[0]["files"]) == [".gitattributes"]


def test_a_copy_of_a_converted_model_keeps_the_record_of_its_source(tmp_path):
    export(tiny(image_size=24, patch_size=4), tmp_path / "model.npz", "jax")
    convert(tmp_path / "model.npz", read_weights=False).save(tmp_path / "folder")
    save_as(tmp_path / "folder", tmp_path / "copy", "hf_vit")
    record, copied = (json.loads((tmp_path / name / "conversion.json").read_text()) for name in ("folder", "copy"))
    assert record == copied
