"""All settings of training and evaluation, each declared once with its help text."""

import dataclasses
import operator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal


def setting(
    default: Any,
    about: str,
    group: str = "",
    is_path: bool = False,
    everyday: bool = False,
    protocols: tuple[str, ...] = (),
    in_steps: bool = False,
    in_recipe: bool = True,
    free_on_resume: bool = False,
    **bounds: float,
) -> Any:
    """Declare a field of a settings class.

    Args:
        default: the value; for lists and tables a function that returns it.
        about: help text, in `--help` and in the documentation.
        group: heading in `--help`.
        is_path: the value may be a file or folder, which is read.
        everyday: most runs need it, so that `--help` describes it; `--help all` describes all settings.
        protocols: the only protocols of evaluation that use it; with another one it must have its default.
        in_steps: only training in steps uses it, not a head in closed form.
        in_recipe: `--print-config` prints it.
        free_on_resume: it does not affect the weights, so a resumed run may change it.
        bounds: `above`, `at_least`, `below` and `at_most`, the limits of a number or of every number of a list.
    """
    default = {"default_factory" if callable(default) else "default": default}
    metadata = {
        "about": about,
        "group": group,
        "is_path": is_path,
        "everyday": everyday,
        "protocols": protocols,
        "in_steps": in_steps,
        "in_recipe": in_recipe,
        "free_on_resume": free_on_resume,
        "bounds": bounds,
    }
    return field(**default, metadata=metadata)


def fields_with(mark: str, settings: Any) -> list[str]:
    """Return the names of those fields of settings, or of their class, that are declared with a mark: `is_path`, ..."""
    return [one.name for one in dataclasses.fields(settings) if one.metadata.get(mark)]


def paths_of(settings: Any) -> list[str]:
    """Return the files and folders, or other names in their place, that the settings say to read."""
    values = [getattr(settings, name) for name in fields_with("is_path", settings)]
    return [value for value in values if value not in (None, "digits")]  # scikit-learn's


def check_bounds(settings: Any) -> None:
    """Raise ValueError for the first field that is set and outside its bounds."""
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        bounds = one.metadata.get("bounds", {})
        if value in (None, AUTO):
            continue
        numbers = value if isinstance(value, list) else [value]
        if not all(_HOLDS[bound](number, limit) for number in numbers for bound, limit in bounds.items()):
            allowed = " and ".join(f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items())
            raise ValueError(f"{one.name} is {value}; it must be {allowed}")


AUTO = "auto"  # a value of several settings
REGRESSION_LOSSES = ("mse", "huber")
# Settings of augmentation that `views` uses.
_OF_VIEWS = ("crop", "crop_area", "resize", "flip", "randaugment_layers", "randaugment_magnitude", "antialias")
_OF_VIEWS += ("reduced_decoding",)
_HOLDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}

_data = partial(setting, group="data")
_run = partial(setting, group="run")
_length = partial(setting, group="length and batches", in_steps=True)
_optimizer = partial(setting, group="optimizer", in_steps=True)
_schedule = partial(setting, group="learning rate schedule", in_steps=True)
_model = partial(setting, group="model")
_augment = partial(setting, group="augmentation", in_steps=True)
_loss = partial(setting, group="loss")
_report = partial(setting, group="evaluation, checkpoints and reports")
_masked = partial(setting, group="masked patch prediction")
_protocol = partial(setting, group="protocol")
_hub = partial(setting, group="Hub and Jobs")

Backend = Literal["auto", "eager", "torch", "openvino", "onnxruntime", "int8"]


def next_run_folder() -> str:
    """Return the first of the folders runs/1, runs/2, ... that does not exist."""
    number = 1
    while Path("runs", str(number)).exists():
        number += 1
    return str(Path("runs", str(number)))


@dataclass
class HubOptions:
    """Where a command runs, and where its result goes; options of the command line only."""

    push: str | None = _hub(
        None,
        "Hub repository to push to at the end: finetune and pretrain push the model; audit and evaluate push their "
        "results as a dataset",
    )
    job: str | None = _hub(None, "run on Hugging Face Jobs, on hardware such as a10g-small; needs --push and --package")
    package: str | None = _hub(None, "for --job: pip requirement of hf_vit: the URL of a wheel, or git+https://...")
    timeout: str = _hub("6h", "for --job: time limit, such as 90m")
    dry_run: bool = _hub(False, "for --job: check the settings, data and model, but start nothing")

    def validate(self) -> None:
        """Raise ValueError if an option needs another one."""
        if self.job is None and (self.dry_run or self.package is not None):
            raise ValueError("--dry-run and --package need --job")


@dataclass
class DataSettings:
    """Data, device and output of a run."""

    words: ClassVar[tuple[str, ...]] = ("model", "dataset", "output_dir")  # settings that a command takes as words
    example: ClassVar[str] = ""  # the beginning of the command's help

    dataset: str | None = _data(
        None,
        "dataset: Hub name, folder, parquet or tar file(s), or digits (scikit-learn's)",
        is_path=True,
        everyday=True,
    )
    dataset_config: str | None = _data(None, "configuration of a Hub dataset that has several")
    image_column: str | None = _data(None, "name of the image column; by default the only column of images")
    label_column: str | None = _data(
        None, "name of the label column; by default the only column of labels; for a regression, one or several (A,B)"
    )
    layout: Literal["class", "split/class"] | None = _data(
        None,
        "what the folders at the top are, where names can be read in two ways: class (no name is a split) or "
        "split/class (each is a split); by default found",
    )
    streaming: bool = _data(False, "read parquet and tar files without copying them; always on for URLs")
    num_labels: int | None = _data(None, "number of classes, for labels without names; by default counted", above=0)
    label_names: str | None = _data(
        None, "text file of the class names, one per line, in the order of their numbers", is_path=True
    )
    exclude: str | None = _data(
        None, "images to leave out: issues.csv of `hf-vit audit`, or a CSV with a column image", is_path=True
    )
    relabel: str | None = _data(
        None, "labels to set: issues.csv, or a CSV with the columns image and suggested", is_path=True
    )
    num_workers: int | Literal["auto"] = _data(
        AUTO,
        "data workers (decoding, augmentation) per process; auto: one fewer than the process has CPUs, from 1 to 16",
        at_least=0,
        free_on_resume=True,
    )
    image_size: int | list[int] | None = _data(
        None, "image size in pixels, N or HxW; by default the model's", everyday=True
    )
    preset: str | None = _data(
        None,
        "preprocessing preset; by default the model's. Training applies it to evaluation images, and native also to "
        "training images",
    )
    eval_batch_size: int = _run(64, "images per forward and process in evaluation", above=0, free_on_resume=True)
    mixed_precision: Literal["no", "bf16", "fp16"] | None = _run(
        None, "precision of the forward and backward pass; by default that of `accelerate launch`"
    )
    compile: bool | Literal["auto"] = _run(
        AUTO,
        "compile the model with torch.compile; auto: only for training of 1,000 or more steps on a CUDA device",
        in_steps=True,
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = _run(
        "default", "mode of torch.compile", in_steps=True
    )
    deterministic: bool = _run(
        False, "make runs on a GPU bit-reproducible; an operation without a deterministic implementation is an error"
    )
    tf32: bool = _run(False, "use TensorFloat-32 for float32 matrix products on NVIDIA GPUs")
    cudnn_benchmark: bool = _run(False, "let cuDNN choose the fastest convolution algorithm by timing, for ResNets")
    seed: int = _run(0, "random seed of weights, sample order and augmentation", at_least=0)
    num_processes: int | None = _run(
        None, "required number of processes; any other number is an error", free_on_resume=True
    )
    output_dir: str | None = _run(
        None,
        "folder of the results; training writes to runs/1, runs/2, ... by default",
        everyday=True,
        free_on_resume=True,
    )
    print_config: bool = _run(
        False, "print the resolved settings as a recipe, then exit", free_on_resume=True, in_recipe=False
    )

    def validate(self) -> None:
        """Raise ValueError for a setting that is out of range or contradicts another one."""
        check_bounds(self)
        if "://" in (self.dataset or ""):
            self.streaming = True
        if not self.dataset and not self.print_config and not getattr(self, "remove", None):
            raise ValueError("no data: set --dataset to a Hub name, a folder, a file or digits")
        if not getattr(self, "model", "of a variant") and not self.print_config:
            raise ValueError("no model: set --model to a Hub name or a folder")
        if self.deterministic and self.cudnn_benchmark:
            raise ValueError("deterministic excludes cudnn_benchmark: choose one")

    def unused_fields(self) -> list[str]:
        """Return the names of the fields that other settings make useless."""
        return []

    def changed(self, names: str) -> list[str]:
        """Return those of the named fields that differ from their defaults."""
        defaults = type(self)()
        return [name for name in names.split() if getattr(self, name) != getattr(defaults, name)]


@dataclass
class TrainingSettings(DataSettings):
    """Settings of both fine-tuning and pre-training."""

    train_split: str = _data("train", "split to train on, such as train")
    eval_split: str | None = _data(
        None,
        "split to evaluate on, such as test; auto: a held-out split, or eval_fraction of train_split; by default no "
        "evaluation",
    )
    eval_fraction: float = _data(
        0.1,
        "share of the training images of each class that eval_split auto holds out, at least one of two; drawn with a "
        "fixed seed",
        above=0,
        below=1,
    )
    prefetch_factor: int = _data(
        4, "batches that each data worker loads ahead in training", above=0, in_steps=True, free_on_resume=True
    )
    steps: int | None = _length(
        None, "length of the run in optimizer steps; set this or epochs", everyday=True, above=0
    )
    epochs: float | None = _length(
        None, "length in passes over the training images; set this or steps", everyday=True, above=0
    )
    batch_size: int = _length(
        512, "images per optimizer step, over all processes and accumulation steps", everyday=True, above=0
    )
    per_device_batch_size: int | None = _length(
        None, "images per forward; by default batch_size / processes", above=0, free_on_resume=True
    )
    find_batch_size: bool = _length(
        False, "reduce per_device_batch_size until forward and backward fit into memory", free_on_resume=True
    )
    class_sampling: Literal["natural", "balanced"] = _length(
        "natural", "balanced: draw each class equally often; every image of a class is drawn before one repeats"
    )
    shuffle_buffer: int | None = _length(
        None, "images of shards that are shuffled together; by default 250,000, or as many as fit into 4 GiB", above=0
    )

    optimizer: Literal["sgd", "adamw", "muon"] = _optimizer(
        "sgd", "sgd has momentum; muon trains the matrices of hidden layers, and adamw the rest"
    )
    learning_rate: float = _optimizer(0.03, "peak learning rate, reached after the warm-up", everyday=True, above=0)
    momentum: float = _optimizer(0.9, "momentum of sgd and of muon (0.95 is usual for muon)", at_least=0, below=1)
    momentum_dtype: Literal["float32", "bfloat16"] = _optimizer(
        "float32", "data type of the momentum of sgd and the first moment of adamw"
    )
    adam_beta1: float = _optimizer(0.9, "decay of the first moment of adamw", at_least=0, below=1)
    adam_beta2: float = _optimizer(0.999, "decay of the second moment of adamw", at_least=0, below=1)
    adam_epsilon: float = _optimizer(1e-8, "epsilon of adamw, added to the root of the second moment")
    weight_decay: float = _optimizer(
        0.0, "weight decay of matmul and convolution kernels; see weight_decay_convention", at_least=0
    )
    weight_decay_convention: Literal["torch", "jax"] = _optimizer(
        "torch",
        "what a step takes off a weight; torch: weight_decay times the layer's learning rate (sgd adds it to the "
        "gradient, so the momentum holds it too); jax (big_vision): weight_decay times the learning rate divided by "
        "its peak, the same for every layer and outside the momentum of every optimizer",
    )
    max_grad_norm: float | None = _optimizer(
        1.0, "clip the global gradient norm to this value; none: no clipping", above=0
    )
    layer_decay: float | None = _optimizer(
        None,
        "layer-wise decay: a layer's learning rate divided by the next layer's; by default 1. With "
        "weight_decay_convention torch, the weight decay of early layers shrinks alike; with jax it does not",
        above=0,
        at_most=1,
    )
    freeze: list[str] = _optimizer(
        list, "parameters to freeze: encoder, embeddings, 'first 6 layers', or regular expressions of their names"
    )
    ema_decay: float | None = _optimizer(
        None, "decay of a moving average of the weights, which is evaluated and saved", at_least=0, below=1
    )

    schedule: Literal["linear", "cosine", "polynomial", "constant", "rsqrt", "staircase", "wsd"] = _schedule(
        "cosine", "learning rate after the warm-up; wsd (warm-up, stable, decay): decays in the last cooldown_steps"
    )
    warmup_steps: int | float = _schedule(
        0, "optimizer steps of the linear warm-up from 0; below 1: a fraction of the run, rounded down", at_least=0
    )
    decay_steps: list[int] = _schedule(
        list, "staircase: steps after which decay_factors apply; linear, cosine, polynomial: the end of the decay"
    )
    decay_factors: list[float] = _schedule(
        list, "staircase: factor of learning_rate after each of decay_steps; by default 0.1, 0.01, ..."
    )
    decay_power: float = _schedule(2.0, "exponent of the polynomial schedule", above=0)
    timescale: float = _schedule(10_000, "rsqrt: steps until the rate is learning_rate / sqrt(2)", above=0)
    timescale_shift: float = _schedule(0, "rsqrt: offset on the curve, in steps", at_least=0)
    cooldown_steps: int = _schedule(
        0,
        "steps of the linear cool-down to 0 at the end; wsd: steps of the decay (1 - sqrt, to final_learning_rate), by "
        "default a fifth of the run",
        at_least=0,
    )
    final_learning_rate: float = _schedule(0.0, "last rate of linear, cosine, polynomial, wsd", at_least=0, at_most=1)

    dropout: float | None = _model(
        None, "dropout rate; by default the configuration's", at_least=0, below=1, in_steps=True
    )
    attention_dropout: float | None = _model(
        None,
        "dropout rate of attention probabilities; by default the configuration's",
        at_least=0,
        below=1,
        in_steps=True,
    )
    drop_path: float | None = _model(
        None,
        "stochastic depth rate of the last layer; by default the configuration's",
        at_least=0,
        below=1,
        in_steps=True,
    )
    gradient_checkpointing: bool = _model(
        False, "recompute activations in the backward pass to save memory", in_steps=True
    )
    patch_sizes: list[int] = _model(
        list, "train at several patch sizes, one drawn per step (FlexiViT)", above=0, in_steps=True
    )
    eval_patch_sizes: list[int] = _model(
        list, "patch sizes to evaluate at; by default patch_sizes", above=0, in_steps=True
    )
    patch_size_weights: list[float] = _model(
        list, "relative frequency of each of patch_sizes; by default equal", in_steps=True
    )

    crop: Literal["inception", "random", "resmall", "none"] = _augment(
        "inception",
        "training crop; inception: random area and shape; random: after a resize to a fixed rectangle; resmall: after "
        "a resize of the shorter side; none: resize the whole image",
    )
    crop_area: list[float] = _augment(
        lambda: [0.05, 1.0], "crop inception: smallest and largest fraction of the image's area", above=0, at_most=1
    )
    resize: int | list[int] | None = _augment(
        None, "size before the crop; random: [height, width]; resmall: shorter side"
    )
    flip: bool = _augment(True, "mirror half of the images")
    randaugment_layers: int = _augment(0, "RandAugment: number of operations per image; 0: off", at_least=0)
    randaugment_magnitude: float = _augment(0, "RandAugment: strength of the operations, from 0 to 10", at_least=0)
    mixup_alpha: float = _augment(0.0, "mixup: parameter of its Beta distribution; 0: off", at_least=0)
    cutmix_alpha: float = _augment(0.0, "CutMix: parameter of its Beta distribution; 0: off", at_least=0)
    antialias: bool = _augment(False, "antialias when a crop is made smaller; the original does not")
    reduced_decoding: bool = _augment(False, "decode large JPEGs at 1/2, 1/4 or 1/8 size if crops stay large enough")
    augment_on: Literal["auto", "cpu", "device"] = _augment(
        AUTO,
        "where to resize and flip crops and to apply RandAugment; cpu: in the data workers; device: on the device, in "
        "batches; auto: device if it is a GPU (not MPS) and preset is not native, else cpu",
        free_on_resume=True,
    )
    token_drop: float = _augment(
        0.0, "fraction of patches to drop (NaViT); needs preset native", at_least=0, at_most=0.95
    )

    task: Literal["auto", "single-label", "multi-label", "regression"] = _loss(
        AUTO,
        "labels of an image: one class (single-label), any number of classes (multi-label), or numbers (regression); "
        "auto: as in the data, where numbers with fractions are a regression",
    )
    loss: Literal["auto", "softmax", "sigmoid", "mse", "huber"] = _loss(
        AUTO,
        "softmax: cross-entropy over all classes; sigmoid: binary cross-entropy of each class; mse, huber: squared "
        "error and Huber loss of a regression; auto: sigmoid for a multi-label task, mse for a regression, else "
        "softmax",
    )
    huber_delta: float = _loss(
        1.0, "huber: error above which the loss is linear, in standard deviations of the target", above=0, in_steps=True
    )
    class_weights: Literal["none", "balanced"] = _loss(
        "none",
        "balanced: weight each class by the inverse of its frequency in the training split, 1 on average",
        in_steps=True,
    )
    label_smoothing: float = _loss(
        0.0, "fraction of the target that is spread over all classes", at_least=0, at_most=1, in_steps=True
    )
    teacher: str | None = _loss(
        None,
        "knowledge distillation: model whose probabilities replace the labels; anything that `hf_vit.load` takes",
        is_path=True,
        in_steps=True,
    )
    teacher_temperature: float = _loss(
        1.0, "distillation: divides the logits of teacher and student", above=0, in_steps=True
    )
    head_bias: float | None = _loss(None, "initial value of the head's biases; by default 0", in_steps=True)

    log_every: int = _report(10, "steps between two log entries", above=0, in_steps=True, free_on_resume=True)
    eval_every: int | None = _report(
        None,
        "steps between two evaluations; by default a tenth of the run",
        above=0,
        in_steps=True,
        free_on_resume=True,
    )
    save_every: int | None = _report(
        None, "steps between two checkpoints; by default eval_every", above=0, in_steps=True, free_on_resume=True
    )
    best_metric: str = _report(
        AUTO,
        "metric that chooses the best model, such as loss or accuracy/cat; auto: accuracy; mean_average_precision for "
        "a multi-label task; loss for a regression and without labels",
        in_steps=True,
    )
    early_stopping: int | None = _report(
        None, "stop after this many evaluations without improvement", above=0, in_steps=True, free_on_resume=True
    )
    keep_checkpoints: int = _report(
        2, "number of newest checkpoints to keep", above=0, in_steps=True, free_on_resume=True
    )
    resume: bool = _report(
        False,
        "continue from the newest checkpoint in output_dir",
        everyday=True,
        in_steps=True,
        free_on_resume=True,
        in_recipe=False,
    )
    overwrite: bool = _report(
        False, "delete the run in output_dir first", everyday=True, free_on_resume=True, in_recipe=False
    )
    report_to: str = _report(
        AUTO,
        "trackers of Accelerate, such as tensorboard,wandb (or aim, clearml, comet_ml, dvclive, mlflow, swanlab, "
        "trackio); all: each that is installed; none; auto: tensorboard if installed",
        in_steps=True,
        free_on_resume=True,
    )
    tracker_project: str | None = _report(
        None,
        "project in the trackers; by default the environment's, such as WANDB_PROJECT, or training",
        free_on_resume=True,
    )
    tracker_name: str | None = _report(
        None, "name of the run in the trackers; by default the tracker's choice", free_on_resume=True
    )
    profile: int | None = _report(
        None,
        "optimizer steps to trace into output_dir/profile, after a warm-up",
        above=0,
        in_steps=True,
        free_on_resume=True,
    )
    stall_timeout: float = _report(
        480,
        "end the run if a process or its data workers take no part in a step for this many seconds; in the first step, "
        "in evaluation and while saving, torch's own timeout holds; 0: never",
        at_least=0,
        in_steps=True,
        free_on_resume=True,
    )

    def validate(self) -> None:
        super().validate()
        if not self.output_dir and not self.print_config:
            if self.resume:
                raise ValueError("resume continues the run in a folder: set --output-dir")
            self.output_dir = next_run_folder()
        if self.resume and self.overwrite:
            raise ValueError("resume continues the run and overwrite deletes it: choose one")
        self._check_length()
        if self.class_sampling == self.class_weights == "balanced":
            raise ValueError("class_sampling and class_weights both balance the classes: choose one")
        if self.teacher and (wrong := self.changed("class_weights label_smoothing")):
            raise ValueError(f"{', '.join(wrong)} has no effect with teacher, which replaces the labels: unset one")
        has_l2 = self.optimizer == "sgd" and self.weight_decay and self.weight_decay_convention == "torch"
        if self.momentum_dtype == "bfloat16" and (self.optimizer == "muon" or has_l2):
            raise ValueError(
                "momentum_dtype must be float32 for muon, and for sgd with weight_decay in torch's convention"
            )
        self._check_schedule()
        self._check_images()
        if self.task == "regression":
            self.check_regression()
        if self.huber_delta != 1 and self.loss != "huber":
            raise ValueError(f"huber_delta is {self.huber_delta}, which needs loss huber")

    def check_regression(self) -> None:
        """Raise ValueError if settings have no meaning for a regression."""
        names = "class_sampling class_weights label_smoothing teacher head_bias mixup_alpha cutmix_alpha relabel"
        if wrong := self.changed(f"{names} num_labels label_names"):
            raise ValueError(f"{', '.join(wrong)} must be unset for a regression, which has no classes")
        if self.loss not in (AUTO, *REGRESSION_LOSSES):
            raise ValueError(f"loss is {self.loss}; for a regression it must be {' or '.join(REGRESSION_LOSSES)}")

    def _check_length(self) -> None:
        """Raise ValueError unless the length of the run is set, in one way."""
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"set --steps or --epochs, and only one: they are {self.steps} and {self.epochs}")

    def _check_schedule(self) -> None:
        """Raise ValueError if the fields of the schedule contradict each other."""
        decays = self.schedule in ("linear", "cosine", "polynomial")
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it must be a whole number, or a fraction below 1")
        if self.schedule == "staircase":
            fits = bool(self.decay_steps)
        else:
            fits = len(self.decay_steps) <= decays
        if not fits:
            raise ValueError(
                f"schedule is {self.schedule} and decay_steps {self.decay_steps}: staircase needs at least one step; "
                "linear, cosine and polynomial take at most one; others none"
            )
        if self.decay_factors and len(self.decay_factors) != len(self.decay_steps):
            raise ValueError(
                f"decay_factors {self.decay_factors} must have as many entries as decay_steps {self.decay_steps}"
            )
        if self.final_learning_rate and not decays and self.schedule != "wsd":
            raise ValueError(
                f"final_learning_rate is {self.final_learning_rate}, but schedule {self.schedule} does not use it: "
                "unset it"
            )

    def _check_images(self) -> None:
        """Raise ValueError if crops, decoding or patch sizes contradict each other."""
        if len(self.crop_area) != 2 or self.crop_area[0] > self.crop_area[1]:
            raise ValueError(f"crop_area is {self.crop_area}; it must be two fractions, such as 0.05,1")
        if self.resizes_first and self.resize is None:
            raise ValueError(f"crop {self.crop} needs resize, the size before the crop")
        if self.resizes_first and self.reduced_decoding:
            raise ValueError(f"reduced_decoding does not work with crop {self.crop}")
        if self.crop == "resmall" and isinstance(self.resize, list):
            raise ValueError(f"resize is {self.resize}; crop resmall takes one number, the shorter side")
        self._check_patch_sizes()
        if self.preset == "native":
            self._check_native()
        elif self.token_drop:
            raise ValueError(f"token_drop ({self.token_drop}) needs preset native")

    @property
    def resizes_first(self) -> bool:
        """Return whether images are resized before the crop."""
        return self.crop in ("random", "resmall")

    def _check_patch_sizes(self) -> None:
        """Raise ValueError unless there is a weight for each patch size, or none at all."""
        weights = self.patch_size_weights
        if weights and (len(weights) != len(self.patch_sizes) or min(weights) < 0 or not sum(weights)):
            raise ValueError(
                f"patch_size_weights is {weights}; it needs a number >= 0 for each of patch_sizes {self.patch_sizes}"
            )

    def _check_native(self) -> None:
        """Raise ValueError for a setting that needs images of one size."""
        wrong = self.changed("mixup_alpha cutmix_alpha patch_sizes eval_patch_sizes reduced_decoding teacher")
        if self.resizes_first:
            wrong.append("crop")
        if self.compile is True:
            wrong.append("compile")
        if self.augment_on == "device":
            wrong.append("augment_on")
        if wrong:
            raise ValueError(f"{', '.join(wrong)} must be unset with preset native, whose images have different sizes")


@dataclass
class FinetuneSettings(TrainingSettings):
    """Fine-tune a model for image classification; without a recipe or a length it chooses both (--recipe auto)."""

    example: ClassVar[str] = (
        "example:\n  hf-vit finetune ti16 photographs      # one folder of images for each class; the result: runs/1\n"
        "  hf-vit finetune augreg:B/16 photographs out --epochs 10 --image-size 384"
    )

    eval_split: str | None = _data(
        AUTO,
        "split to evaluate on; auto: the validation, test or holdout split (or val, valid, dev, eval, testing), else "
        "eval_fraction of the training images of each class, which is held out from training; none: no evaluation",
    )
    folds: int | None = _data(
        None,
        "cross-validation: split train_split into this number of folds; train one model per fold on the other folds, "
        "and evaluate it on that fold; output_dir has a folder for each model, and folds.json with the mean and the "
        "standard deviation of the metrics",
        at_least=2,
    )
    model: str | None = _model(
        None,
        "model to fine-tune: a folder, a name on the Hub, a checkpoint file, or a released one such as augreg:Ti/16",
        is_path=True,
        everyday=True,
    )
    head: Literal["auto", "new", "keep"] = _model(
        AUTO,
        "head to start from; new: zeros; keep: the model's own, whose classes must be those of the data; auto: keep if "
        "closed_form solved for it, for these classes, else new",
        in_steps=True,
    )
    keep_pre_logits: bool = _model(False, "keep the pre-logits layer and replace only the head's last linear layer")
    linear_probe: bool = _model(False, "train only the head", in_steps=True)
    closed_form: bool = _model(
        False, "solve for the head in closed form on frozen features (regularized least squares), without steps"
    )
    l2_reg: float | Literal["auto"] = _model(
        AUTO,
        "closed_form: L2 regularization of the head; auto: the one of 2^-6, 2^-5, ... 2^20 with the smallest squared "
        "error of leave-one-out, which is computed in closed form",
        above=0,
    )
    views: int = _model(
        1,
        "closed_form: views of each training image: the image itself, and random crops of it by the settings of "
        "augmentation (crop, crop_area, flip, ...); leave-one-out leaves out all views of an image",
        above=0,
    )
    add: str | None = _data(
        None,
        "dataset of new classes for a model of closed_form, in place of --dataset: output_dir gets a model of its "
        "classes and these, without the old images",
        is_path=True,
    )
    remove: list[str] = _data(list, "classes to remove from a model of closed_form, by name; needs no --dataset")
    lora_rank: int | None = _model(
        None, "LoRA (PEFT): train only the head and adapters of this rank", above=0, in_steps=True
    )
    num_channels: int | None = _model(
        None,
        "image channels, by default the model's; for another number, the first kernel is repeated or summed",
        above=0,
    )
    lora_alpha: float = _model(16, "LoRA: alpha; the adapters are scaled by alpha / rank", above=0, in_steps=True)
    lora_target_modules: list[str] = _model(
        lambda: ["q_proj", "v_proj"], "LoRA: modules that get adapters; all-linear: all", in_steps=True
    )

    audit: bool = _report(
        False, "audit the images after the run, see `hf-vit audit`; report.html links the result", free_on_resume=True
    )
    save_for: Literal["hf_vit", "transformers"] = _report(
        "hf_vit",
        "format of the final model (also --for): hf_vit, or transformers' classes; hf_vit.load reads both",
        free_on_resume=True,
    )

    def unused_fields(self) -> list[str]:
        """Return the fields that closed_form does not use: those of steps, augmentation and losses."""
        if not self.closed_form:
            return []
        unused = fields_with("in_steps", self)
        if self.views > 1:
            unused = [name for name in unused if name not in _OF_VIEWS]
        return unused

    def _check_length(self) -> None:
        if not self.closed_form:
            super()._check_length()

    def _check_closed_form(self) -> None:
        """Raise ValueError if settings have no effect on a head in closed form, or on the change of its classes.

        `add` and `remove` imply `closed_form`, and the dataset of `add` is that of the run.
        """
        changes_classes = self.add is not None or bool(self.remove)
        if changes_classes:
            self.closed_form = True
            if self.dataset not in (None, self.add):
                raise ValueError(f"add and remove change a model without the old images: omit dataset {self.dataset}")
            self.dataset = self.add
            if wrong := self.changed("folds num_channels image_size preset audit"):
                raise ValueError(f"{', '.join(wrong)} must be unset with add and remove, which keep the model's")
        if self.closed_form and (wrong := self.changed(" ".join(self.unused_fields()))):
            raise ValueError(f"{', '.join(wrong)} must be unset: a head in closed form is not trained in steps")
        if self.closed_form and self.loss == "huber":
            raise ValueError("loss is huber, but a head in closed form has the smallest squared error")
        if not self.closed_form and (wrong := self.changed("l2_reg views")):
            raise ValueError(f"{', '.join(wrong)} needs closed_form, or the recipe instant")
        if self.views > 1 and self.preset == "native":
            raise ValueError(f"views is {self.views}, which preset native does not support")

    def validate(self) -> None:
        self._check_closed_form()
        super().validate()
        if self.folds and self.eval_split not in (AUTO, None):
            raise ValueError(f"folds hold out parts of train_split: unset folds or eval_split ({self.eval_split})")
        if self.audit and self.streaming:
            raise ValueError("audit does not work with streaming: set streaming to false")
        if self.linear_probe and self.lora_rank:
            raise ValueError("linear_probe freezes the layers that lora_rank adapts: choose one")
        if self.lora_rank and self.optimizer == "muon":
            raise ValueError("muon does not train the adapters of lora_rank: set optimizer to adamw or sgd")


@dataclass
class AuditSettings(DataSettings):
    """Find label errors, duplicates, leaks, outliers, and images of poor quality in a dataset."""

    example: ClassVar[str] = "example:\n  hf-vit audit ti16 photographs"

    model: str | None = _model(
        None, "model whose features are compared, as in `hf-vit predict`", is_path=True, everyday=True
    )
    splits: list[str] = _data(list, "splits to audit, such as train,test; by default all", everyday=True)
    train: str | None = _data(
        None,
        "dataset of training images; images of --dataset that are also in it are reported as leaks",
        everyday=True,
    )
    output_dir: str | None = _run("audit", "folder of issues.csv, audit.html and contact sheets", everyday=True)
    backend: Backend = _model("eager", "library that computes the forward, as in `hf-vit predict --backend`")
    overwrite: bool = _report(
        False, "replace issues.csv in output_dir, and ignore the cached features", in_recipe=False
    )

    def validate(self) -> None:
        super().validate()
        if self.streaming:
            raise ValueError("an audit does not work with streaming: set streaming to false")


@dataclass
class PretrainSettings(TrainingSettings):
    """Train a model from random weights, with labels or by masked patch prediction."""

    words: ClassVar[tuple[str, ...]] = ("dataset", "output_dir")
    example: ClassVar[str] = "example:\n  hf-vit pretrain digits out --recipe digits"

    objective: Literal["supervised", "masked_patch_prediction"] = _loss(
        "supervised", "training objective: labels, or masked patches (no labels needed)"
    )
    variant: str | None = _model(
        None, "architecture, such as B/16 or R50x1; config changes single fields of it", everyday=True
    )
    config: dict[str, Any] = _model(dict, "fields of HfViTConfig or HfBiTConfig, as a YAML table")
    head: Literal["linear", "mlp"] = _model("linear", "head; mlp has a tanh layer before the linear one")
    corruption: float = _masked(0.5, "fraction of patches to corrupt", at_least=0, at_most=1)
    mask_share: float = _masked(
        0.8, "fraction of corrupted patches to replace with the mask token", at_least=0, at_most=1
    )
    random_patch_share: float = _masked(
        0.1, "fraction of corrupted patches to replace with another patch", at_least=0, at_most=1
    )
    target: Literal["mean_color", "downsized", "pixels"] = _masked("mean_color", "property of a patch to predict")

    def validate(self) -> None:
        super().validate()
        if not self.variant and not self.config and not self.print_config:
            raise ValueError("no architecture: set variant (such as B/16), or config, or both")
        if self.head == "mlp" and self.config.get("representation_size"):
            raise ValueError("head mlp and config's representation_size both make a tanh layer: choose one")
        share = self.mask_share + self.random_patch_share
        if share > 1:
            raise ValueError(f"mask_share and random_patch_share add up to {share}, more than 1")
        if self.objective != "masked_patch_prediction":
            return
        names = "class_weights class_sampling label_smoothing loss head_bias teacher head mixup_alpha cutmix_alpha"
        if wrong := self.changed(names):
            raise ValueError(f"{', '.join(wrong)} must be unset: masked_patch_prediction has no labels")
        if self.patch_sizes or self.eval_patch_sizes or self.preset == "native":
            raise ValueError("masked_patch_prediction needs one image and patch size: unset patch_sizes and preset")


Protocol = Literal["accuracy", "real", "objectnet", "few_shot", "linear_probe", "knn", "vtab"]
_OF_FEATURES = ("few_shot", "linear_probe", "knn")


@dataclass
class EvaluateSettings(DataSettings):
    """Evaluate a model: its accuracy, or another protocol of the paper and its successors."""

    example: ClassVar[str] = (
        "example:\n  hf-vit evaluate out photographs\n  hf-vit evaluate ti16 photographs results --protocol few_shot"
    )

    model: str | None = _model(
        None,
        "model to evaluate: a folder, a name on the Hub, a checkpoint file, or a released one such as augreg:Ti/16",
        is_path=True,
        everyday=True,
    )
    protocol: Protocol = _protocol("accuracy", "evaluation protocol", everyday=True)
    split: str | None = _data(
        None,
        "split to evaluate on; by default test or, without one, the images held out in training; for real: validation; "
        "for objectnet: train",
        everyday=True,
    )
    patch_size: int | list[int] | None = _model(None, "patch size: pixels, or [height, width]; by default the model's")
    backend: Backend = _model(
        "eager",
        "library that computes the forward, as in `hf-vit predict --backend`; int8 is written by hf-vit quantize",
    )
    overwrite: bool = _report(False, "ignore the cached features and results in output_dir", in_recipe=False)

    label_map: str | None = _data(
        None,
        "YAML or JSON file: the data's class names -> the model's names or numbers",
        is_path=True,
        protocols=("accuracy", "real"),
    )
    real_labels: str | None = _protocol(
        None,
        'JSON file, a list with a list of class indices per image ("Are we done with ImageNet?")',
        is_path=True,
        protocols=("accuracy", "real"),
    )
    objectnet_classes: str | None = _protocol(
        None,
        "YAML or JSON file that maps folders to class indices; by default the 113 published classes",
        is_path=True,
        protocols=("objectnet",),
    )

    train_split: str = _data("train", "few_shot, linear_probe, knn: split with the training features")
    features: Literal["pre_logits", "class_token", "patch_mean"] = _protocol(
        "pre_logits",
        "features to use: the head's input, or tokens of the last layer",
        protocols=_OF_FEATURES,
    )
    feature_layer: int | None = _protocol(
        None, "encoder layers before the features; by default all", above=0, protocols=_OF_FEATURES
    )
    embeddings: str | None = _protocol(
        None,
        "few_shot, linear_probe, knn, calibrate: folder of `hf-vit embed`, whose features are used instead of computed",
        is_path=True,
    )
    shots: list[int] = _protocol(lambda: [1, 5, 10, 25], "images per class", above=0, protocols=("few_shot",))
    seeds: int = _protocol(3, "number of random draws of the training images", above=0, protocols=("few_shot",))
    l2_reg: list[float] = _protocol(lambda: [1024.0], "L2 regularization", above=0, protocols=("few_shot",))
    probe_l2: list[float] = _protocol(
        lambda: [10.0**power for power in range(-6, 2)],
        "L2 regularizations to choose from",
        above=0,
        protocols=("linear_probe",),
    )
    held_out: float = _protocol(
        0.2, "fraction of images for choosing probe_l2", above=0, at_most=0.9, protocols=("linear_probe",)
    )
    neighbors: list[int] = _protocol(lambda: [10, 20], "number of neighbors that vote", above=0, protocols=("knn",))
    temperature: float = _protocol(0.07, "temperature of the neighbors' votes", above=0, protocols=("knn",))

    tasks: list[str] = _protocol(list, "names of the tasks; by default all 19", protocols=("vtab",))
    finetune: dict[str, Any] = _protocol(
        dict, "settings of fine-tuning that differ from the paper's", protocols=("vtab",)
    )
    keep_models: bool = _protocol(False, "keep the fine-tuned models", protocols=("vtab",))

    def validate(self) -> None:
        if self.protocol == "vtab" and self.dataset is None:
            self.dataset = "hub"  # each task has a name there
        super().validate()
        if self.protocol == "vtab":
            self._check_vtab()
        if self.backend != "eager" and (self.compile is True or self.mixed_precision not in (None, "no")):
            raise ValueError(f"backend is {self.backend}, which compile and mixed_precision do not support")
        for one in dataclasses.fields(self):
            protocols = one.metadata["protocols"]
            if protocols and self.protocol not in protocols and self.changed(one.name):
                needed = " or ".join(protocols)
                raise ValueError(f"{one.name} needs protocol {needed}; protocol is {self.protocol}")
        if self.streaming and self.protocol in (*_OF_FEATURES, "objectnet"):
            raise ValueError(f"protocol {self.protocol} does not work with streaming: set streaming to false")
        for name in ("shots", "l2_reg", "probe_l2", "neighbors"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; it must have one entry or more")

    def _check_vtab(self) -> None:
        """Raise ValueError for a setting that fine-tuning on the tasks does not use."""
        if not self.output_dir and not self.print_config:
            raise ValueError("no folder for the results: set --output-dir")
        if self.patch_size is not None:
            raise ValueError("patch_size is set, but vtab uses the model's own")
        if self.backend != "eager":
            raise ValueError(f"backend is {self.backend}, which vtab does not support")
