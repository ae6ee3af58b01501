"""Lower bound of the time of a forward on this machine, and the models' distance from it.

    python benchmarks/floor.py [--paper] [--variants B/16 ...] [--sizes 224 ...] [--dtypes float32 ...] [--write]

On paper: multiply-adds and bytes of each part, from the sizes of the model. On this machine: the best rate of large
matrix products, by any library that comes with torch. The floor is the time of the multiply-adds at that rate, if all
other work were free. The table has the time of a forward after `optimize_for_inference`, divided by the floor. Its last
column is the time of the memory traffic alone, if no data stayed in a cache between two parts.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

import common
from common import Failed, report_progress, run_apart

README = common.HERE / "README.md"
_VARIANTS = ("Ti/16", "S/16", "B/16", "L/16", "R50+B/16")
SIZES = (224, 384, 512)
_DTYPES = ("float32", "bfloat16")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
AIMS = {"float32": 1.15, "bfloat16": 1.3}
# Rows, inputs and outputs of the measured products; the last two are the MLP of B/16 for 32 images.
_SHAPES = ((2048, 2048, 2048), (4096, 4096, 4096), (6304, 768, 3072), (6304, 3072, 768))
_COPIED_BYTES = 2**29


# The first process


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    if options.apart:
        common.print_result(globals()[options.apart], options)
        return
    common.silence_torchvision()
    from cost import cost_as_markdown

    paper = cost_as_markdown(_VARIANTS, SIZES)
    print(paper)
    if options.write:
        common.update_section(README, "cost", paper)
    if not options.paper:
        common.publish("floor", measure_all(options), as_markdown, options.write, README)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    parser.add_argument("--paper", action="store_true", help="measure nothing")
    parser.add_argument("--variants", nargs="+", default=_VARIANTS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=_DTYPES, choices=_DTYPES)
    parser.add_argument("--batch_size", type=int, default=4, help="images at a time (default 4)")
    parser.add_argument("--seconds", type=float, default=10, help="for each model and size (default 10)")
    parser.add_argument("--least", type=int, default=5, help="rounds, however long they take (default 5)")
    parser.add_argument("--apart", choices=["measure_rates", "time_model"], help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure_all(options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    shared = ["--threads", options.threads, "--seconds", options.seconds, "--least", options.least]
    for dtype in options.dtypes:
        report_progress(f"rates {dtype}")
        yield f"rates {dtype}", run_apart(__file__, "--apart", "measure_rates", "--dtypes", dtype, *shared)
        for variant in options.variants:
            for size in options.sizes:
                work = ["--variants", variant, "--sizes", size, "--dtypes", dtype, "--batch_size", options.batch_size]
                report_progress(name := f"{variant} {size} {dtype} x{options.batch_size}")
                try:
                    yield name, run_apart(__file__, "--apart", "time_model", *work, *shared)
                except Failed as error:
                    report_progress(f"{name} failed: {error}")


# The separate processes


def measure_rates(options: argparse.Namespace) -> dict:
    """Measure multiply-adds per second of each product and bytes per second of a copy; the best round counts."""
    import torch

    products = {}
    with torch.inference_mode():
        for rows, inputs, outputs in _SHAPES:
            work = _products_of(rows, inputs, outputs, getattr(torch, options.dtypes[0]))
            turns = common.take_turns(work, options.seconds / len(_SHAPES), options.least)
            for library, seconds in turns.items():
                products[f"{library} {rows} x {inputs} x {outputs}"] = rows * inputs * outputs / min(seconds)
        source = torch.ones(_COPIED_BYTES // 4)
        target = torch.empty_like(source)
        copies = common.take_turns({"copy": lambda: target.copy_(source)}, least=10, most=10)["copy"]
    return {**common.stamp(), "multiply_adds_per_second": products, "bytes_per_second": 2 * _COPIED_BYTES / min(copies)}


def _products_of(rows: int, inputs: int, outputs: int, dtype) -> dict:
    """Return the same product by torch's default and by oneDNN with a packed weight."""
    import torch
    from torch import nn

    tokens, linear = torch.rand(rows, inputs, dtype=dtype), nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    work = {"torch": lambda: linear(tokens)}
    if hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        work["oneDNN, packed"] = lambda: torch.ops.mkldnn._linear_pointwise(tokens, weight, None, "none", [], "")
    return work


def time_model(options: argparse.Namespace) -> dict:
    import torch
    from cost import cost
    from transformers import AutoModelForImageClassification

    import hf_vit

    (variant,), (size,), (dtype,) = options.variants, options.sizes, options.dtypes
    config = hf_vit.HfViTConfig.from_variant(variant, image_size=size, num_labels=1000)
    model = AutoModelForImageClassification.from_config(config, dtype=getattr(torch, dtype))
    model = model.optimize_for_inference(batch_size=options.batch_size)
    images = torch.rand(options.batch_size, 3, size, size).to(model.dtype)
    with torch.inference_mode():
        turns = common.take_turns({"hf_vit optimized": lambda: model(images)}, options.seconds, options.least)
    work = {"variant": variant, "size": size, "dtype": dtype, "batch_size": options.batch_size}
    return {**common.stamp(), **work, "turns": turns, "parts": [part._asdict() for part in cost(config)]}


# Markdown


def as_markdown(results: dict[str, dict]) -> str:
    sections = [common.machine_as_markdown(results)]
    for dtype in _DTYPES:
        if (rates := results.get(f"rates {dtype}")) is None:
            continue
        best = max(rates["multiply_adds_per_second"], key=rates["multiply_adds_per_second"].get)
        rate, bandwidth = rates["multiply_adds_per_second"][best], rates["bytes_per_second"]
        sections.append(
            f"**{dtype}**: at best {2e-9 * rate:.0f} GFLOP/s ({best}; a multiply-add counts twice), memory "
            f"{1e-9 * bandwidth:.1f} GB/s (a copy of {_COPIED_BYTES >> 20} MiB, read and written). The aim is "
            f"{AIMS[dtype]:g} of the floor."
        )
        rows = [floor_row(name, result, rate, bandwidth) for name, result in results.items()
                if result.get("dtype") == dtype]  # fmt: skip
        columns = ["", "floor, ms", "measured, ms", "of the floor", "GFLOP/s", "memory alone, ms"]
        sections.append(common.table(columns, rows))
    return "\n\n".join(sections)


def floor_row(name: str, result: dict, rate: float, bandwidth: float) -> list[str]:
    parts, batch = result["parts"], result["batch_size"]
    multiply_adds = batch * sum(part["multiply_adds"] for part in parts)
    floor, measured = multiply_adds / rate, statistics.median(result["turns"]["hf_vit optimized"])
    numbers = sum(part["weights"] + batch * part["activations"] for part in parts)
    memory = numbers * _ITEM_BYTES[result["dtype"]] / bandwidth
    figures = [f"{1000 * floor:.1f}", f"{1000 * measured:.1f}", f"{measured / floor:.2f}"]
    return [name, *figures, f"{2e-9 * multiply_adds / measured:.0f}", f"{1000 * memory:.1f}"]


if __name__ == "__main__":
    sys.exit(main())
