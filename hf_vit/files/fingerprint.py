"""The fingerprint of a model's weights and settings."""

import hashlib
import json
from itertools import chain
from typing import Any

import torch

# Fields of a configuration that change no output, besides those that begin with "_".
_NOT_COMPUTED = ("dtype", "torch_dtype", "id2label", "label2id", "architectures", "transformers_version")

# Fields that are newer than stored fingerprints, with the value that changes nothing.
_NEWER = {
    "no_embed_class": False,
    "reshape_hidden_states": True,
    "apply_layernorm": True,
    "head_init": "zeros",
}


def fingerprint_weights(model: Any) -> str:
    """Return the SHA-256 of a model's weights and settings, which does not depend on class names and loading.

    Of a program (`hf_vit.runtimes.ProgramModel`) it is that of the model from which the program was made, which the
    program keeps.
    """
    kept = getattr(model, "fingerprint", None)
    if kept is not None:
        return kept
    settings = model.config.to_diff_dict()
    for name in list(settings):
        is_new_default = name in _NEWER and settings[name] == _NEWER[name]
        if name in _NOT_COMPUTED or name.startswith("_") or is_new_default:
            del settings[name]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in chain(model.state_dict().items(), model.named_buffers()):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(f"{hashlib.sha256(flat.numpy()).hexdigest()}\n".encode())
    return digest.hexdigest()
