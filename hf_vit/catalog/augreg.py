"""Grammar of the file names of "How to train your ViT?" (AugReg, arXiv 2106.10270)."""

import re
from typing import NamedTuple

AUGREG = "gs://vit_models/augreg"
INDEX = f"{AUGREG}/index.csv"
# Architectures: name in file names -> name in the paper's tables
AUGREG_MODELS = {
    "Ti_16": "Ti/16",
    "S_32": "S/32",
    "S_16": "S/16",
    "B_32": "B/32",
    "B_16": "B/16",
    "B_8": "B/8",
    "L_16": "L/16",
    "R_Ti_16": "R+Ti/16",
    "R26_S_32": "R26+S/32",
    "R50_L_32": "R50+L/32",
}
# Token of the file name -> (name in arXiv 2106.10270, RandAugment layers, magnitude, mixup alpha). The files say light0
# and light1, the paper says light1 and light2. This correspondence is inferred from the recommended files and from
# big_vision's defaults.
AUGMENTATION = {
    "none": ("none", 0, 0, 0.0),
    "light0": ("light1", 2, 0, 0.0),
    "light1": ("light2", 2, 10, 0.2),
    "medium1": ("medium1", 2, 15, 0.2),
    "medium2": ("medium2", 2, 15, 0.5),
    "strong1": ("strong1", 2, 20, 0.5),
    "strong2": ("strong2", 2, 20, 0.8),
}
PRETRAINED_ON = {"i1k": "imagenet-1k", "i21k": "imagenet-21k"}
# Data set in the file name -> its key in released.yaml
ADAPTED_TO = {
    "imagenet2012": "imagenet-1k",
    "cifar100": "cifar100",
    "kitti": "kitti",
    "oxford_iiit_pet": "oxford-iiit-pet",
    "resisc45": "resisc45",
}
# Token of the file name -> (steps, steps of warm-up); arXiv 2106.10270, section 3.4
_STEPS = {"0k": (500, 100), "2k": (2_500, 200), "10k": (10_000, 500), "20k": (20_000, 500)}

_GRAMMAR = re.compile(
    rf"(?P<model>{'|'.join(AUGREG_MODELS)})-(?P<data>i1k|i21k)-(?P<epochs>300|30)ep-lr_(?P<learning_rate>[0-9.]+)"
    rf"-aug_(?P<augmentation>{'|'.join(AUGMENTATION)})-wd_(?P<weight_decay>0\.1|0\.03)"
    r"-do_(?P<dropout>0\.0|0\.1)-sd_(?P<stochastic_depth>0\.0|0\.1)"
    rf"(?:--(?P<adapted_to>{'|'.join(ADAPTED_TO)})-steps_(?P<steps>{'|'.join(_STEPS)})"
    r"-lr_(?P<adapted_learning_rate>[0-9.]+)-res_(?P<resolution>224|384))?"
)


class AugRegName(NamedTuple):
    """Fields of an AugReg file name, as text; the last four are None for a model without fine-tuning."""

    model: str
    data: str
    epochs: str
    learning_rate: str
    augmentation: str
    weight_decay: str
    dropout: str
    stochastic_depth: str
    adapted_to: str | None
    steps: str | None
    adapted_learning_rate: str | None
    resolution: str | None


def parse_augreg(name: str) -> AugRegName | None:
    """Parse the name of an AugReg file, without `.npz`; return None for any other name."""
    match = _GRAMMAR.fullmatch(name)
    return None if match is None else AugRegName(**match.groupdict())


def augreg_hyper_parameters(name: AugRegName) -> dict[str, str]:
    """Return the settings of the training run, under the names that a model card uses."""
    paper, layers, magnitude, alpha = AUGMENTATION[name.augmentation]
    rows = {
        "optimizer": "Adam, beta1 0.9, beta2 0.999, gradients clipped at global norm 1",
        "batch size": "4096",
        "epochs": name.epochs,
        "learning rate": f"{name.learning_rate}, warm-up over 10,000 steps, then cosine decay",
        "weight decay": f"{name.weight_decay}, decoupled and multiplied by the learning rate",
        "dropout": "none" if name.dropout == "0.0" else name.dropout,
        "stochastic depth": "none"
        if name.stochastic_depth == "0.0"
        else f"{name.stochastic_depth} in the last layer, growing linearly from 0 in the first",
        "augmentation": f"inception crop, flip, and `aug_{name.augmentation}`: RandAugment with {layers} layers of "
        f"magnitude {magnitude}, mixup {alpha:g} ({paper} in the paper; this match of names is inferred)",
    }
    if name.adapted_to is not None and name.steps is not None:
        steps, warm_up = _STEPS[name.steps]
        rows["fine-tuning"] = (
            f"SGD, momentum 0.9, batch size 512, learning rate {name.adapted_learning_rate}, {steps:,} steps "
            f"(`steps_{name.steps}` in the file's name) with {warm_up} of warm-up, cosine decay, "
            f"{name.resolution} x {name.resolution} pixels"
        )
    return rows | {"source": "the file's name, and arXiv 2106.10270, section 3"}
