"""Model rows of `gpu.py`: matrix products, training steps, losses, inference.

All parts of the training are those of the package: objective, normalization on the device, optimizer, compilation.
"""

import contextlib
import gc
import importlib.metadata
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
from gpu_process import LeftOut
from gpu_rows import REFERENCE, TOY
from torch.nn import functional as F

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.analysis.compute import FLOPS_PER_MULTIPLY_ADD, count_compute
from hf_vit.models.configuration_hf_vit import as_pair
from hf_vit.settings.fields import TrainingSettings
from hf_vit.training.objectives import Classification, Normalizer
from hf_vit.training.optimization import build_optimizer, set_learning_rate

Report = Callable[[dict], None]
_FORWARDS_PER_STEP = 3  # the forward, and a backward of twice its cost
_TOY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 16,
}
_FIRST_BATCH = {"S/16": 256, "B/16": 128, "L/16": 64, "H/14": 32, TOY: 4}
_LOSS_BATCH = {"S/16": 64, "B/16": 64, "L/16": 32, "H/14": 16, TOY: 4}
_LARGEST_BATCH = {"train": 4096, "infer": 8192}
_GAIN = 1.01  # the search ends at a smaller gain
_REFERENCE_SEEDS = 3
_FP8_MULTIPLE = 16  # the hardware needs sides that are multiples of it
_LEARNING_RATE, _WARMUP = 1e-3, 10


class Plan:
    """Lengths of the measurements, on a GPU or at toy sizes."""

    def __init__(self, toy: bool):
        self.toy = toy
        self.loss_steps = 10 if toy else 100
        self.window, self.windows = (0.0, 2) if toy else (0.5, 5)  # seconds, repetitions
        self.largest = {"train": 8, "infer": 8} if toy else _LARGEST_BATCH


def setup(message: dict, report: Report) -> dict:
    """Return the device and the versions of its software.

    Raises:
        LeftOut: this machine has no such device.
    """
    device = torch.device(message["device"])
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise LeftOut(f"this torch ({torch.__version__}) finds no CUDA device; give --device cpu --toy for a test")
        torch.ones(8, device=device).sum().item()
    names = ("torch", "triton", "transformers", "accelerate", "torchao", "kernels", "torchvision", "datasets")
    versions = {name: version for name in names if (version := _version(name))}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "versions": versions, "toy": message["toy"]}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Matrix products


def measure_peaks(message: dict, report: Report) -> dict:
    """Measure the operations per second of the fastest matrix product in each precision."""
    plan, device = Plan(message["toy"]), torch.device(message["device"])
    sides = (64, 128) if plan.toy else (4096, 8192, 16384)
    peaks: dict[str, float] = {}
    for name in ("bfloat16", "tf32", "float8", "float32"):
        for side in sides if name != "float32" else sides[:2]:
            with contextlib.suppress(LeftOut, torch.OutOfMemoryError):
                multiply = _product(name, side, device)
                seconds = statistics.median(_time(multiply, device, plan))
                peaks[name] = max(peaks.get(name, 0), 2 * side**3 / seconds)
        report({"peaks": peaks})
    return {"peaks": peaks}


def _product(name: str, side: int, device: torch.device) -> Callable[[], Any]:
    """Return a product of two square random matrices; with zeros it would need less power and be faster."""
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if name == "float8":
        _require_fp8(device)
        a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
        multiply: Any = torch.__dict__["_scaled_mm"]  # there is no public function
        return lambda: multiply(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    _choose_float32_products("tf32" if name == "tf32" else "float32")
    if name == "bfloat16":
        a, b = a.bfloat16(), b.bfloat16()
    return lambda: a @ b


def _require_fp8(device: torch.device) -> None:
    if device.type != "cuda":
        raise LeftOut(f"fp8 products need a GPU of compute capability 8.9, and this is {device.type}")
    if torch.cuda.get_device_capability(device) < (8, 9):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise LeftOut(f"fp8 products need compute capability 8.9, and this GPU has {found}")


def _choose_float32_products(precision: str) -> None:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _time(work: Callable[[], Any], device: torch.device, plan: Plan) -> list[float]:
    """Return the seconds of one call, for each of several windows, after a warm-up."""
    for _ in range(3):
        work()
    one = _seconds(work, 1, device)
    count = max(int(plan.window / one), 1)
    return [_seconds(work, count, device) / count for _ in range(plan.windows)]


def _seconds(work: Callable[[], Any], count: int, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Models


def build(message: dict, seed: int = 0, num_labels: int = 1000) -> Any:
    """Build the model of a row on its device, with random weights, not compiled.

    Raises:
        LeftOut: this machine lacks something that the setting needs.
    """
    setting, device = message["setting"], torch.device(message["device"])
    _require(message, device)
    config = _config_of(message["variant"], num_labels)
    torch.manual_seed(seed)
    implementation = "sdpa" if setting["attention"] == "cudnn" else setting["attention"]
    model: Any = HfViTForImageClassification._from_config(config, attn_implementation=implementation)
    model.to(device, torch.bfloat16 if setting["precision"] == "bfloat16" else torch.float32)
    if setting["channels_last"]:
        model.to(memory_format=torch.channels_last)
    if setting["precision"] == "fp8":
        _use_fp8(model, message["kind"], device)
    if setting["pad"]:
        pad_tokens(model, setting["pad"])
    _choose_float32_products(setting["precision"])
    return model


def _config_of(variant: str, num_labels: int) -> HfViTConfig:
    if variant == TOY:
        return HfViTConfig(**_TOY, patch_size=4, num_labels=num_labels)
    return HfViTConfig.from_variant(variant, num_labels=num_labels)


def _require(message: dict, device: torch.device) -> None:
    setting = message["setting"]
    if setting["precision"] == "fp8" and importlib.util.find_spec("torchao") is None:
        raise LeftOut("torchao is not installed")
    if setting["attention"] == "cudnn" and device.type != "cuda":
        raise LeftOut(f"cuDNN has no attention for {device.type}")
    if "/" in setting["attention"] and importlib.util.find_spec("kernels") is None:
        raise LeftOut("kernels is not installed")
    if "/" in setting["attention"] and device.type != "cuda":
        raise LeftOut(f"{setting['attention']} has no build for {device.type}")
    if setting["compile"] and message["inductor"] and device.type == "cpu" and not _compiles():
        raise LeftOut("torch.compile needs a C++ compiler (g++) here")


def _compiles() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except (RuntimeError, exc.InvalidCxxCompiler):
        return False


def _use_fp8(model: Any, kind: str, device: torch.device) -> None:
    """Replace the encoder's linear layers by torchao's fp8 layers; on a CPU (training only) fp8 is emulated."""
    if device.type == "cuda":
        _require_fp8(device)

    def takes(module: Any, name: str) -> bool:
        sides = getattr(module, "in_features", 1), getattr(module, "out_features", 1)
        return ".layers." in f".{name}" and all(side % _FP8_MULTIPLE == 0 for side in sides)

    if kind == "train":
        from torchao.float8 import (  # pyright: ignore[reportMissingImports] - a peer
            Float8LinearConfig,
            convert_to_float8_training,
        )

        config = Float8LinearConfig(emulate=device.type == "cpu")
        convert_to_float8_training(model.vit, config=config, module_filter_fn=takes)
        return
    from torchao.quantization import (  # pyright: ignore[reportMissingImports] - a peer
        Float8DynamicActivationFloat8WeightConfig,
        quantize_,
    )

    model.to(torch.bfloat16)
    is_linear = torch.nn.Linear
    quantize_(
        model.vit,
        Float8DynamicActivationFloat8WeightConfig(),
        lambda m, name: isinstance(m, is_linear) and takes(m, name),
    )


def pad_tokens(model: Any, multiple: int) -> None:
    """Pad the tokens in a classifier's layers to a multiple; no token attends to the padding.

    Products and attention kernels are faster with such shapes, but also compute the padding.
    """
    encoder = model.vit

    def encode(hidden_states, grid, attention_mask=None, num_queries=None, keep=(), **kwargs):
        tokens = hidden_states.shape[1]
        hidden_states = F.pad(hidden_states, (0, 0, 0, -tokens % multiple))  # (batch, padded tokens, hidden_size)
        mask = (torch.arange(hidden_states.shape[1], device=hidden_states.device) < tokens)[None, None, None]
        last = len(encoder.layers) - 1
        for index, layer in enumerate(encoder.layers):
            hidden_states = layer(hidden_states, mask, num_queries if index == last else None, grid=grid)
        return hidden_states[:, :tokens], []

    encoder.encode = encode


def compile_model(model: Any, message: dict) -> None:
    """Compile a model according to its setting; shapes are fixed, so each batch size has its own graphs.

    At toy size the graphs are captured but not compiled, which takes minutes for each on a CPU.
    """
    setting = message["setting"]
    if not setting["compile"]:
        return
    how = {"mode": setting["compile"]} if message["inductor"] else {"backend": "aot_eager"}
    for module in model.vit.layers if setting["by_layers"] else [model]:
        module.compile(dynamic=False, **how)


@contextlib.contextmanager
def computing(setting: dict, device: torch.device, trains: bool = True) -> Iterator[None]:
    """Set the autocast (in training) and the kernels of a setting."""
    with contextlib.ExitStack() as stack:
        if trains and setting["precision"] in ("autocast", "fp8"):
            stack.enter_context(torch.autocast(device.type, torch.bfloat16))
        if setting["attention"] == "cudnn":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
        yield


# Training


def train(message: dict, report: Report) -> dict:
    """Measure images per second at the best batch size, then the loss after some steps on the same data."""
    plan = Plan(message["toy"])
    result = _time_steps(message, plan, report)
    _free(torch.device(message["device"]))
    seeds = range(_REFERENCE_SEEDS if message["setting"]["name"] == REFERENCE else 1)
    losses: list[float] = []
    for seed in seeds:
        losses.append(loss_after_steps(message, plan, seed))
        result = {**result, "loss": losses[0], "losses": losses}
        report(result)
    return result


def _time_steps(message: dict, plan: Plan, report: Report) -> dict:
    device = torch.device(message["device"])
    model = build(message)
    compile_model(model, message)
    step = make_step(model, message["setting"], device)

    def step_of(batch: int) -> Callable[[], Any]:
        images = torch.randint(256, (batch, *_image_shape(model.config)), dtype=torch.uint8, device=device)
        labels = torch.randint(model.config.num_labels, (batch,), device=device)
        return lambda: step(images, labels)

    flops = message.get("flops_per_image") or _FORWARDS_PER_STEP * _forward_flops(model.config)
    return _search_batch(message, plan, device, step_of, {"flops_per_image": flops}, report)


def make_step(model: Any, setting: dict, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function of uint8 images and labels that makes one optimizer step of the training loop.

    It returns the loss, without waiting for it.
    """
    settings = TrainingSettings(optimizer="adamw", learning_rate=_LEARNING_RATE, weight_decay=0.1)
    optimizer = build_optimizer(settings, model, setting["fused"])
    objective = Classification(settings, Normalizer([0.5] * 3, [0.5] * 3, device), model.config.num_labels)
    model.train()

    def step(images: torch.Tensor, labels: torch.Tensor, learning_rate: float = _LEARNING_RATE) -> torch.Tensor:
        if setting["compile"]:
            torch.compiler.cudagraph_mark_step_begin()
        set_learning_rate(optimizer, learning_rate)
        with computing(setting, device):
            losses, _ = objective(model, {"image": images, "label": labels}, None)
            losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach().mean()

    return step


def loss_after_steps(message: dict, plan: Plan, seed: int) -> float:
    """Return the mean loss of the last tenth of the steps, with the same weights and images for all settings.

    Another seed gives other weights and another order; the differences between seeds are the noise of the loss.
    """
    device, classes = torch.device(message["device"]), 100
    model = build(message, seed, num_labels=classes)
    compile_model(model, message)
    step = make_step(model, message["setting"], device)
    draw = _synthetic_images(_image_shape(model.config), classes, _LOSS_BATCH[message["variant"]], seed, device)
    last, losses = max(plan.loss_steps // 10, 1), []
    for number in range(plan.loss_steps):
        losses.append(step(*draw(number), _LEARNING_RATE * min((number + 1) / _WARMUP, 1)).clone())
    return torch.stack(losses[-last:]).float().mean().item()


def _synthetic_images(
    shape: tuple[int, int, int], classes: int, batch: int, seed: int, device: torch.device
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function of the step that draws images (coarse patterns with noise) and their pattern numbers."""
    height, width, channels = shape
    coarse = torch.rand(classes, channels, 8, 8, generator=torch.Generator().manual_seed(0)).to(device) * 255

    def draw(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + number)
        labels = torch.randint(classes, (batch,), generator=generator).to(device)
        noise = torch.Generator(device).manual_seed(1000 * seed + number)
        pictures = F.interpolate(coarse[labels], (height, width), mode="bilinear")
        pictures = pictures + 60 * torch.randn(pictures.shape, generator=noise, device=device)
        return pictures.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1), labels

    return draw


# Inference


@torch.no_grad()
def infer(message: dict, report: Report) -> dict:
    """Measure images per second at the best batch size, and milliseconds at batch size 1, without copying images."""
    plan, device, setting = Plan(message["toy"]), torch.device(message["device"]), message["setting"]
    model = build(message).eval()
    compile_model(model, message)
    dtype = next(model.parameters()).dtype if setting["precision"] != "fp8" else torch.bfloat16
    height, width, channels = _image_shape(model.config)

    def forward_of(batch: int) -> Callable[[], Any]:
        pixel_values = torch.randn(batch, channels, height, width, device=device, dtype=dtype)
        if setting["channels_last"]:
            pixel_values = pixel_values.to(memory_format=torch.channels_last)

        def forward() -> Any:
            if setting["compile"]:
                torch.compiler.cudagraph_mark_step_begin()
            with computing(setting, device, trains=False):
                return model(pixel_values).logits

        return forward

    fixed = {"flops_per_image": message.get("flops_per_image") or _forward_flops(model.config)}
    result = _search_batch(message, plan, device, forward_of, fixed, report)
    seconds = statistics.median(_time(forward_of(1), device, plan))
    return {**result, "milliseconds_of_one": 1000 * seconds}


# Shared by training and inference


def _forward_flops(config: HfViTConfig) -> int:
    """Return the floating-point operations of one image's forward, without padding."""
    return FLOPS_PER_MULTIPLY_ADD * count_compute(config).logits_multiply_adds


def _image_shape(config: Any) -> tuple[int, int, int]:
    height, width = as_pair(config.image_size)
    return height, width, config.num_channels


def _search_batch(
    message: dict, plan: Plan, device: torch.device, work_of: Callable[[int], Any], fixed: dict, report: Report
) -> dict:
    """Double the batch size while it fits and is faster; report the best result each time.

    A compiled model starts at the best batch size of the eager model, since each compilation can take minutes.
    """
    batch = message.get("batch") or _FIRST_BATCH[message["variant"]]
    best: dict = dict(fixed)
    while batch <= plan.largest[message["kind"]]:
        _free(device)
        try:
            windows = _time(work_of(batch), device, plan)
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            if "batch" in best or batch == 1:
                break
            batch //= 2  # a compiled model may need more memory than the eager one
            plan.largest[message["kind"]] = batch
            continue
        rate = batch / statistics.median(windows)
        gain = rate / best.get("images_per_second", rate / 2)
        if gain > 1:
            best |= {"batch": batch, "images_per_second": rate, "windows": windows, "memory_gib": _memory(device)}
            report(best)
        if gain < _GAIN:
            break
        batch *= 2
    if "batch" not in best:
        raise RuntimeError(f"a batch of {batch} does not fit into memory")
    return best


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _memory(device: torch.device) -> float:
    """Return the peak memory in GiB: of the GPU if there is one, else of this process."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else common.peak_mib() / 2**10
