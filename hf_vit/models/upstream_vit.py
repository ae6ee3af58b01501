from .configuration_hf_vit import SHARED_SETTINGS as SHARED_SETTINGS
from .configuration_hf_vit import is_upstream as is_upstream
from .configuration_hf_vit import translate_settings as translate_settings
