"""Time from an image to pixel values, compared with other libraries.

    python benchmarks/image_processing.py [--rounds 30] [--threads 1] [--photograph FILE.jpg] [--json FILE]

Three tasks, each from a user's input to a float32 tensor for the model, at 224 pixels:

* a JPEG of 500 x 375 pixels;
* a JPEG of 4000 x 3000 pixels, which hf_vit can also decode at a reduced scale, with the difference of the pixels;
* a batch of 256 tensors of 375 x 500 pixels, on the GPU if there is one.

Without `--photograph`, the JPEGs hold noise with the spectrum of a photograph; their quality is 85. The contestants
take turns in every round. The tables have medians, and the ratio to the fastest of the other libraries. A library that
is not installed is omitted, with a message.
"""

import argparse
import io
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import silence_torchvision, take_turns
from PIL import Image

_Contenders = dict[str, Callable[[], object]]
_SIDE = 224
BATCH = 256
_QUALITY = 85


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    torch.set_num_threads(arguments.threads)
    transforms = _import_torchvision()  # before transformers, which assumes that an installed torchvision works
    peers = _load_peers(transforms)
    photograph = make_photograph(arguments.photograph)
    small, large = _as_jpeg(photograph, 500, 375), _as_jpeg(photograph, 4000, 3000)
    rounds, few = arguments.rounds, max(3, arguments.rounds // 5)
    report = {
        "threads": arguments.threads,
        "bytes": {"small": len(small), "large": len(large)},
        "milliseconds": {
            "small": measure(_jpeg_contenders(small, peers), rounds),
            "large": measure(_large_contenders(large, peers), few),
            "batch": measure(_batch_contenders(photograph.resize((500, 375)), transforms), few),
        },
        "reduced_decoding": _reduced_difference(large),
    }
    print(as_markdown(report))
    print(json.dumps(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="preprocessing against other libraries", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=30, help="number of rounds; large tasks have a fifth of them")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default 1, as in a data loader)")
    parser.add_argument("--photograph", type=Path, help="an image to cut the JPEGs from")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(argv)


# Images


def make_photograph(path: Path | None) -> Image.Image:
    """Return a photograph of 4000 x 3000, or noise with the spectrum of a photograph.

    The amplitudes of the noise fall with the inverse of the frequency, and faster at high frequencies, like the blur of
    a lens. As a JPEG it has the size of a photograph, about 2 bits per pixel.
    """
    if path:
        return Image.open(path).convert("RGB").resize((4000, 3000), Image.Resampling.LANCZOS)
    frequency = np.hypot(np.fft.fftfreq(3000)[:, None], np.fft.rfftfreq(4000)).astype(np.float32)
    frequency[0, 0] = np.inf
    falloff = 1 / frequency / (1 + (frequency / 0.25) ** 4)
    generator = np.random.default_rng(0)
    gray, red, blue = (
        np.fft.irfft2(np.fft.rfft2(generator.standard_normal((3000, 4000), dtype=np.float32)) * falloff)
        for _ in range(3)
    )
    color = np.stack([gray + 0.3 * red, gray, gray + 0.3 * blue], axis=-1)
    return Image.fromarray(np.clip(128 + 50 * color / color.std(), 0, 255).astype(np.uint8))


def _as_jpeg(image: Image.Image, width: int, height: int) -> bytes:
    file = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _reduced_difference(jpeg: bytes) -> dict[str, float]:
    """Return the difference between the pixels of exact and reduced decoding, in levels."""
    differences = {}
    for preset in ("vit_jax", "timm", "transformers"):
        exact, reduced = (ours(preset, reduced_decoding=value)(jpeg) for value in (False, True))
        differences[preset] = 127.5 * (exact - reduced).abs().mean().item()
    return differences


# Contestants


def _import_torchvision():
    """Import torchvision.transforms.v2; None if it is not installed."""
    silence_torchvision()
    try:
        from torchvision.transforms import v2  # pyright: ignore[reportMissingImports] - a peer
    except ImportError:
        return skip("torchvision")
    return v2


def skip(name: str) -> None:
    print(f"{name} is not installed and is omitted; run: pip install {name}", file=sys.stderr)


def _load_peers(transforms) -> dict[str, Callable[[Image.Image], object]]:
    """Return functions of the other libraries from a PIL image to a batch of one."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    peers: dict[str, Callable[[Image.Image], object]] = {
        "transformers, Pillow": partial(ViTImageProcessorPil(), return_tensors="pt")
    }
    if transforms:
        from transformers.models.vit.image_processing_vit import ViTImageProcessor

        peers["transformers, torchvision"] = partial(ViTImageProcessor(), return_tensors="pt")
        pipeline = _torchvision_pipeline(transforms, transforms.ToImage())
        peers["torchvision v2"] = lambda image: pipeline(image)[None]
    try:
        from timm.data import create_transform  # pyright: ignore[reportMissingImports] - a peer
    except ImportError:
        skip("timm")
    else:
        timm = create_transform(_SIDE, interpolation="bicubic", crop_pct=0.9, mean=(0.5,) * 3, std=(0.5,) * 3)
        peers["timm"] = lambda image: timm(image)[None]
    return peers


def _torchvision_pipeline(transforms, *before):
    scale = (transforms.ToDtype(torch.float32, scale=True), transforms.Normalize([0.5] * 3, [0.5] * 3))
    return transforms.Compose([*before, transforms.Resize((_SIDE, _SIDE), antialias=True), *scale])


def _jpeg_contenders(jpeg: bytes, peers: dict[str, Callable]) -> _Contenders:
    contenders: _Contenders = {"decoding and one Pillow resize": partial(_decode_and_resize, jpeg)}
    for preset in ("vit_jax", "augreg", "timm", "transformers"):
        contenders[f"ours, {preset}"] = partial(ours(preset), jpeg)
    for name, peer in peers.items():
        contenders[name] = lambda peer=peer: peer(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    return contenders


def _large_contenders(jpeg: bytes, peers: dict[str, Callable]) -> _Contenders:
    contenders = _jpeg_contenders(jpeg, peers)
    for preset in ("vit_jax", "transformers"):
        contenders[f"ours, {preset}, reduced decoding"] = partial(ours(preset, reduced_decoding=True), jpeg)
    return contenders


def _batch_contenders(image: Image.Image, transforms) -> _Contenders:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = torch.from_numpy(np.array(image)).permute(2, 0, 1).repeat(BATCH, 1, 1, 1).to(device)
    presets = ("vit_jax", "augreg", "transformers")
    contenders: _Contenders = {f"ours, {preset}": partial(ours(preset), batch) for preset in presets}
    if transforms:
        from transformers.models.vit.image_processing_vit import ViTImageProcessor

        contenders["transformers, torchvision"] = partial(ViTImageProcessor(), batch, return_tensors="pt")
        contenders["torchvision v2"] = partial(_torchvision_pipeline(transforms), batch)
    return contenders


def ours(preset: str, **settings: Any) -> Callable[[Any], torch.Tensor]:
    from hf_vit import HfViTImageProcessor

    processor = HfViTImageProcessor(preset, **settings)
    return lambda images: processor(images, return_tensors="pt").pixel_values


def _decode_and_resize(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)


# Measuring


def measure(contenders: _Contenders, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each contestant; they take turns."""

    def to_the_end(contender):
        contender()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    turns = take_turns({name: partial(to_the_end, work) for name, work in contenders.items()}, 0, rounds, warm_up=1)
    return {name: 1000 * statistics.median(seconds) for name, seconds in turns.items()}


def as_markdown(report: dict) -> str:
    titles = {
        "small": f"A JPEG of 500 x 375, {report['bytes']['small'] >> 10} kB",
        "large": f"A JPEG of 4000 x 3000, {report['bytes']['large'] >> 10} kB",
        "batch": f"{BATCH} tensors of 375 x 500",
    }
    lines = [f"PyTorch with {report['threads']} threads"]
    for task, milliseconds in report["milliseconds"].items():
        others = [value for name, value in milliseconds.items() if not name.startswith(("ours", "decoding"))]
        lines += ["", f"| {titles[task]} | milliseconds | ratio to the fastest other |", "| --- | --: | --: |"]
        for name, value in milliseconds.items():
            ratio = f"{value / min(others):.2f}" if others else ""
            lines.append(f"| {name} | {value:.2f} | {ratio} |")
    lines += ["", "| 4000 x 3000, reduced decoding | mean difference, levels of 255 |", "| --- | --: |"]
    lines += [f"| {preset} | {value:.2f} |" for preset, value in report["reduced_decoding"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
