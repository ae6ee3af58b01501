"""The catalog: names of files, the built-in list, and AugReg's index."""

import itertools

import pytest

from hf_vit import catalog
from hf_vit.conversion import convert
from hf_vit.models.configuration_hf_bit import VARIANTS as BIT_VARIANTS
from hf_vit.models.configuration_hf_vit import VARIANTS

from ..doc_fixtures import write_index

LIGHT = "R_Ti_16-i21k-30ep-lr_0.001-aug_light0-wd_0.03-do_0.1-sd_0.1--oxford_iiit_pet-steps_0k-lr_0.003-res_384"


def test_the_number_of_released_files():
    assert {entry.family for entry in catalog.released()} == set(catalog.released_facts()["families"])
    others = {"So400m/14", "So400m/16", "g-opt/16", "B/30"}
    assert {entry.variant for entry in catalog.released()} <= {*VARIANTS, *BIT_VARIANTS, *others}
    assert len({entry.location for entry in catalog.released()}) == 139


def test_every_number_has_its_source_and_every_data_set_is_known():
    for entry in catalog.released():
        for result in entry.facts.get("results", ()):
            assert result["dataset"] in catalog.released_facts()["datasets"], entry.name
            assert result["source"]["url"].startswith("https://"), entry.name
            assert result["table"], entry.name
        assert entry.facts["license"], entry.name
        assert set(entry.facts["datasets"]) <= set(catalog.released_facts()["datasets"]), entry.name


def test_every_augreg_name_is_parsed():
    """756 files: 28 settings, 9 architectures, 3 datasets; and B/8, of which only 3 files were released."""
    data_sets, decays, drops = ("i1k-300ep", "i21k-300ep", "i21k-30ep"), ("0.1", "0.03"), ("0.0", "0.1")
    names = [
        f"{model}-{data}-lr_0.001-aug_{augmentation}-wd_{decay}-do_{drop}-sd_{drop}"
        for model, data, augmentation, decay, drop in itertools.product(
            catalog.AUGREG_MODELS, data_sets, catalog.AUGMENTATION, decays, drops
        )
    ]
    assert len([name for name in names if not name.startswith("B_8")]) == 756
    parsed = [catalog.parse_augreg(name) for name in names]
    assert all(name is not None and name.adapted_to is None for name in parsed)
    assert {catalog.AUGREG_MODELS[name.model] for name in parsed} == set(catalog.AUGREG_MODELS.values())
    for data in catalog.ADAPTED_TO:
        assert catalog.parse_augreg(f"{names[0]}--{data}-steps_2k-lr_0.01-res_224").adapted_to == data
    for wrong in ("ViT-B_16", names[0] + "--cifar10-steps_0k-lr_0.01-res_224", names[0].replace("none", "light2")):
        assert catalog.parse_augreg(wrong) is None


def test_explain_describes_a_file():
    words = catalog.explain(f"{catalog.AUGREG}/{LIGHT}.npz")
    assert words == catalog.explain(LIGHT)
    facts = ("ViT-R+Ti/16", "ImageNet-21k", "Oxford-IIIT Pet", "384 x 384", "epochs: 30", "500 steps", "light1")
    assert [fact for fact in (*facts, "weight decay: 0.03", "0.1 in the last layer") if fact not in words] == []
    assert catalog.explain("ViT-B_16").count("gs://") == 4  # four buckets have a file of that name
    assert catalog.explain("gs://vit_models/sam/ViT-B_16.npz").count("gs://") == 1
    assert "224 x 224" in catalog.explain(LIGHT.split("--")[0])
    tiny = catalog.explain("augreg:Ti/16")
    assert "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k" in tiny
    (number,) = (number for number in catalog.released_facts()["fingerprints"].values() if number in tiny)
    assert catalog.released_with(number) == catalog.address_of("augreg:Ti/16")
    assert catalog.released_with("0" * 64) is None
    with pytest.raises(ValueError, match="'ViT-G_14'"):
        catalog.explain("ViT-G_14")


def test_released_files_are_found_by_address_name_or_pattern():
    assert catalog.find_released("gs://vit_models/gsam/ViT-B_16.npz").family == "gsam"
    assert catalog.find_released("https://storage.googleapis.com/vit_models/imagenet21k/ViT-H_14.npz").variant == "H/14"
    assert catalog.find_released("/downloads/ViT-H_14.npz").family == "imagenet21k"
    assert catalog.find_released(f"/downloads/{LIGHT}.npz").facts["resolution"] == 384
    assert catalog.find_released("/downloads/BiT-M-R50x1-ILSVRC2012.npz").facts["resolution"] == 480
    assert catalog.find_released("gs://bit_models/BiT-S-R152x4.npz").variant == "R152x4"
    entry = catalog.find_released("gs://bit_models/vtab/BiT-M-R101x3-run2-dsprites-xpos.npz")
    assert (entry.family, entry.variant) == ("bit_vtab", "R101x3")
    assert catalog.find_released("paligemma2-3b-pt-448.b16.npz").variant == "So400m/14"
    for name in ("/downloads/ViT-B_16.npz", "/downloads/my.npz", "/runs/checkpoint.npz"):  # the first: any of four
        assert catalog.find_released(name) is None


def test_the_built_in_list_is_searched_without_an_index():
    found = catalog.search("R50+L/32", "imagenet2012", 384)
    pretrained = "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1"
    file = f"{catalog.AUGREG}/{pretrained}--imagenet2012-steps_20k-lr_0.01-res_384.npz"
    assert [location for location, _ in found] == [file]
    assert catalog.search("B/16", "oxford_iiit_pet") == []
    with pytest.raises(ValueError, match="'B/17'"):
        catalog.search("B/17")
    with pytest.raises(ValueError, match="'pets'"):
        catalog.search("B/16", "pets")
    with pytest.raises(ValueError, match="'siglip3'"):
        catalog.files_of("siglip3")


# One file of each family that has an address; AugReg and vit_jax are tested above.
A_FILE_OF = {
    "SAM": "vit_models/sam/ViT-S_16.npz",
    "GSAM": "vit_models/gsam/ViT-S_16.npz",
    "LiT": "vit_models/lit/LiT-L16Ti.npz",
    "MLP-Mixer": "mixer_models/imagenet21k/Mixer-L_16.npz",
    "ViT-S/16 on ImageNet-1k": "big_vision/vit_s16_i1k_150ep.npz",
    "FlexiViT": "big_vision/flexivit/flexivit_l_i1k_600ep.npz",
    "FlexiViT's fixed baselines": "big_vision/flexivit/vit_b30_i21k_300ep.npz",
    "DeiT III": "big_vision/zoo/deit3/bv_deit_3_large_384_21k.npz",
    "SigLIP": "big_vision/siglip/webli_i18n_b16_256_66117334.npz",
    "SigLIP 2, fixed resolution": "big_vision/siglip2/siglip2_g-opt16_384.npz",
    "SigLIP 2 NaFlex": "big_vision/siglip2/siglip2_so400m16_naflex.npz",
    "LiT of big_vision, COCO": "vit_models/lit/big_vision/coco_B16B/checkpoint.npz",
    "CLIPPO": "big_vision/clippo/clippo_b16_100c4.npz",
    "UViM": "big_vision/uvim/panoptic_stageII_params.npz",
    "GIVT": "big_vision/givt/givt_coco_panoptic_params.npz",
    "VAE of GIVT": "big_vision/givt/vae_imagenet_2012_beta_1e-4_params",
    "VQ-VAE of PaliGemma's segmentation": "big_vision/paligemma/vae-oid.npz",
    "BiT students and teachers of distillation": "bit_models/distill/R152x2_T_food128.npz",
    "BiT-S and BiT-M": "bit_models/BiT-S-R152x4.npz",
    "BiT-S and BiT-M for Keras": "bit_models/BiT-S-R101x3.h5",
    "BiT-M fine-tuned on ImageNet": "bit_models/BiT-M-R152x2-ILSVRC2012.npz",
    "BiT-M fine-tuned on VTAB-1k": "bit_models/vtab/BiT-M-R101x3-run2-dsprites-xpos.npz",
    "the same for TensorFlow Hub": "bit_models/vtab/BiT-M-R50x1-run0-svhn/tfhub/saved_model.pb",
}


@pytest.mark.parametrize("family", A_FILE_OF)
def test_a_file_of_every_released_family_is_found(family):
    assert catalog.explain(f"gs://{A_FILE_OF[family]}").startswith(f"gs://{A_FILE_OF[family]}")


@pytest.fixture
def index(tmp_path):
    """Two pre-trained B/16, one on another dataset, and B/8."""
    names = {"B_16-i21k-300ep-light1": 0.46, "B_16-i21k-300ep-strong2": 0.49, "B_16-i21k-30ep-none": 0.51}
    names |= {"B_8-i21k-300ep-medium2": 0.50}
    rows = []
    for name, accuracy in names.items():
        settings, _, augmentation = name.rpartition("-")
        file = f"{settings}-lr_0.001-aug_{augmentation}-wd_0.1-do_0.0-sd_0.0"
        rows += [(file, accuracy, 224, 0.91), (file, accuracy, 384, 0.93)]
    write_index(tmp_path / "index.csv", rows)
    return tmp_path / "index.csv"


def test_search_in_an_index(index):
    found = catalog.search("B/16", "oxford_iiit_pet", 384, index)
    assert ["30ep" in found[0].location, "strong2" in found[1].location, "light1" in found[2].location] == [True] * 3
    assert all(fact in found[1].about for fact in ("oxford_iiit_pet", "0.9349", "0.9300"))
    assert len(catalog.search("B/16", "oxford_iiit_pet", index=index)) == 6
    pretrained = catalog.search("B/16", index=index)
    assert len(pretrained) == 3
    assert not any("--" in location for location, _ in pretrained)
    assert catalog.search("B/8", "kitti", index=index) == []


def test_best_augreg_chooses_as_the_original_code(index, tmp_path):
    recommended = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"  # by the README
    assert catalog.best_augreg("B/16") == recommended
    assert "strong2" in catalog.best_augreg("B_16", index)  # not the better one of 30 epochs
    assert "B_8" in catalog.best_augreg("B/8", index)
    hybrid = "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
    assert catalog.address_of("augreg:best:R_Ti_16") == f"{catalog.AUGREG}/{hybrid}.npz"
    assert catalog.address_of(f"augreg:{LIGHT}.npz") == f"{catalog.AUGREG}/{LIGHT}.npz"
    assert catalog.address_of("weights.npz") == "weights.npz"
    (tmp_path / "other.csv").write_text("name,ds\nB/16,i21k\n")
    for arguments, message in (
        (["H/14"], "'H/14'"),
        (["S/16", index], "S/16"),
        (["B/16", tmp_path / "other.csv"], "filename"),
    ):
        with pytest.raises(ValueError, match=message):
            catalog.best_augreg(*arguments)


def test_a_chosen_file_is_downloaded_from_its_bucket(monkeypatch):
    def refuse(location, *_):
        raise OSError(location)

    monkeypatch.setattr("hf_vit.conversion.converting.fetch_any", refuse)
    with pytest.raises(OSError, match="vit_models"):
        convert("augreg:best:Ti/16")
    with pytest.raises(ValueError, match="'ViT-B_16'"):
        convert("augreg:ViT-B_16")


def test_catalog_command(index, run_command):
    adapted = ["catalog", "B/16", "--adapted-to", "oxford_iiit_pet"]
    assert run_command([*adapted, "--resolution", "384", "--index", index]).count("res_384.npz") == 3
    assert "Oxford-IIIT Pet" in run_command(["catalog", LIGHT])
    assert "gs://vit_models/augreg/index.csv" in run_command(adapted)
    assert run_command(["catalog", "B/99"], status=2).count("\n") == 1
    assert "siglip2_so400m16_naflex.npz" in run_command(["catalog", "siglip2_naflex"])
    assert "gs://bit_models/vtab/BiT-M-{variant}-run[0-2]-[task].npz" in run_command(["catalog", "bit_vtab"])
