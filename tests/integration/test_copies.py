"""Released files while their bucket answers 403: from mirrors, and from copies in other formats on the Hub."""

import json
import shutil

import pytest
import torch
from PIL import Image

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTHybridConfig, HfViTHybridForImageClassification
from hf_vit.catalog import address_of, copies_of
from hf_vit.conversion import ConversionError, convert, export, fingerprint
from hf_vit.conversion.checkpoint import fetch_any, open_checkpoint
from hf_vit.conversion.converting import read_as_original
from hf_vit.conversion.recognition import recognize
from hf_vit.conversion.source import ConvertOptions

from ..comparing import assert_same_file, assert_same_weights
from ..doc_fixtures import FEW_STEPS
from ..paths import PEERS, SHARED
from ..photographs import write_colors
from ..tiny_models import SIZES, randomize

WEIGHTS = SHARED / "weights"
NPZ, OF_TIMM = WEIGHTS / "Ti_16-imagenet2012-res_224.npz", WEIGHTS / "vit_tiny_patch16_224_timm.safetensors"
SMALL = {**SIZES, "hidden_size": 128, "num_labels": 11, "patch_size": 4, "image_size": 12}
HYBRID = {**SMALL, "stem_depths": [2, 2, 2, 2], "patch_size": 1, "image_size": 96}
OF_ORIGINAL = "vit_models/imagenet21k+imagenet2012/ViT-B_16-224.npz"
OF_HYBRID = "vit_models/imagenet21k+imagenet2012/R50+ViT-B_16.npz"
NAME_IN_TIMM = "timm/vit_base_patch16_224.orig_in21k"
SAME = """
import torch, hf_vit
def same(address, npz):
    (mine, processor), (theirs, its_processor) = map(hf_vit.conversion.convert, (address, npz))
    torch.manual_seed(0)
    pixels = torch.randn(2, 3, theirs.config.image_size, theirs.config.image_size)
    assert torch.equal(mine(pixels)[0], theirs(pixels)[0])
    assert processor.to_dict() == its_processor.to_dict()
    assert mine.config.to_dict() == theirs.config.to_dict()
    record, original = mine.conversion_record, theirs.conversion_record
    assert record["fingerprint"] == original["fingerprint"] and record["source"] == address
    return record
"""


@pytest.fixture
def closed_bucket(serve):
    """Google's bucket, which refuses every request."""
    return serve(lambda request: request.send_error(403))


def with_bucket(server, code, **environment):
    """Code of a client for which `server` is Google's bucket."""
    environment |= {"HF_VIT_ALLOW": "http,private"}
    return (
        f"import os\nos.environ.update({environment!r})\nfrom hf_vit.files import download\n"
        f"download.BUCKETS = {server.url!r}\n{code}"
    )


def upload(client, folder, name):
    code = f"HfApi().upload_folder(repo_id={name!r}, folder_path={str(folder)!r})"
    client(f"from huggingface_hub import HfApi\nHfApi().create_repo({name!r})\n{code}", token="hf_me")


def mirror_of(npz, address, folder):
    """A folder with the bucket's own paths."""
    path = folder / address.removeprefix("gs://")
    path.parent.mkdir(parents=True)
    shutil.copyfile(npz, path)
    return path


@pytest.fixture
def real_copy(client, tmp_path):
    """timm's own file on the Hub; the .npz under its own name."""
    if not NPZ.is_file():
        pytest.skip("the real weights are not at hand")
    address = address_of("augreg:Ti/16")
    (tmp_path / "timm").mkdir()
    shutil.copyfile(OF_TIMM, tmp_path / "timm" / "model.safetensors")
    about = {"architecture": "vit_tiny_patch16_224", "num_classes": 1000, "pretrained_cfg": {"crop_pct": 0.9}}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(about))
    upload(client, tmp_path / "timm", copies_of(address)[0])
    return address, mirror_of(NPZ, address, tmp_path / "mirror")


def test_the_real_copy_gives_the_originals_logits(client, closed_bucket, real_copy, tmp_path):
    """In Python and in commands, and is converted once."""
    address, _ = real_copy
    Image.new("RGB", (40, 30), (200, 20, 20)).save(tmp_path / "cat.jpg")
    write_colors(tmp_path / "data", ("red", "blue"), train=1, test=1)
    paths = ["--dataset", str(tmp_path / "data"), "--output-dir", str(tmp_path / "mine")]
    commands = [
        ["predict", "augreg:Ti/16", str(tmp_path / "cat.jpg"), "--top-k", "3"],
        ["finetune", "--model", "augreg:Ti/16", *paths, *FEW_STEPS.split()],
    ]
    code = f"""
import os, torch, hf_vit
from hf_vit.cli import main
copy, processor = hf_vit.load("augreg:Ti/16")
again, _ = hf_vit.load({address!r})
for command in {commands!r}:
    assert main(command) == 0, command
assert main(["convert", {address!r}, {str(tmp_path / "ti16")!r}]) == 0
os.environ["HF_VIT_SOURCES"] = {str(tmp_path / "mirror")!r}
original, its_processor = hf_vit.conversion.convert({address!r})
pixels = torch.randn(2, 3, 224, 224)
assert torch.equal(copy(pixels).logits, original(pixels).logits)
assert torch.equal(copy(pixels).logits, again(pixels).logits)
assert processor.to_dict() == its_processor.to_dict() and copy.config.id2label == original.config.id2label
print(copy.config.id2label[281], copy.config.hidden_act, copy.config.layer_norm_eps, processor.preset)
"""
    output = client(with_bucket(closed_bucket, code))
    assert output.splitlines()[-1] == "tabby gelu_pytorch_tanh 1e-06 augreg"
    assert output.count("cat.jpg") == 1
    assert "vit_tiny_patch16_224.augreg_in21k_ft_in1k" in output
    assert len(closed_bucket.requests) == 2  # converted once, and by the command
    assert fingerprint(tmp_path / "ti16") == fingerprint(NPZ)
    assert (tmp_path / "mine" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("address", "model", "to"),
    [
        (OF_ORIGINAL, HfViTForImageClassification(HfViTConfig(**SMALL)), "timm"),
        (OF_ORIGINAL, HfViTForImageClassification(HfViTConfig(**SMALL)), "transformers"),
        (OF_HYBRID, HfViTHybridForImageClassification(HfViTHybridConfig(**HYBRID)), "timm"),
    ],
    ids=["timm", "transformers", "hybrid"],
)
def test_a_copy_computes_as_the_original(client, closed_bucket, tmp_path, address, model, to):
    randomize(model, std=0.1)
    export(model, tmp_path / "model.npz", "jax")
    model.config.hidden_act = "gelu"  # what ports say
    if hasattr(model.config, "stem_depths"):
        model.config.weight_standardization_eps = 1e-8
    export(model, tmp_path / "copy", to)
    copies = copies_of(f"gs://{address}")
    name = next(name for name in copies if name.startswith("google/") == (to == "transformers"))
    upload(client, tmp_path / "copy", name)
    npz = mirror_of(tmp_path / "model.npz", address, tmp_path / "mirror")
    code = f"{SAME}\nprint(same('gs://{address}', {str(npz)!r})['copy'])"
    assert name in client(with_bucket(closed_bucket, code))


def test_missing_parts_of_a_copy_are_named(client, closed_bucket, tmp_path):
    model = randomize(HfViTForImageClassification(HfViTConfig(**SMALL)))
    export(model, tmp_path / "copy", "timm")
    upload(client, tmp_path / "copy", NAME_IN_TIMM)
    command = ["convert", "gs://vit_models/imagenet21k/ViT-B_16.npz", str(tmp_path / "out")]
    output = client(with_bucket(closed_bucket, f"from hf_vit.cli import main\nmain({command!r})"))
    assert "pre-logits" in output
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["copy"] == {"name": NAME_IN_TIMM, "without": ["pre-logits layer", "head of zeros"]}


def test_mirrors_come_first(client, closed_bucket, tmp_path):
    model = randomize(HfViTForImageClassification(HfViTConfig(**SMALL)))
    export(model, tmp_path / "model.npz", "jax")
    mirror_of(tmp_path / "model.npz", OF_ORIGINAL, tmp_path / "mirror")
    upload(client, tmp_path / "mirror", "me/mirror")
    mirrors = {"local": f"{tmp_path}/no,{tmp_path}/mirror", "hub": "hf://me/none, hf://me/mirror/"}
    code = f"import hf_vit\nprint(hf_vit.conversion.convert('gs://{OF_ORIGINAL}')[0].conversion_record)"
    for name, sources in mirrors.items():
        output = client(with_bucket(closed_bucket, code, HF_VIT_SOURCES=sources))
        assert "'copy'" not in output, name
        assert f"'source': 'gs://{OF_ORIGINAL}'" in output, name
    assert closed_bucket.requests == []


def test_an_error_names_every_source(client, closed_bucket):
    code = f"from hf_vit.conversion import convert\nconvert('gs://{OF_ORIGINAL}')"
    error = client(with_bucket(closed_bucket, code, HF_VIT_SOURCES="/no"), status=1)
    assert all(name in error for name in ("/no/vit_models", "403", *copies_of(f"gs://{OF_ORIGINAL}")))


def test_a_resnet_of_timm_is_read_as_the_originals():
    with open_checkpoint(fetch_any(str(PEERS / "timm_bit.safetensors"))) as copy:
        original = read_as_original(copy, "gs://bit_models/BiT-M-R50x1.npz")
    source, naming = recognize(original, request := ConvertOptions())
    model, _, record = source.read(original, naming, request)
    assert record["dialect"]["names"] == "big_transfer"
    assert model.config.weight_standardization_eps == 1e-10
    theirs, _ = convert(PEERS / "timm_bit.safetensors")
    assert_same_weights(model, theirs)


def test_a_copy_on_the_hub_is_exported_as_its_original(client, real_copy, tmp_path):
    address, npz = real_copy
    client(["export", copies_of(address)[0], str(tmp_path / "back.npz"), "--to", "jax"])
    assert_same_file(tmp_path / "back.npz", npz)


def test_changed_weights_of_a_copy_are_not_exported_as_the_original(tmp_path):
    if not OF_TIMM.is_file():
        pytest.skip("the real weights are not at hand")
    model, _ = convert(OF_TIMM)
    export(model, tmp_path / "back.npz", "jax")
    with torch.no_grad():
        model.classifier.bias[0] += 1
    with pytest.raises(ConversionError, match="hidden_act"):
        export(model, tmp_path / "changed.npz", "jax")
