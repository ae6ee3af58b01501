"""Model rows of `gpu.py`: training steps, losses, inference, images, matrix products.

All parts of the training are those of the package: objective, normalization on the device, optimizer, augmentation.
"""

import contextlib
import gc
import importlib.metadata
import importlib.util
import io
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
import numpy as np
import torch
from gpu import REFERENCE, TOY, Omitted
from PIL import Image
from torch.nn import functional as F

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.data.augmentation import TrainTransform, sample_generator
from hf_vit.data.device_augmentation import CropTransform, DeviceAugmentation
from hf_vit.data.loaders import collate_fn
from hf_vit.data.workers import count_processors
from hf_vit.models.compute import FLOPS_PER_MULTIPLY_ADD, count_compute
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.sizes import as_pair
from hf_vit.settings.fields import TrainingSettings
from hf_vit.training.objectives import Classification, Normalizer
from hf_vit.training.optimization import build_optimizer, set_learning_rate

Report = Callable[[dict], None]
_FORWARDS_PER_STEP = 3  # the forward, and a backward of twice its cost
_TOY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_FIRST_BATCH = {"S/16": 256, "B/16": 128, "L/16": 64, "H/14": 32, TOY: 4}
_LOSS_BATCH = {"S/16": 64, "B/16": 64, "L/16": 32, "H/14": 16, TOY: 4}
_LARGEST_BATCH = 8192
_GAIN = 1.01  # the search ends at a smaller gain
_REFERENCE_SEEDS = 3
_FP8_MULTIPLE = 16  # the hardware needs sides that are multiples of it
_LEARNING_RATE, _WARMUP = 1e-3, 10


def setup(message: dict, report: Report) -> dict:
    """Return the device and the versions of its software."""
    device = torch.device(message["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Omitted(f"this torch ({torch.__version__}) finds no CUDA device; give --device cpu --toy for a test")
    torch.ones(8, device=device).sum().item()
    versions = {}
    for name in ("torch", "triton", "transformers", "accelerate", "torchao", "kernels", "torchvision", "datasets"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "versions": versions, "toy": message["toy"]}


def peak(message: dict, report: Report) -> dict:
    """Measure the operations per second of the fastest matrix product in each precision."""
    device, peaks = torch.device(message["device"]), {}
    sides = (64, 128) if message["toy"] else (4096, 8192, 16384)
    for name in ("bfloat16", "tf32", "float8", "float32"):
        for side in sides if name != "float32" else sides[:2]:
            with contextlib.suppress(Omitted, torch.OutOfMemoryError):
                seconds = statistics.median(_time(_product(name, side, device), message))
                peaks[name] = max(peaks.get(name, 0.0), 2 * side**3 / seconds)
        report(peaks)
    return peaks


def _product(name: str, side: int, device: torch.device) -> Callable[[], Any]:
    """Return a product of two square random matrices; with zeros it would need less power and be faster."""
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if name == "float8":
        _require_fp8(device)
        a, b, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
        multiply: Any = torch.__dict__["_scaled_mm"]  # there is no public function
        return lambda: multiply(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    _choose_float32_products(name)
    if name == "bfloat16":
        a, b = a.bfloat16(), b.bfloat16()
    return lambda: a @ b


def _require_fp8(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise Omitted("fp8 products need a GPU of compute capability 8.9")


def _choose_float32_products(precision: str) -> None:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _time(work: Callable[[], Any], message: dict) -> list[float]:
    """Return the seconds of one call, for each of several windows of half a second, after a warm-up."""
    for _ in range(3):
        work()
    one = _seconds(work, 1)
    count, windows = (1, 2) if message["toy"] else (max(int(0.5 / one), 1), 5)
    return [_seconds(work, count) / count for _ in range(windows)]


def _seconds(work: Callable[[], Any], count: int) -> float:
    _wait()
    began = time.perf_counter()
    for _ in range(count):
        work()
    _wait()
    return time.perf_counter() - began


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(message: dict, seed: int = 0, num_labels: int = 1000) -> Any:
    """Build and compile the model of a row on its device, with random weights.

    Shapes are fixed, so each batch size has its own graphs. At toy size they are captured but not compiled, which takes
    minutes for each on a CPU.

    Raises:
        Omitted: this machine lacks something that the setting needs.
    """
    setting, device = message["setting"], torch.device(message["device"])
    attention, precision = setting["attention"], setting["precision"]
    for package, is_needed in {"torchao": precision == "fp8", "kernels": "/" in attention}.items():
        if is_needed and importlib.util.find_spec(package) is None:
            raise Omitted(f"{package} is not installed")
    if attention != "sdpa" and device.type != "cuda":
        raise Omitted("attention of cuDNN and of kernels needs CUDA")
    if message["variant"] == TOY:
        config = HfViTConfig(**_TOY, image_size=16, patch_size=4, num_labels=num_labels)
    else:
        config = HfViTConfig.from_variant(message["variant"], num_labels=num_labels)
    torch.manual_seed(seed)
    implementation = attention if "/" in attention else "sdpa"
    model: Any = HfViTForImageClassification._from_config(config, attn_implementation=implementation)
    model.to(device, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    if setting["channels_last"]:
        model.to(memory_format=torch.channels_last)
    if precision == "fp8":
        _use_fp8(model, message["kind"], device)
    if setting["pad"]:
        pad_tokens(model, setting["pad"])
    _choose_float32_products(precision)
    if setting["compile"]:
        how = {"mode": setting["compile"]} if message["inductor"] else {"backend": "aot_eager"}
        for module in model.vit.layers if setting["by_layers"] else [model]:
            module.compile(dynamic=False, **how)
    return model


def _use_fp8(model: Any, kind: str, device: torch.device) -> None:
    """Replace the encoder's linear layers by torchao's fp8 layers; on a CPU (training only) fp8 is emulated."""
    if device.type == "cuda":
        _require_fp8(device)

    def takes(module: Any, name: str) -> bool:
        is_linear = isinstance(module, torch.nn.Linear) and ".layers." in f".{name}"
        return is_linear and module.in_features % _FP8_MULTIPLE == module.out_features % _FP8_MULTIPLE == 0

    if kind == "train":
        from torchao import float8  # pyright: ignore[reportMissingImports] - a peer

        config = float8.Float8LinearConfig(emulate=device.type == "cpu")
        float8.convert_to_float8_training(model.vit, config=config, module_filter_fn=takes)
    else:
        from torchao import quantization  # pyright: ignore[reportMissingImports] - a peer

        model.to(torch.bfloat16)
        quantization.quantize_(model.vit, quantization.Float8DynamicActivationFloat8WeightConfig(), takes)


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


@contextlib.contextmanager
def _computing(message: dict):
    """Set the autocast (in training) and the kernels of a row; begin a step of CUDA graphs."""
    setting = message["setting"]
    if setting["compile"]:
        torch.compiler.cudagraph_mark_step_begin()
    with contextlib.ExitStack() as stack:
        if message["kind"] == "train" and setting["precision"] in ("autocast", "fp8"):
            stack.enter_context(torch.autocast(message["device"], torch.bfloat16))
        if setting["attention"] == "cudnn":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
        yield


def train(message: dict, report: Report) -> dict:
    """Measure images per second at the best batch size, then the loss after some steps on the same data."""
    result = _time_steps(message, report)
    losses: list[float] = []
    for seed in range(_REFERENCE_SEEDS if message["label"] == REFERENCE else 1):
        _free()
        losses.append(loss_after_steps(message, seed))
        result |= {"loss": losses[0], "losses": losses}
        report(result)
    return result


def _time_steps(message: dict, report: Report) -> dict:
    device = message["device"]
    model = build(message)
    step, labels, shape = make_step(model, message), model.config.num_labels, _image_shape(model.config)

    def step_of(batch: int) -> Callable[[], Any]:
        images = torch.randint(256, (batch, *shape), dtype=torch.uint8, device=device)
        targets = torch.randint(labels, (batch,), device=device)
        return lambda: step(images, targets)

    return _search_batch(message, step_of, _FORWARDS_PER_STEP * _forward_flops(model.config), report)


def make_step(model: Any, message: dict) -> Callable[..., torch.Tensor]:
    """Return a function of uint8 images and labels that makes one optimizer step of the training loop.

    It returns the loss, without waiting for it.
    """
    settings = TrainingSettings(optimizer="adamw", learning_rate=_LEARNING_RATE, weight_decay=0.1)
    optimizer = build_optimizer(settings, model, message["setting"]["fused"])
    normalizer = Normalizer(HfViTImageProcessor(), torch.device(message["device"]))
    objective = Classification(settings, normalizer, model.config.num_labels)
    model.train()

    def step(images: torch.Tensor, labels: torch.Tensor, learning_rate: float = _LEARNING_RATE) -> torch.Tensor:
        set_learning_rate(optimizer, learning_rate)
        with _computing(message):
            losses, _ = objective(model, {"image": images, "label": labels}, None)
            losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach().mean()

    return step


def loss_after_steps(message: dict, seed: int) -> float:
    """Return the mean loss of the last tenth of the steps, with the same weights and images for all settings.

    The images are coarse patterns with noise, and their labels the numbers of the patterns. Another seed gives other
    weights and another order; the differences between seeds are the noise of the loss.
    """
    device, classes, steps = torch.device(message["device"]), 100, 10 if message["toy"] else 100
    model = build(message, seed, num_labels=classes)
    step, losses = make_step(model, message), []
    height, width, channels = _image_shape(model.config)
    patterns = torch.rand(classes, channels, 8, 8, generator=torch.Generator().manual_seed(0)).to(device) * 255
    for number in range(steps):
        draw, noise = (torch.Generator(where).manual_seed(1000 * seed + number) for where in ("cpu", device))
        labels = torch.randint(classes, (_LOSS_BATCH[message["variant"]],), generator=draw).to(device)
        pictures = F.interpolate(patterns[labels], (height, width), mode="bilinear")
        pictures = pictures + 60 * torch.randn(pictures.shape, generator=noise, device=device)
        images = pictures.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        losses.append(step(images, labels, _LEARNING_RATE * min((number + 1) / _WARMUP, 1)).clone())
    return torch.stack(losses[-steps // 10 :]).float().mean().item()


@torch.no_grad()
def infer(message: dict, report: Report) -> dict:
    """Measure images per second at the best batch size, and milliseconds at batch size 1, without copying images."""
    model = build(message).eval()
    is_fp8 = message["setting"]["precision"] == "fp8"
    dtype = torch.bfloat16 if is_fp8 else next(model.parameters()).dtype
    height, width, channels = _image_shape(model.config)

    def forward_of(batch: int) -> Callable[[], Any]:
        pixel_values = torch.randn(batch, channels, height, width, device=message["device"], dtype=dtype)
        if message["setting"]["channels_last"]:
            pixel_values = pixel_values.to(memory_format=torch.channels_last)

        def forward() -> Any:
            with _computing(message):
                return model(pixel_values).logits

        return forward

    result = _search_batch(message, forward_of, _forward_flops(model.config), report)
    return {**result, "milliseconds of one": 1000 * statistics.median(_time(forward_of(1), message))}


def _forward_flops(config: HfViTConfig) -> int:
    """Return the floating-point operations of one image's forward, without padding."""
    return FLOPS_PER_MULTIPLY_ADD * count_compute(config).logits_multiply_adds


def _image_shape(config: Any) -> tuple[int, int, int]:
    return *as_pair(config.image_size), config.num_channels


def _search_batch(message: dict, work_of: Callable[[int], Any], flops: int, report: Report) -> dict:
    """Double the batch size while it fits and is faster; report the best result each time.

    A compiled model starts at the best batch size of the eager model, since each compilation can take minutes.
    """
    batch = message.get("batch") or _FIRST_BATCH[message["variant"]]
    largest = 8 if message["toy"] else _LARGEST_BATCH
    best: dict = {"flops_per_image": flops}
    while batch <= largest:
        _free()
        try:
            windows = _time(work_of(batch), message)
        except torch.OutOfMemoryError:
            if "batch" in best or batch == 1:
                break
            batch = largest = batch // 2  # a compiled model may need more memory than the eager one
            continue
        rate = batch / statistics.median(windows)
        gain = rate / best.get("images_per_second", rate / 2)
        if gain > 1:
            memory = (
                torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else common.peak_mib() / 2**10
            )
            best |= {"batch": batch, "images_per_second": rate, "windows": windows, "memory_gib": memory}
            report(best)
        if gain < _GAIN:
            break
        batch *= 2
    if "batch" not in best:
        raise RuntimeError(f"a batch of {batch} does not fit into memory")
    return best


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def images(message: dict, report: Report) -> dict:
    """Measure the images per second of every step from a JPEG to pixel values."""
    toy, device, rates = message["toy"], torch.device(message["device"]), {}
    count, size = (4, 16) if toy else (256, 224)
    jpegs = make_jpegs(min(count, 32), *((24, 32) if toy else (375, 500)))
    pictures = [Image.open(io.BytesIO(jpegs[number % len(jpegs)])).convert("RGB") for number in range(count)]
    options: dict[str, Any] = {"size": (size, size), "randaugment_layers": 2, "randaugment_magnitude": 10}
    on_cpu, crop = TrainTransform(**options), CropTransform(**options)
    on_device = DeviceAugmentation(on_cpu, device)

    def augment(transform: TrainTransform) -> list[dict]:
        return [transform.sample(picture, sample_generator(0, 0, row)) for row, picture in enumerate(pictures)]

    batch = collate_fn(augment(crop))
    pinned = {name: value.pin_memory() for name, value in batch.items()} if device.type == "cuda" else batch
    processor = HfViTImageProcessor(size=size)
    normalizer = Normalizer(processor, device)
    there = [torch.from_numpy(np.array(picture)).permute(2, 0, 1).to(device) for picture in pictures]
    pool = ThreadPoolExecutor(count_processors())
    steps: dict[str, tuple[Callable[[], Any], int]] = {
        f"decode with PIL, {count_processors()} threads": (lambda: list(pool.map(_decode, jpegs)), len(jpegs)),
        "crop, flip, RandAugment, one thread": (lambda: augment(on_cpu), count),
        "cut for the device, one thread": (lambda: augment(crop), count),
        "resize, flip, RandAugment, normalize on the device": (lambda: normalizer(on_device(pinned)["image"]), count),
        "the image processor, tensors on the device": (lambda: processor(there, return_tensors="pt"), count),
    }
    for name, (work, number) in steps.items():
        rates[name] = number / statistics.median(_time(work, message))
        report(rates)
    return rates


def _decode(jpeg: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


def make_jpegs(count: int, height: int, width: int) -> list[bytes]:
    """Make JPEGs that decode as slowly as photographs; 500 x 375 is ImageNet's mean size."""
    generator, jpegs = np.random.default_rng(0), []
    for _ in range(count):
        coarse = generator.integers(0, 256, (max(height // 8, 2), max(width // 8, 2), 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        jpegs.append(buffer.getvalue())
    return jpegs
