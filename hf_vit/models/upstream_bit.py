from .configuration_hf_bit import SHARED_SETTINGS as SHARED_SETTINGS
from .configuration_hf_bit import is_upstream_bit as is_upstream_bit
from .configuration_hf_bit import translate_bit_settings as translate_bit_settings

# Our names -> those of its classes in memory, by their beginnings.
BEGINNINGS = {
    "resnet.stages.": "encoder.stages.",
    "resnet.": "embedder.",
    "classifier.": "classifier.1.",
}
