"""The models, in every variant: attention, saving and loading, gradients, initialization, arguments of `forward`."""

import copy
import inspect

import numpy as np
import pytest
import scipy.ndimage
import torch
import transformers
from transformers import AutoBackbone, AutoModel, AutoModelForImageClassification

import hf_vit
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_vit import HfViTPooler, resize_position_embeddings
from hf_vit.models.modeling_hf_vit_variants import HfViTBackbone, HfViTForImageClassification, HfViTModel
from hf_vit.models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction

from ..comparing import assert_same_weights
from ..tiny_models import SIZES, VARIANTS, images, randomize, tiny


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attentions_are_always_returned(model, attention):
    model.set_attn_implementation(attention)
    outputs = model(images(model), output_attentions=True, output_hidden_states=True)
    tokens = model(images(model), output_hidden_states=True).hidden_states[0].shape[1]
    layers = len(model.vit.layers)
    assert [tuple(attention.shape) for attention in outputs.attentions] == [(2, 2, tokens, tokens)] * layers
    torch.testing.assert_close(outputs.attentions[1].sum(-1), torch.ones(2, 2, tokens))
    assert len(outputs.hidden_states) == layers + 1
    torch.testing.assert_close(outputs.logits, model(images(model)).logits, rtol=0, atol=1e-5)
    model.config.output_attentions = True
    assert len(model(images(model)).attentions) == layers


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_last_layer_computes_only_what_the_logits_need(model, checkpointing):
    """Gradients are the same; all tokens of the last layer are computed if requested or needed."""
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    shapes, gradients = [], []
    model.vit.layers[-1].register_forward_hook(lambda layer, inputs, output: shapes.append(tuple(output.shape)))
    for everything in (True, False):
        model.zero_grad()
        logits = model(images(model), output_hidden_states=everything).logits
        logits.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    tokens = shapes[0][1]
    assert tokens > 1
    assert shapes[-1][1] == (1 if model.config.pooling == "cls" else tokens)


@torch.no_grad()
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pooling": "mean", "use_cls_token": True},
        {"stored_patch_size": (7, 5), "position_grid": (2, 3)},
        {"hybrid": True},
        {"position_interpolation": "bicubic"},
    ],
)
def test_a_class_token_without_a_position_holds_the_former_one(fields):
    """For every kind of input: the configured size, another, masked patches, fewer patches, images of two sizes."""
    with_position = tiny(**fields)
    without = copy.deepcopy(with_position)
    without.drop_class_position()
    config = without.config
    rows, columns = config.stored_grid
    assert without.vit.embeddings.position_embeddings.shape[1] == rows * columns
    assert type(without)(config).load_state_dict(without.state_dict())
    height, width = (size * config.stride for size in config.patch_size)
    other = torch.randn(2, 3, 2 * height, 3 * width)
    inputs = [
        {"pixel_values": images(without)},
        {"pixel_values": other},
        {"pixel_values": other, "keep": torch.tensor([[0, 4], [2, -1]])},
        {"pixel_values": torch.randn(2, 6, 3 * height * width), "spatial_shapes": torch.tensor([[2, 3], [1, 2]])},
    ]
    for one in inputs:
        torch.testing.assert_close(without(**one).logits, with_position(**one).logits, rtol=0, atol=1e-5)
    with_position.set_image_size((3 * height, 2 * width))
    without.set_image_size((3 * height, 2 * width))
    pixel_values = torch.randn(1, 3, 3 * height, 2 * width)
    torch.testing.assert_close(without(pixel_values).logits, with_position(pixel_values).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_masked_patches_with_a_class_token_without_a_position():
    config = HfViTConfig(**SIZES, image_size=(20, 36), patch_size=(4, 6))
    with_position = randomize(HfViTForMaskedPatchPrediction(config))
    without = copy.deepcopy(with_position)
    without.drop_class_position()
    pixel_values = torch.randn(2, 3, 20, 36)
    masked = torch.rand(2, 30) > 0.5
    ours, theirs = (model(pixel_values, bool_masked_pos=masked).logits for model in (without, with_position))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_saved_and_loaded(model, tmp_path):
    """Complete, and without the head."""
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_weights(loaded, model)
    torch.testing.assert_close(loaded(images(model)).logits, model(images(model)).logits, rtol=0, atol=1e-6)
    pooled = AutoModel.from_pretrained(tmp_path)(images(model)).pooler_output
    torch.testing.assert_close(model.classifier(pooled), model(images(model)).logits)


@pytest.mark.slow
def test_compiles_without_graph_breaks(model):
    torch.compiler.reset()  # other tests compile the same code for other models
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images(model)).logits, model(images(model)).logits)


def test_gradients_reach_every_parameter_with_and_without_checkpointing(model):
    model.train()
    pixel_values = images(model)
    logits = model(pixel_values).logits
    logits.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    silent = {name for name, gradient in expected.items() if not gradient.abs().max() > 0}
    assert not {name for name in silent if not name.endswith("k_proj.bias")}  # softmax ignores a key's bias
    model.zero_grad()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name since 5.23
    model(pixel_values).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@torch.no_grad()
def test_another_number_of_labels_gives_a_zero_head(model, tmp_path):
    model.config.temperature = 2.0
    model.save_pretrained(tmp_path)
    assert AutoModelForImageClassification.from_pretrained(tmp_path).config.temperature == 2
    fresh = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=5)
    assert fresh.classifier.weight.shape[0] == 5
    assert fresh.config.temperature is None  # of the old head
    assert not any(parameter.any() for parameter in fresh.classifier.parameters())
    assert_same_weights(fresh.vit, model.vit)
    config = AutoModelForImageClassification.from_pretrained(tmp_path, id2label={"0": "cat", "1": "dog"}).config
    assert (config.id2label, config.label2id) == ({0: "cat", 1: "dog"}, {"cat": 0, "dog": 1})
    with pytest.raises(ValueError, match="id2label"):
        AutoModelForImageClassification.from_pretrained(tmp_path, id2label=["cat", "dog"])


def test_other_mismatches_are_refused(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"fc1.bias"):
        HfViTForImageClassification.from_pretrained(tmp_path, intermediate_size=23)
    with pytest.raises(ValueError, match=r"layers.3.attention.q_proj.weight"):
        HfViTForImageClassification.from_pretrained(tmp_path, num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"layers.2.mlp.fc2.weight"):
        HfViTModel.from_pretrained(tmp_path, num_hidden_layers=2)


def test_image_size_at_load_through_auto_classes_and_a_configuration(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    larger = AutoModelForImageClassification.from_pretrained(tmp_path, image_size=(40, 54))
    cls_row = larger.vit.embeddings.position_embeddings[:, 0]
    assert torch.equal(cls_row, model.vit.embeddings.position_embeddings[:, 0])
    larger.config.save_pretrained(tmp_path / "larger")
    through_path = HfViTForImageClassification.from_pretrained(tmp_path, config=str(tmp_path / "larger"))
    assert tuple(through_path.config.image_size) == (40, 54)


def test_images_of_a_wrong_shape_are_refused():
    model = tiny()
    with pytest.raises(ValueError, match=r"\(2, 1, 20, 36\)"):
        model(torch.zeros(2, 1, 20, 36))
    with pytest.raises(ValueError, match=r"shape \(3, 20, 36\)"):
        model(torch.zeros(3, 20, 36))
    with pytest.raises(ValueError, match="21"):
        model(torch.zeros(2, 3, 21, 36))


def test_initialization_equals_the_original():
    torch.manual_seed(0)
    config = HfViTConfig(hidden_size=96, intermediate_size=160, num_attention_heads=3, num_hidden_layers=2)
    config.representation_size, config.num_labels = 64, 7
    parameters = HfViTForImageClassification(config).state_dict()
    zero = [name for name, parameter in parameters.items() if not parameter.any()]
    assert {"classifier.weight", "classifier.bias", "vit.embeddings.cls_token"} <= set(zero)
    q_proj, fc1 = parameters["vit.layers.1.attention.q_proj.weight"], parameters["vit.layers.1.mlp.fc1.weight"]
    assert q_proj.abs().max() == pytest.approx((6 / (96 + 96)) ** 0.5, rel=1e-2)  # xavier uniform
    assert fc1.abs().max() == pytest.approx((6 / (96 + 160)) ** 0.5, rel=1e-2)
    assert parameters["vit.layers.0.mlp.fc2.bias"].std() == pytest.approx(1e-6, rel=0.3)
    projection = parameters["vit.embeddings.patch_embeddings.projection.weight"]
    assert projection.std() == pytest.approx((3 * 16 * 16) ** -0.5, rel=2e-2)  # lecun normal
    assert parameters["vit.pooler.dense.weight"].std() == pytest.approx(96**-0.5, rel=5e-2)
    assert parameters["vit.embeddings.position_embeddings"].std() == pytest.approx(0.02, rel=5e-2)


def test_regional_compilation_of_accelerate():
    """Accelerate replaces the list of layers by a plain `nn.ModuleList`."""
    compile_regions = pytest.importorskip("accelerate.utils").compile_regions
    model = tiny()
    pixel_values = images(model)
    with torch.no_grad():
        compiled = compile_regions(model, backend="eager")
        assert type(compiled.vit.layers[0]).__name__ == "OptimizedModule"
        torch.testing.assert_close(compiled(pixel_values).logits, model(pixel_values).logits)


def test_dropout_sites_and_stochastic_depth():
    model = tiny(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.25, drop_path_rate=0.4)
    sites = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)]
    in_layers = [f"vit.layers.{index}.{site}" for index in range(3) for site in ("mlp.dropout", "dropout")]
    assert sites == ["vit.embeddings.dropout", *in_layers]
    assert [layer.drop_path.rate for layer in model.vit.layers] == [0, 0.2, 0.4]
    model.train()
    pixel_values = images(model)
    assert not torch.equal(model(pixel_values).logits, model(pixel_values).logits)
    drop_path, ones = model.vit.layers[2].drop_path, torch.ones(20_000, 1, 1)
    dropped = drop_path(ones)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert dropped.mean() == pytest.approx(1, abs=0.03)


@torch.no_grad()
def test_backbone(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    backbone = HfViTBackbone.from_pretrained(tmp_path, out_features=["stem", "stage2", "stage3"])
    outputs = backbone(images(model), output_hidden_states=True, output_attentions=True)
    assert [tuple(feature_map.shape) for feature_map in outputs.feature_maps] == [(2, 14, 5, 6)] * 3
    assert (len(outputs.hidden_states), len(outputs.attentions)) == (4, 3)
    assert AutoBackbone.from_config(backbone.config).channels == [14, 14, 14]


@torch.no_grad()
@pytest.mark.parametrize("name", ["map", "no positions"])
def test_encoders_without_pooling_from_a_classifier_with_weights_of_pooling(name, tmp_path):
    """The classifier's own encoder judges."""
    model = tiny(**VARIANTS[name])
    model.save_pretrained(tmp_path)
    expected = model.vit(images(model)).last_hidden_state
    encoder = HfViTModel.from_pretrained(tmp_path, add_pooling_layer=False)
    torch.testing.assert_close(encoder(images(model)).last_hidden_state, expected)
    (feature_map,) = HfViTBackbone.from_pretrained(tmp_path)(images(model)).feature_maps
    torch.testing.assert_close(feature_map.flatten(2).mT, expected[:, model.config.num_prefix_tokens :])
    with pytest.raises(ValueError, match=r"vit\.pooler"):
        HfViTForImageClassification.from_pretrained(tmp_path, representation_size=None, pooling="cls")


@torch.no_grad()
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("model_class", [HfViTModel, HfViTBackbone, HfViTForMaskedPatchPrediction])
def test_images_are_converted_to_the_dtype_of_the_weights(model_class, hybrid):
    """The outputs equal those of the same images in bfloat16."""
    torch.manual_seed(0)
    model = model_class(tiny(hybrid).config).bfloat16().eval()
    patches = model.config.grid_size[0] * model.config.grid_size[1]
    masked = {"bool_masked_pos": torch.ones(2, patches)} if hasattr(model, "mask_token") else {}
    found, expected = (
        model(pixel_values, **masked, output_hidden_states=True).hidden_states[-1]
        for pixel_values in (images(model), images(model).bfloat16())
    )
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@torch.no_grad()
def test_mean_pooling_of_many_tokens_in_float16():
    """The sum of the tokens exceeds float16; masked tokens are left out."""
    pooler = HfViTPooler(HfViTConfig(pooling="mean"))
    tokens = torch.full((1, 2_048, 5), 40.0, dtype=torch.float16)
    tokens[:, 1_900:] = 7
    mask = torch.ones(1, 2_048).index_fill(1, torch.arange(1_900, 2_048), 0)
    assert torch.equal(pooler(tokens, mask), tokens[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["mean", "hybrid", "relative"])
def test_attention_mask_hides_patches(name):
    model = tiny(**VARIANTS[name] | {"pooling": "mean"})
    pixel_values = images(model)
    mask = torch.ones(2, model.config.grid_size[0] * model.config.grid_size[1], dtype=torch.long)
    mask[0, 4:] = 0
    expected = model(pixel_values, attention_mask=mask, output_attentions=True)
    assert expected.attentions[0][0, :, :, 4:].max() == 0
    if name != "hybrid":  # where patches overlap
        pixel_values[0, :, 4:] = 9  # below the first row of patches
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        logits = model(pixel_values, attention_mask=mask).logits
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-5)
        whole = model(pixel_values).logits
        torch.testing.assert_close(whole[1], logits[1], rtol=0, atol=1e-5)
        assert not torch.allclose(whole[0], logits[0], atol=1e-3)


PAIRS = [
    (hf_vit.HfViTModel, transformers.ViTModel),
    (hf_vit.HfViTForImageClassification, transformers.ViTForImageClassification),
    (hf_vit.HfViTForMaskedPatchPrediction, transformers.ViTForMaskedImageModeling),
    (hf_vit.HfBiTModel, transformers.BitModel),
    (hf_vit.HfBiTForImageClassification, transformers.BitForImageClassification),
    (hf_vit.HfBiTBackbone, transformers.BitBackbone),
    (hf_vit.HfViTBackbone, transformers.BitBackbone),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_positional_arguments_have_the_order_of_transformers(ours, theirs):
    def positional(model_class):
        parameters = inspect.signature(model_class.forward).parameters.values()
        return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    expected = [name for name in positional(theirs) if name not in ("output_hidden_states", "return_dict")]
    assert positional(ours) == expected  # those two, which BiT still declares, come by name


def test_an_encoder_with_a_mask_token(tmp_path):
    config = transformers.ViTConfig(**SIZES, image_size=20, patch_size=4)
    theirs = randomize(transformers.ViTModel(config, use_mask_token=True))
    theirs.save_pretrained(tmp_path / "theirs")
    hf_vit.load(tmp_path / "theirs")[0].save_pretrained(tmp_path / "converted")
    ours = hf_vit.HfViTModel.from_pretrained(tmp_path / "converted", use_mask_token=True).eval()
    ours.embeddings.mask_token.data.copy_(theirs.embeddings.mask_token)
    pixel_values = torch.randn(3, 3, 20, 20, generator=torch.Generator().manual_seed(1))
    masked = torch.rand(3, 25, generator=torch.Generator().manual_seed(2)) < 0.4
    attended = torch.ones(3, 26)
    attended[1, 20:] = 0
    with torch.no_grad():
        output, expected = (model(pixel_values, masked, None, attended).last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    ours.save_pretrained(tmp_path / "ours")
    plain = hf_vit.HfViTModel.from_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="bool_masked_pos"):
        plain(pixel_values, masked)
    plain.save_pretrained(tmp_path / "plain")
    assert not hf_vit.HfViTModel.from_pretrained(tmp_path / "plain", use_mask_token=True).embeddings.mask_token.any()


def resized_tables(goldens):
    with np.load(goldens / "posemb_resize.npz") as arrays:
        for name in {key.split("/")[0] for key in arrays.files}:
            kind, sizes = name.split("_")
            old, new = map(int, sizes.split("to"))
            yield int(kind == "cls"), old, new, arrays[f"{name}/in"], arrays[f"{name}/out"]


def test_jax_exact_equals_the_original_with_its_fault(goldens):
    for has_cls, old, new, given, expected in resized_tables(goldens):
        ours = resize_position_embeddings(torch.from_numpy(given), (old, old), (new, new), has_cls, "jax_exact")
        np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-6, err_msg=f"{old} to {new}")


def test_jax_differs_from_the_original_only_in_the_rows_that_it_zeroes(goldens):
    repaired = []
    for has_cls, old, new, given, expected in resized_tables(goldens):
        ours = resize_position_embeddings(torch.from_numpy(given), (old, old), (new, new), has_cls, "jax").numpy()
        wrong = np.abs(ours - expected).max(axis=-1)[0, has_cls:].reshape(new, new) > 1e-6
        assert not wrong[:-1, :-1].any()
        if wrong.any():
            assert wrong[-1].all()
            assert wrong[:, -1].all()
            corner_in, corner_out = given[0, -1], ours[0, -1]
            np.testing.assert_allclose(corner_out, corner_in, atol=1e-6)
            repaired.append((old, new))
    assert sorted(repaired) == [(8, 26), (28, 14), (28, 48)]


@pytest.mark.parametrize(("old", "new"), [((2, 8), (5, 3)), ((7, 12), (12, 7)), ((1, 6), (4, 9))])
def test_jax_equals_scipy_on_grids_that_are_not_square(old, new):
    table = np.random.default_rng(0).normal(size=(1, 2 + old[0] * old[1], 5))
    ours = resize_position_embeddings(torch.from_numpy(table), old, new, num_prefix_tokens=2)
    grid = scipy.ndimage.zoom(table[0, 2:].reshape(*old, 5), (new[0] / old[0], new[1] / old[1], 1), order=1)
    np.testing.assert_array_equal(ours[0, :2], table[0, :2])
    np.testing.assert_allclose(ours[0, 2:], grid.reshape(-1, 5), atol=1e-12)


def test_half_precision_is_resampled_in_float32():
    table = torch.randn(1, 12, 7, dtype=torch.bfloat16)
    ours = resize_position_embeddings(table, (3, 4), (7, 5), 0)
    expected = resize_position_embeddings(table.float(), (3, 4), (7, 5), 0)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected.bfloat16(), rtol=0, atol=0)


def test_torchvisions_positions():
    """`interpolate_embeddings` of torchvision: bicubic with aligned corners; made with torch's own interpolation."""
    torch.manual_seed(0)
    table = torch.randn(1, 1 + 4 * 4, 6)
    grid = table[:, 1:].permute(0, 2, 1).reshape(1, 6, 4, 4)
    resized = torch.nn.functional.interpolate(grid, size=7, mode="bicubic", align_corners=True)
    expected = torch.cat([table[:, :1], resized.reshape(1, 6, 49).permute(0, 2, 1)], dim=1)
    found = resize_position_embeddings(table, (4, 4), (7, 7), 1, "bicubic_aligned")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
