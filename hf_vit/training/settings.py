"""Every setting of training and evaluation, declared once, with its help; `options.parse_settings` fills them."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal


def setting(default: Any, about: str, group: str) -> Any:
    """A field of a settings class.

    Args:
        default: a value, or for lists and tables a function that makes one.
        about: what `--help`, the documentation and errors say of it.
        group: the heading in `--help` that it stands under.
    """
    metadata = {"about": about, "group": group}
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


AUTO = "auto"  # of eval_split

_data = partial(setting, group="data")
_run = partial(setting, group="run")
_length = partial(setting, group="length and batches")
_optimizer = partial(setting, group="optimiser")
_schedule = partial(setting, group="learning rate schedule")
_model = partial(setting, group="model")
_augmentation = partial(setting, group="augmentation")
_loss = partial(setting, group="loss")
_report = partial(setting, group="evaluation, checkpoints and reports")
_protocol = partial(setting, group="protocol")


@dataclass
class DataSettings:
    """Where images and labels come from, and on what they are run."""

    dataset: str | None = _data(None, "name on the Hub, folder, parquet or tar file(s), or digits (scikit-learn's)")
    dataset_config: str | None = _data(None, "configuration of a data set on the Hub that has several")
    image_column: str | None = _data(None, "column of the images; by default the only one")
    label_column: str | None = _data(None, "column of the labels; by default the only one")
    streaming: bool = _data(False, "read parquet and tar files where they are; addresses such as s3://... always are")
    num_labels: int | None = _data(None, "classes of labels without names; by default one more than the highest label")
    label_names: str | None = _data(None, "file of the class names, one a line, in the order of their numbers")
    num_workers: int = _data(2, "processes that decode and augment, for each training process")
    image_size: int | list[int] | None = _data(None, "pixels, or [height, width]; by default the model's")
    preset: str | None = _data(
        None,
        "preset of the image processor that evaluates; by default the model's own; native: training keeps shapes too",
    )
    eval_batch_size: int = _run(64, "images of a forward in evaluation, for each process")
    mixed_precision: Literal["no", "bf16", "fp16"] | None = _run(None, "by default what `accelerate launch` says")
    compile: bool = _run(False, "compile the model with torch.compile")
    seed: int = _run(0, "of weights, order and augmentation")
    num_processes: int | None = _run(None, "refuse to run on another number of processes")
    output_dir: str | None = _run(None, "folder of the results")
    print_config: bool = _run(False, "print the resolved settings as a recipe, and end")

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

    train_split: str = _data("train", "split to train on, such as train or train[:98%]")
    eval_split: str | None = _data(None, "split to evaluate on, such as test or train[98%:]; auto: see finetune")
    steps: int | None = _length(None, "optimiser steps; or state epochs")
    epochs: float | None = _length(None, "passes over the training images; or state steps")
    batch_size: int = _length(512, "images of an optimiser step, over all processes and accumulated forwards")
    per_device_batch_size: int | None = _length(None, "images of a forward; by default batch_size / processes")
    find_batch_size: bool = _length(False, "halve per_device_batch_size until a forward fits into memory")
    class_sampling: Literal["natural", "balanced"] = _length(
        "natural", "balanced: each class as often as any other; all images of a class come before one comes again"
    )
    shuffle_buffer: int | None = _length(
        None, "images of shards that are shuffled together; by default 250,000, or 4 GiB where they are held"
    )

    optimizer: Literal["sgd", "adamw", "muon"] = _optimizer(
        "sgd", "sgd has momentum; muon: for the matrices of hidden layers, with adamw for the rest"
    )
    learning_rate: float = _optimizer(0.03, "its highest value, after the warm-up")
    momentum: float = _optimizer(0.9, "of sgd, and of muon, whose author takes 0.95")
    momentum_dtype: Literal["float32", "bfloat16"] = _optimizer(
        "float32", "of the momentum of sgd and the first moment of adamw"
    )
    adam_beta1: float = _optimizer(0.9, "decay of the first moment of adamw")
    adam_beta2: float = _optimizer(0.999, "decay of the second moment of adamw")
    adam_epsilon: float = _optimizer(1e-8, "added to the root of the second moment of adamw")
    weight_decay: float = _optimizer(0.0, "of matmul and convolution kernels only; sgd adds it to the gradient (L2)")
    weight_decay_convention: Literal["torch", "jax"] = _optimizer(
        "torch", "torch multiplies the weight decay of adamw by the learning rate, jax does not"
    )
    max_grad_norm: float | None = _optimizer(1.0, "longest gradient, over all parameters; none: any")
    layer_decay: float | None = _optimizer(None, "learning rate of a layer over that of the next one; by default 1")
    freeze: list[str] = _optimizer(
        list, "what does not train: encoder, embeddings, 'first 6 layers', or regular expressions of parameter names"
    )
    ema_decay: float | None = _optimizer(None, "decay of a moving average of the weights, evaluated and saved")

    schedule: Literal["linear", "cosine", "polynomial", "constant", "rsqrt", "staircase", "wsd"] = _schedule(
        "cosine", "shape after the warm-up; wsd (warm-up, stable, decay): constant, then down in the cooldown_steps"
    )
    warmup_steps: int = _schedule(0, "optimiser steps from 0 to learning_rate")
    decay_steps: list[int] = _schedule(
        list,
        "steps after each of which staircase divides by 10; the step at which linear, cosine and polynomial end, by "
        "default the last",
    )
    decay_factors: list[float] = _schedule(list, "shares of learning_rate that staircase takes at decay_steps instead")
    decay_power: float = _schedule(2.0, "exponent of polynomial")
    timescale: float = _schedule(10_000, "of rsqrt: steps after which the rate is 1 / sqrt(2)")
    timescale_shift: float = _schedule(0, "steps that rsqrt is ahead")
    cooldown_steps: int = _schedule(
        0, "last steps of the run, down to 0, whatever the schedule; of wsd by default a fifth of the run"
    )
    final_learning_rate: float = _schedule(0.0, "at the end of linear, cosine, polynomial and wsd")

    dropout: float | None = _model(None, "rate of dropout; by default what the model's configuration says")
    attention_dropout: float | None = _model(None, "rate of dropout of attention; by default the configuration's")
    drop_path: float | None = _model(None, "rate of stochastic depth in the last layer; by default the configuration's")
    gradient_checkpointing: bool = _model(False, "compute activations again in the backward instead of storing them")
    patch_sizes: list[int] = _model(list, "patch sizes of which one is drawn for each step (FlexiViT)")
    eval_patch_sizes: list[int] = _model(list, "patch sizes to evaluate at; by default patch_sizes")
    patch_size_weights: list[float] = _model(list, "how often each patch size is drawn; by default equally")

    crop: Literal["inception", "random", "resmall", "none"] = _augmentation(
        "inception",
        "inception: of random area and shape; random: after a resize to a rectangle; resmall: after a "
        "resize of the shorter side",
    )
    crop_area: list[float] = _augmentation(lambda: [0.05, 1.0], "least and largest share of the area of crop inception")
    resize: int | list[int] | None = _augmentation(
        None, "pixels before a crop: [height, width]; of resmall the shorter side"
    )
    flip: bool = _augmentation(True, "mirror half of the images")
    randaugment_layers: int = _augmentation(0, "operations of RandAugment on an image")
    randaugment_magnitude: float = _augmentation(0, "strength of RandAugment, of 10")
    mixup_alpha: float = _augmentation(0.0, "parameter of the Beta distribution of mixup; 0: none")
    cutmix_alpha: float = _augmentation(0.0, "parameter of the Beta distribution of CutMix; 0: none")
    antialias: bool = _augmentation(False, "average over pixels where a crop is made smaller; the original does not")
    reduced_decoding: bool = _augmentation(
        False, "decode large JPEGs at 1/2, 1/4 or 1/8 where the crop stays as large as the result"
    )

    token_drop: float = _augmentation(0.0, "share of an image's patches that training drops (NaViT), of preset native")

    loss: Literal["softmax", "sigmoid"] = _loss("softmax", "cross-entropy over classes, or of each class by itself")
    class_weights: Literal["none", "balanced"] = _loss(
        "none", "balanced: a class counts by the inverse of its share of the training images, 1 on average over them"
    )
    label_smoothing: float = _loss(0.0, "share of the target that is spread over all classes")
    head_bias: float | None = _loss(None, "first value of the biases of the head; by default 0")

    log_every: int = _report(10, "optimiser steps between two entries of the log")
    eval_every: int | None = _report(None, "optimiser steps between two evaluations; by default a tenth of the run")
    save_every: int | None = _report(None, "optimiser steps between two checkpoints; by default with every evaluation")
    best_metric: str = _report(
        "auto", "metric of the best evaluation, such as loss or accuracy/cat; auto: accuracy, else loss"
    )
    early_stopping: int | None = _report(None, "end after so many evaluations in a row without a better one")
    keep_checkpoints: int = _report(2, "newest checkpoints that stay")
    resume: bool = _report(False, "go on from the newest checkpoint in output_dir")
    overwrite: bool = _report(False, "delete the run in output_dir first")
    report_to: str = _report("auto", "tensorboard, trackio, wandb or none; auto: tensorboard where it is installed")
    profile: int | None = _report(None, "optimiser steps to trace into output_dir/profile, after a few to warm up")
    stall_timeout: float = _report(
        480, "seconds without progress after which a run ends and names the missing process; 0: never"
    )

    def validate(self) -> None:
        super().validate()
        if not self.print_config and not self.output_dir:
            raise ValueError("no place for the result: set --output-dir, a folder")
        if (self.steps is None) == (self.epochs is None):
            given = "none is" if self.steps is None else f"both are ({self.steps} and {self.epochs})"
            raise ValueError(f"set one of steps and epochs; {given} set. --epochs 10 is a beginning")
        _require_positive(self, "batch_size", "learning_rate", "log_every", "keep_checkpoints", "shuffle_buffer")
        _require_positive(self, "steps", "epochs", "per_device_batch_size", "max_grad_norm", "eval_every", "save_every")
        _require_positive(self, "profile", "early_stopping")
        if self.class_sampling == self.class_weights == "balanced":
            raise ValueError("class_sampling and class_weights both balance, so rare classes count twice: choose one")
        if self.early_stopping and not self.eval_split:
            raise ValueError(f"early_stopping ({self.early_stopping}) counts evaluations, and eval_split is none")
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
        if self.optimizer == "muon" and self.momentum_dtype == "bfloat16":
            raise ValueError("momentum_dtype is bfloat16, and muon keeps its momentum in float32")
        if self.crop in ("random", "resmall") and self.resize is None:
            raise ValueError(f"crop {self.crop} cuts from a resized image: set resize")
        if self.reduced_decoding and self.crop in ("random", "resmall"):
            raise ValueError(f"crop is {self.crop}; reduced_decoding needs crop inception or none")
        if self.crop == "resmall" and isinstance(self.resize, list):
            raise ValueError(f"resize is {self.resize}; crop resmall takes one number, the shorter side")
        self._validate_patch_sizes()
        self._validate_native()
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

    def _validate_native(self) -> None:
        _require_between(self, 0, 0.95, "token_drop")
        if self.preset != "native":
            if self.token_drop:
                raise ValueError(f"token_drop is {self.token_drop}, which needs preset native; preset is {self.preset}")
            return
        wrong = ["mixup_alpha", "cutmix_alpha", "patch_sizes", "eval_patch_sizes", "compile", "reduced_decoding"]
        wrong = [name for name in wrong if getattr(self, name)]
        if self.crop in ("random", "resmall"):
            wrong.append("crop")
        if wrong:
            name = wrong[0]
            raise ValueError(f"{name} is {getattr(self, name)}, which needs images of one size; preset native has many")

    def _validate_schedule(self) -> None:
        _require_positive(self, "decay_power", "timescale")
        none = dict.fromkeys(("constant", "rsqrt", "wsd"), (0, 0))
        fewest, most = {"staircase": (1, math.inf), **none}.get(self.schedule, (0, 1))
        if not fewest <= len(self.decay_steps) <= most:
            raise ValueError(
                f"schedule is {self.schedule} and decay_steps {self.decay_steps}: staircase needs steps, "
                "linear, cosine and polynomial take one, constant, rsqrt and wsd none"
            )
        if self.decay_steps and min(self.decay_steps) <= self.warmup_steps and self.schedule != "staircase":
            raise ValueError(f"decay_steps {self.decay_steps} must be above warmup_steps ({self.warmup_steps})")
        if self.decay_factors and len(self.decay_factors) != len(self.decay_steps):
            raise ValueError(f"decay_factors {self.decay_factors} must be as many as decay_steps {self.decay_steps}")
        if self.final_learning_rate and self.schedule not in ("linear", "cosine", "polynomial", "wsd"):
            raise ValueError(
                f"final_learning_rate ({self.final_learning_rate}) is for linear, cosine, polynomial and wsd, "
                f"and schedule is {self.schedule}"
            )
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate ({self.final_learning_rate}) is above learning_rate ({self.learning_rate})"
            )


@dataclass
class FinetuneSettings(TrainingSettings):
    """Fine-tuning of a model for image classification."""

    eval_split: str | None = _data(
        AUTO,
        "split to evaluate on; auto: validation, val, valid, dev or test, or a tenth of each class of the training "
        "images, which are then not trained on; none: no evaluation",
    )
    model: str | None = _model(None, "name on the Hub, or folder of a saved model")
    keep_pre_logits: bool = _model(False, "replace only the last layer of the head")
    linear_probe: bool = _model(False, "train the head alone")
    lora_rank: int | None = _model(None, "rank of low-rank adapters (PEFT), which train with the head alone")
    lora_alpha: float = _model(16, "scale of the adapters, over their rank")
    lora_target_modules: list[str] = _model(lambda: ["q_proj", "v_proj"], "modules that get adapters")

    def validate(self) -> None:
        super().validate()
        if not self.model and not self.print_config:
            raise ValueError("no model: set --model to a Hub name or a folder")
        if self.linear_probe and self.lora_rank:
            raise ValueError(f"linear_probe freezes what lora_rank ({self.lora_rank}) would adapt: choose one")
        if self.lora_rank and self.optimizer == "muon":
            raise ValueError(f"lora_rank is {self.lora_rank}, and muon is for whole matrices, not adapters: use adamw")
        _require_positive(self, "lora_rank", "lora_alpha")


@dataclass
class PretrainSettings(TrainingSettings):
    """Training from random weights, with labels or by masked patch prediction."""

    objective: Literal["supervised", "masked_patch_prediction"] = _loss("supervised", "what is learnt")
    variant: str | None = _model(None, "released architecture, such as B/16 or R50x1; config says what differs from it")
    config: dict[str, Any] = _model(dict, "fields of HfViTConfig or HfBiTConfig, as a YAML table")
    head: Literal["linear", "mlp"] = _model("linear", "mlp: a tanh layer as wide as the model before the linear one")
    corruption: float = _loss(0.5, "share of the patches that are corrupted, in masked patch prediction")
    mask_share: float = _loss(0.8, "share of the corrupted patches that become the mask token")
    random_patch_share: float = _loss(0.1, "share of the corrupted patches that become another patch of the image")
    target: Literal["mean_color", "downsized", "pixels"] = _loss("mean_color", "what is predicted of a corrupted patch")

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
        if self.objective == "masked_patch_prediction" and self.preset == "native":
            raise ValueError("preset is native, and masked_patch_prediction needs images of one size")
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

    model: str | None = _model(None, "name on the Hub, or folder of a saved model")
    protocol: Protocol = _protocol("accuracy", "how the model is measured")
    split: str | None = _data(None, "split to measure on; by default test, of real validation, of objectnet train")
    patch_size: int | list[int] | None = _model(None, "pixels, or [height, width]; by default the model's")
    overwrite: bool = _report(False, "do not take up features and results that output_dir has")

    label_map: str | None = _data(None, "YAML or JSON: the data's name of a class -> the model's name or number of it")
    real_labels: str | None = _protocol(
        None, 'of real: JSON list of lists of class numbers, one for each image ("Are we done with ImageNet?")'
    )
    objectnet_classes: str | None = _protocol(
        None, "of objectnet: YAML or JSON: folder -> class numbers; by default the 113 published ones"
    )

    train_split: str = _data("train", "split of few_shot, linear_probe and knn that features are learnt from")
    features: Literal["pre_logits", "class_token", "patch_mean"] = _protocol(
        "pre_logits", "what the head sees, or tokens of the last layer"
    )
    feature_layer: int | None = _protocol(None, "take features after so many layers; by default after all of them")
    shots: list[int] = _protocol(lambda: [1, 5, 10, 25], "of few_shot: images of each class")
    seeds: int = _protocol(3, "of few_shot: draws of the images")
    l2_reg: list[float] = _protocol(lambda: [1024.0], "of few_shot: L2 regularisation")
    probe_l2: list[float] = _protocol(
        lambda: [10.0**power for power in range(-6, 2)], "of linear_probe: L2 regularisations to choose from"
    )
    held_out: float = _protocol(0.2, "of linear_probe: share of the training split that chooses among probe_l2")
    neighbors: list[int] = _protocol(lambda: [10, 20], "of knn: how many neighbours vote")
    temperature: float = _protocol(0.07, "of knn: of the neighbours' votes")

    tasks: list[str] = _protocol(list, "of vtab: names of tasks; by default all 19")
    finetune: dict[str, Any] = _protocol(dict, "of vtab: settings of fine-tuning, over those of the paper")
    keep_models: bool = _protocol(False, "of vtab: keep the models that are fine-tuned")

    def validate(self) -> None:
        if self.protocol == "vtab" and self.dataset is None:
            self.dataset = "hub"  # each task has a name there
        super().validate()
        if not self.model and not self.print_config:
            raise ValueError("no model: set --model to a Hub name or a folder")
        if self.protocol == "vtab" and not self.output_dir and not self.print_config:
            raise ValueError("no place for the results of the tasks: set --output-dir, a folder")
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
