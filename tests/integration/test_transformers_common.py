"""transformers' own common tests of models, backbones, configurations and image processors, on our classes.

They run as they are, but for those that are overridden below. Only what transformers' own ViT or BiT skips too is
skipped: `OF_OTHER_KINDS`.
"""

import re
import tempfile
import unittest

import pytest
import torch
from transformers import testing_utils

import hf_vit
from hf_vit import HfBiTConfig, HfViTConfig, HfViTHybridConfig, HfViTImageProcessor
from hf_vit.models import pretrained

from ..comparing import assert_same_weights
from . import transformers_sdist

modeling, backbones, configurations, processors = transformers_sdist.load(
    "test_modeling_common", "test_backbone_common", "test_configuration_common", "test_image_processing_common"
)

pytestmark = pytest.mark.slow  # a thousand of them
OF_OTHER_KINDS = {  # they skip themselves
    "models with a vocabulary": r"tokens_embeddings|resize_embeddings|resize_position_vector|inputs_embeds"
    r"|enable_input_require_grads",
    "language models": r"text_features|_lm_loss|encoder_decoder|rope|sliding_window|feed_forward_chunking",
    "mixtures of experts": r"moe|router|batched_and_grouped",
    "models of several parts": r"composite|subconfig|image_features|audio_features|video_features",
    "models that keep parts in float32": r"keep_in_fp32",
    "models with weights in another layout on disk": r"reverse_loading_mapping|already_mapped_keys|tied_head",
    "image processors with two implementations": r"backends|preprocess_arguments|without_torchvision",
}
WITH_ATTENTION = r"attention_outputs|attention_dynamically|eager_matches_sdpa|sdpa_can_dispatch|tp_plan"
TINY = {"hidden_size": 28, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 22}
TINY |= {"image_size": 24, "patch_size": 8, "num_labels": 5}
BIT = {"embedding_size": 32, "depths": [1, 1], "image_size": 24, "num_labels": 5}
HYBRID = {**TINY, "patch_size": 1, "stem_depths": [1, 1], "stem_width": 32}


@pytest.fixture(autouse=True)
def ours_are_known(monkeypatch):
    """Register our classes, because the common tests recognize models with labels by class names."""
    for model_type, prefix in (("hf_vit", "HfViT"), ("hf_vit_hybrid", "HfViTHybrid"), ("hf_bit", "HfBiT")):
        for table, kind in (
            (modeling.MODEL_MAPPING_NAMES, "Model"),
            (modeling.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, "ForImageClassification"),
            (modeling.MODEL_FOR_BACKBONE_MAPPING_NAMES, "Backbone"),
        ):
            monkeypatch.setitem(table, model_type, f"{prefix}{kind}")


class Common:
    """Base of the common tests; a skip of a test that concerns our models is an error."""

    of_other_kinds = "|".join(OF_OTHER_KINDS.values())

    def skipTest(self, reason):
        if not re.search(self.of_other_kinds, self._testMethodName):
            pytest.fail(f"this is no reason to skip a test: {reason}")
        super().skipTest(reason)


class SmallModel:
    """Input of the common tests: a configuration, and a batch for its models."""

    batch_size, is_training = 3, True
    seq_length, mask_length, num_masks = 10, 9, 4  # tokens of all: the class token and 3 x 3 patches; and masked ones

    def __init__(self, config_class, settings):
        self.config_class, self.settings = config_class, settings
        vars(self).update(settings)

    def get_config(self):
        return self.config_class(**self.settings)

    def prepare_config_and_inputs_for_common(self):
        pixel_values = torch.rand(self.batch_size, 3, self.image_size, self.image_size)
        return self.get_config(), {"pixel_values": pixel_values * 2 - 1}


class Models(Common, modeling.ModelTesterMixin):
    config_class, settings = HfViTConfig, TINY
    common_properties = None  # the default ones
    test_resize_embeddings = False  # as for transformers' ViT
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = SmallModel(self.config_class, self.settings)

    def test_configuration(self):
        """Run the test like transformers' own ViT and BiT."""
        settings = {name: value for name, value in self.settings.items() if name != "num_labels"}
        kind = {"has_text_modality": False, "common_properties": self.common_properties}
        configurations.ConfigTester(self, self.config_class, **kind, **settings).run_common_tests()

    def each_model(self):
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            yield model_class(config).eval(), inputs

    def test_model_get_set_embeddings(self):
        """The embedding of an image is not a table."""
        for model, _ in self.each_model():
            assert any(parameter.ndim == 4 for parameter in model.get_input_embeddings().parameters())
            model.set_input_embeddings(torch.nn.Identity())
            assert isinstance(model.get_input_embeddings(), torch.nn.Identity)
            assert any(isinstance(module, torch.nn.Identity) for module in model.base_model.modules())

    def test_gradients_with_checkpointing(self):
        """The common test of `enable_input_require_grads` needs the weight of a table, and skips our models."""
        for model, inputs in self.each_model():
            weight = next(model.get_input_embeddings().parameters())
            gradients = []
            for set_up in (model.train, model.activation_checkpointing_enable, model.enable_input_require_grads):
                set_up()
                outputs = model(**inputs, output_hidden_states=True)
                outputs.hidden_states[-1].square().sum().backward()
                gradients.append(weight.grad.clone())
                model.zero_grad()
            assert gradients[0].any()
            for gradient in gradients[1:]:
                torch.testing.assert_close(gradient, gradients[0])

    def test_can_load_ignoring_mismatched_shapes(self):
        """A head for other classes needs no flag; it is zero."""
        for model, _ in self.each_model():
            if hasattr(model, "classifier"):
                with tempfile.TemporaryDirectory() as folder, testing_utils.CaptureLogger(pretrained.logger) as log:
                    model.save_pretrained(folder)
                    again = type(model).from_pretrained(folder, num_labels=42)
                assert "classification head" in log.out
                assert not any(parameter.any() for parameter in again.classifier.parameters())
                assert_same_weights(again.base_model, model.base_model)

    def test_model_weights_reload_no_missing_tied_weights(self):
        self.missing_weights_are_refused(super().test_model_weights_reload_no_missing_tied_weights)

    def test_can_init_all_missing_weights(self):
        self.missing_weights_are_refused(super().test_can_init_all_missing_weights)

    def missing_weights_are_refused(self, common_test):
        """Check that missing weights are refused, as documented."""
        with pytest.raises(ValueError, match="missing"):
            common_test()


class TestModels(Models, unittest.TestCase):
    all_model_classes = (hf_vit.HfViTModel, hf_vit.HfViTForImageClassification, hf_vit.HfViTBackbone)


class TestHybrids(Models, unittest.TestCase):
    config_class, settings = HfViTHybridConfig, HYBRID
    all_model_classes = (hf_vit.HfViTHybridModel, hf_vit.HfViTHybridForImageClassification, hf_vit.HfViTHybridBackbone)


class TestBiT(Models, unittest.TestCase):
    config_class, settings = HfBiTConfig, BIT
    common_properties = ("num_channels",)  # as for transformers' BiT
    all_model_classes = (hf_vit.HfBiTModel, hf_vit.HfBiTForImageClassification, hf_vit.HfBiTBackbone)
    has_attentions = False
    of_other_kinds = f"{Common.of_other_kinds}|{WITH_ATTENTION}"

    def setUp(self):
        """Hidden states are maps: the input of the first stage, 6 x 6, and the output of each stage."""
        super().setUp()
        vars(self.model_tester).update(num_hidden_layers=2, seq_length=6, hidden_size=6)


class TestMaskedPatchPrediction(Models, unittest.TestCase):
    all_model_classes = (hf_vit.HfViTForMaskedPatchPrediction,)

    def setUp(self):
        """The same patches of every image are masked, so that batches can be compared."""
        super().setUp()
        prepare = self.model_tester.prepare_config_and_inputs_for_common

        def prepare_masked():
            config, inputs = prepare()
            masked = torch.arange(9) < self.model_tester.num_masks
            return config, {**inputs, "bool_masked_pos": masked.repeat(self.model_tester.batch_size, 1)}

        self.model_tester.prepare_config_and_inputs_for_common = prepare_masked

    def test_model_outputs_equivalence(self):
        for model, inputs in self.each_model():
            wanted = {"output_hidden_states": True, "output_attentions": True}
            by_name, in_order = model(**inputs, **wanted), model(**inputs, **wanted, return_dict=False)
            assert isinstance(in_order, tuple)
            torch.testing.assert_close(in_order, by_name.to_tuple())


class TestBackbones(Common, backbones.BackboneTesterMixin, unittest.TestCase):
    config_class, settings = HfViTConfig, TINY
    all_model_classes = (hf_vit.HfViTBackbone,)
    setUp = Models.setUp


class TestHybridBackbones(Common, backbones.BackboneTesterMixin, unittest.TestCase):
    config_class, settings = HfViTHybridConfig, HYBRID
    all_model_classes = (hf_vit.HfViTHybridBackbone,)
    setUp = Models.setUp


class TestBiTBackbones(Common, backbones.BackboneTesterMixin, unittest.TestCase):
    config_class, settings = HfBiTConfig, BIT
    all_model_classes = (hf_vit.HfBiTBackbone,)
    has_attentions = False
    setUp = Models.setUp


class SmallProcessor(processors.ImageProcessingTester):
    def __init__(self, parent):
        size = {"height": 18, "width": 20}
        super().__init__(parent, min_resolution=30, max_resolution=60, size=size, do_convert_rgb=True)

    def _get_image_processing_classes(self):
        return {"torchvision": HfViTImageProcessor}  # the same as "pil"


class TestImageProcessor(Common, processors.ImageProcessingTestMixin, unittest.TestCase):
    image_processor_tester_class = SmallProcessor

    def test_fast_image_processor_explicit_none_preserved(self):
        """None leaves a setting to the preset."""
        assert HfViTImageProcessor(do_resize=None).to_dict() == HfViTImageProcessor().to_dict()
