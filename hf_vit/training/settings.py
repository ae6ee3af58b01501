"""Every setting of training and evaluation, declared once; `recipes.parse_settings` fills them."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class DataSettings:
    """Where images and labels come from, and on what they are run."""

    dataset: str | None = None  # Hub name, folder, parquet or tar file(s), or "digits" (scikit-learn's)
    dataset_config: str | None = None
    image_column: str | None = None  # by default the one column of images
    label_column: str | None = None  # by default the one column of class labels
    streaming: bool = False  # read parquet and tar files where they are; addresses such as s3://... always are
    num_labels: int | None = None  # classes of labels without names; by default one more than the highest
    label_names: str | None = None  # file of the classes' names, one a line, in the order of their numbers
    num_workers: int = 2  # processes that decode and augment, per training process
    image_size: int | list[int] | None = None  # pixels, or [height, width]; by default the model's
    preset: str | None = None  # of the image processor that evaluates and is saved; by default the model's own
    eval_batch_size: int = 64  # images per process and forward
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None  # by default what `accelerate launch` says
    compile: bool = False
    seed: int = 0
    num_processes: int | None = None  # refuse to run with another number
    output_dir: str | None = None
    print_config: bool = False

    def validate(self) -> None:
        """Raise ValueError for settings that contradict each other or that no value can satisfy."""
        if not self.dataset and not self.print_config:
            raise ValueError("no data: set --dataset to a Hub name, a folder, a file or digits")
        if "://" in (self.dataset or ""):
            self.streaming = True
        _require_positive(self, "eval_batch_size", "num_labels")
        _require_between(self, 0, None, "num_workers")


@dataclass
class TrainingSettings(DataSettings):
    """What fine-tuning and pre-training share."""

    train_split: str = "train"
    eval_split: str | None = None  # such as "test" or "train[98%:]"
    steps: int | None = None  # optimiser steps
    epochs: float | None = None  # instead of steps
    batch_size: int = 512  # images per optimiser step, over all processes and accumulated forwards
    shuffle_buffer: int | None = None  # images of shards shuffled together; by default 250,000, or 4 GiB if held
    per_device_batch_size: int | None = None  # images per forward; by default batch_size / processes
    find_batch_size: bool = False  # halve per_device_batch_size until it fits into memory

    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.03
    momentum: float = 0.9
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"  # of sgd's momentum, of adamw's first moment
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0  # of matmul and convolution kernels only; sgd adds it to the gradient (L2)
    weight_decay_convention: Literal["torch", "jax"] = "torch"  # torch multiplies it by the learning rate
    schedule: Literal["linear", "cosine", "polynomial", "constant", "rsqrt", "staircase"] = "cosine"
    # After each of these, staircase divides by 10; linear, cosine and polynomial end at the one given, or with the run.
    decay_steps: list[int] = field(default_factory=list)
    decay_factors: list[float] = field(default_factory=list)  # or takes these shares of learning_rate
    decay_power: float = 2.0  # of polynomial
    timescale: float = 10_000  # of rsqrt: steps after which the rate is 1 / sqrt(2)
    timescale_shift: float = 0  # steps that rsqrt is ahead
    warmup_steps: int = 0
    cooldown_steps: int = 0  # the last of the run, down to 0, whatever the schedule
    final_learning_rate: float = 0.0
    max_grad_norm: float | None = 1.0
    layer_decay: float | None = None  # learning rate of each layer over that of the next one
    freeze: list[str] = field(default_factory=list)  # patterns that parameter names are searched for
    ema_decay: float | None = None  # Polyak averaging; the average is evaluated and saved

    dropout: float | None = None  # these three: by default what the model's configuration says
    attention_dropout: float | None = None
    drop_path: float | None = None
    gradient_checkpointing: bool = False
    patch_sizes: list[int] = field(default_factory=list)  # one is drawn for each step (FlexiViT)
    eval_patch_sizes: list[int] = field(default_factory=list)  # by default patch_sizes
    patch_size_weights: list[float] = field(default_factory=list)  # how often each; by default equally

    crop: Literal["inception", "random", "resmall", "none"] = "inception"  # random distorts, resmall does not
    crop_area: list[float] = field(default_factory=lambda: [0.05, 1.0])
    resize: int | list[int] | None = None  # pixels before a crop: [height, width]; of resmall the shorter side
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: float = 0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    antialias: bool = False
    reduced_decoding: bool = False  # decode large JPEGs at 1/2, 1/4 or 1/8 where the crop stays as large as the result

    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = 0.0
    head_bias: float | None = None

    log_every: int = 10  # optimiser steps
    eval_every: int | None = None  # by default ten times per run
    save_every: int | None = None  # by default with every evaluation
    keep_checkpoints: int = 2
    resume: bool = False
    overwrite: bool = False
    report_to: str = "auto"  # tensorboard when it is installed; tensorboard, trackio, wandb, or none
    profile: int | None = None  # trace so many optimiser steps, after a few to warm up, into output_dir/profile
    stall_timeout: float = 480  # seconds without progress until a run ends, naming the missing process; 0: never

    def validate(self) -> None:
        super().validate()
        if not self.print_config and not self.output_dir:
            raise ValueError("no place for the result: set --output_dir")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"set one of steps and epochs; they are {self.steps} and {self.epochs}")
        _require_positive(self, "batch_size", "learning_rate", "log_every", "keep_checkpoints", "shuffle_buffer")
        _require_positive(self, "steps", "epochs", "per_device_batch_size", "max_grad_norm", "eval_every", "save_every")
        _require_positive(self, "profile")
        _require_between(self, 0, 1, "label_smoothing", "ema_decay", "momentum", "dropout", "attention_dropout")
        _require_between(self, 0, 1, "drop_path", "layer_decay", "adam_beta1", "adam_beta2", "final_learning_rate")
        _require_between(self, 0, None, "warmup_steps", "weight_decay", "mixup_alpha", "cutmix_alpha")
        _require_between(self, 0, None, "cooldown_steps", "timescale_shift", "stall_timeout")
        _require_between(self, 0, None, "randaugment_layers", "randaugment_magnitude")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be less than steps ({self.steps})")
        self._validate_schedule()
        if self.optimizer == "sgd" and self.weight_decay and self.momentum_dtype == "bfloat16":
            raise ValueError(
                f"weight_decay ({self.weight_decay}) of sgd needs momentum_dtype float32: BiT's, not ViT's"
            )
        if self.crop in ("random", "resmall") and self.resize is None:
            raise ValueError(f"crop {self.crop} cuts from a resized image: set resize")
        if self.reduced_decoding and self.crop in ("random", "resmall"):
            raise ValueError(f"crop is {self.crop}; reduced_decoding needs crop inception or none")
        if self.crop == "resmall" and isinstance(self.resize, list):
            raise ValueError(f"resize is {self.resize}; crop resmall takes one number, the shorter side")
        self._validate_patch_sizes()
        if self.resume and self.overwrite:
            raise ValueError("resume continues a run and overwrite deletes it: choose one")

    def _validate_patch_sizes(self) -> None:
        for name in ("patch_sizes", "eval_patch_sizes"):
            if getattr(self, name):
                _require_all_positive(self, name)
        weights = self.patch_size_weights
        if weights and (len(weights) != len(self.patch_sizes) or min(weights) < 0 or not sum(weights)):
            raise ValueError(
                f"patch_size_weights is {weights}; it must have {len(self.patch_sizes)} numbers, one for each of "
                "patch_sizes, none below 0 and one above"
            )

    def _validate_schedule(self) -> None:
        _require_positive(self, "decay_power", "timescale")
        fewest, most = {"staircase": (1, math.inf), "constant": (0, 0), "rsqrt": (0, 0)}.get(self.schedule, (0, 1))
        if not fewest <= len(self.decay_steps) <= most:
            raise ValueError(
                f"schedule is {self.schedule} and decay_steps {self.decay_steps}: staircase needs steps, "
                "linear, cosine and polynomial take one, constant and rsqrt none"
            )
        if self.decay_steps and min(self.decay_steps) <= self.warmup_steps and self.schedule != "staircase":
            raise ValueError(f"decay_steps {self.decay_steps} must be above warmup_steps ({self.warmup_steps})")
        if self.decay_factors and len(self.decay_factors) != len(self.decay_steps):
            raise ValueError(f"decay_factors {self.decay_factors} must be as many as decay_steps {self.decay_steps}")
        if self.final_learning_rate and self.schedule not in ("linear", "cosine", "polynomial"):
            raise ValueError(
                f"final_learning_rate ({self.final_learning_rate}) is for linear, cosine and polynomial, "
                f"and schedule is {self.schedule}"
            )
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate ({self.final_learning_rate}) is above learning_rate ({self.learning_rate})"
            )


@dataclass
class FinetuneSettings(TrainingSettings):
    """Fine-tuning of a model for image classification."""

    model: str | None = None  # Hub name or folder
    keep_pre_logits: bool = False  # replace the last layer of the head alone
    linear_probe: bool = False  # train the head alone
    lora_rank: int | None = None  # train low-rank adapters (PEFT) and the head
    lora_alpha: float = 16
    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])

    def validate(self) -> None:
        super().validate()
        if not self.model and not self.print_config:
            raise ValueError("no model: set --model to a Hub name or a folder")
        if self.linear_probe and self.lora_rank:
            raise ValueError(f"linear_probe freezes what lora_rank ({self.lora_rank}) would adapt: choose one")
        _require_positive(self, "lora_rank", "lora_alpha")


@dataclass
class PretrainSettings(TrainingSettings):
    """Training from random weights, with labels or by masked patch prediction."""

    objective: Literal["supervised", "masked_patch_prediction"] = "supervised"
    variant: str | None = None  # such as B/16 or R50x1; with `config` for whatever differs from it
    config: dict[str, Any] = field(default_factory=dict)  # fields of HfViTConfig or HfBiTConfig
    head: Literal["linear", "mlp"] = "linear"  # mlp: a tanh layer as wide as the model before the linear one
    corruption: float = 0.5  # share of patches; the next two are shares of these
    mask_share: float = 0.8
    random_patch_share: float = 0.1
    target: Literal["mean_color", "downsized", "pixels"] = "mean_color"

    def validate(self) -> None:
        super().validate()
        if not self.variant and not self.config and not self.print_config:
            raise ValueError("no architecture: set variant (such as B/16), or config, or both")
        if self.head == "mlp" and self.config.get("representation_size"):
            raise ValueError("head mlp and representation_size of config both make a tanh layer: choose one")
        _require_between(self, 0, 1, "corruption", "mask_share", "random_patch_share")
        if self.mask_share + self.random_patch_share > 1:
            raise ValueError(
                f"mask_share ({self.mask_share}) and random_patch_share ({self.random_patch_share}) exceed 1 together"
            )
        if self.objective == "masked_patch_prediction" and (sizes := self.patch_sizes or self.eval_patch_sizes):
            raise ValueError(f"patch_sizes is {sizes}, and masked_patch_prediction has one patch size")
        if self.objective == "masked_patch_prediction" and self.head == "mlp":
            raise ValueError("head is mlp, and masked_patch_prediction has no head")
        if self.objective == "masked_patch_prediction" and (self.mixup_alpha or self.cutmix_alpha):
            raise ValueError("mixup_alpha and cutmix_alpha mix labels, which masked_patch_prediction does not use")


Protocol = Literal["accuracy", "real", "objectnet", "few_shot", "linear_probe", "knn", "vtab"]


@dataclass
class EvaluateSettings(DataSettings):
    """Evaluation of a saved model; `protocol` says how."""

    model: str | None = None
    protocol: Protocol = "accuracy"
    split: str | None = None  # by default test; of real validation; of objectnet train
    patch_size: int | list[int] | None = None  # [height, width]; by default the model's
    overwrite: bool = False  # do not take up features and results that output_dir has

    label_map: str | None = None  # YAML or JSON: the data's name of a class -> the model's name or number of it
    real_labels: str | None = None  # JSON list of lists of class numbers, one per image ("Are we done with ImageNet?")
    objectnet_classes: str | None = None  # YAML or JSON: ObjectNet's folder -> class numbers; by default the 113

    train_split: str = "train"  # of few_shot, linear_probe and knn
    features: Literal["pre_logits", "class_token", "patch_mean"] = "pre_logits"  # what the head sees, or tokens
    feature_layer: int | None = None  # features after so many layers; by default after all of them
    shots: list[int] = field(default_factory=lambda: [1, 5, 10, 25])  # images per class
    seeds: int = 3  # draws of them
    l2_reg: list[float] = field(default_factory=lambda: [1024.0])  # of few_shot
    probe_l2: list[float] = field(default_factory=lambda: [10.0**power for power in range(-6, 2)])
    held_out: float = 0.2  # share of the training split that chooses among probe_l2
    neighbors: list[int] = field(default_factory=lambda: [10, 20])
    temperature: float = 0.07  # of the neighbours' votes

    tasks: list[str] = field(default_factory=list)  # of vtab; by default all 19
    finetune: dict[str, Any] = field(default_factory=dict)  # settings of fine-tuning, over those of the paper
    keep_models: bool = False  # those that vtab fine-tunes

    def validate(self) -> None:
        if self.protocol == "vtab" and self.dataset is None:
            self.dataset = "hub"  # each task has a name there
        super().validate()
        if not self.model and not self.print_config:
            raise ValueError("no model: set --model to a Hub name or a folder")
        if self.protocol == "vtab" and not self.output_dir and not self.print_config:
            raise ValueError("no place for the results of the tasks: set --output_dir")
        if self.patch_size is not None and self.protocol == "vtab":
            raise ValueError(f"patch_size is {self.patch_size}, and vtab fine-tunes models at the size they have")
        if self.label_map and self.protocol not in ("accuracy", "real"):
            raise ValueError(f"label_map is for a classifier's own classes, which protocol {self.protocol} lacks")
        if self.protocol in ("few_shot", "linear_probe", "knn", "objectnet") and self.streaming:
            raise ValueError(f"{self.protocol} chooses images, which streaming does not allow")
        for name in ("shots", "l2_reg", "probe_l2", "neighbors"):
            _require_all_positive(self, name)
        _require_positive(self, "seeds", "temperature", "feature_layer", "held_out")
        _require_between(self, 0, 0.9, "held_out")


def _require_all_positive(settings: DataSettings, name: str) -> None:
    """Raise ValueError when a list is empty or has an entry that is not above zero."""
    values = getattr(settings, name)
    if not values or min(values) <= 0:
        raise ValueError(f"{name} is {values}; it must have entries, all above 0")


def _require_positive(settings: DataSettings, *names: str) -> None:
    """Raise ValueError naming the first of these settings that is set and not above zero."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}; it must be above 0")


def _require_between(settings: DataSettings, low: float, high: float | None, *names: str) -> None:
    """Raise ValueError naming the first of these settings that is set and outside [low, high]."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and (value < low or (high is not None and value > high)):
            raise ValueError(f"{name} is {value}; it must be at least {low}" + (f" and at most {high}" if high else ""))
