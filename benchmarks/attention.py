"""Speed of several implementations of attention in float32 on a CPU, in GFLOP/s.

    python benchmarks/attention.py [--threads 2] [--batch_sizes 1 8] [--heads 6 12] [--tokens 197 577] [--seconds 0.4]

Heads have 64 features, in the memory layout of a model's projections. MKL_ENABLE_INSTRUCTIONS=AVX2 makes MKL compute
as on AMD's CPUs; ONEDNN_MAX_CPU_ISA=AVX2 makes oneDNN compute as on CPUs without AVX-512. "packed product" is the rate
of a linear layer of 768 x 3072 after `optimize_for_inference`, for comparison.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from common import table
from torch import nn
from torch.nn import functional as F

from hf_vit.models.layers import blocked_attention_forward, onednn_attention_forward

_HEAD_DIM = 64
_SCALING = _HEAD_DIM**-0.5
_LOGITS = 2**18  # logits of a block of heads in one thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--heads", type=int, nargs="+", default=(6, 12))
    parser.add_argument("--tokens", type=int, nargs="+", default=(197, 577))
    parser.add_argument("--seconds", type=float, default=0.4, help="time for each implementation and shape")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    with torch.inference_mode():
        for shape in itertools.product(options.batch_sizes, options.heads, options.tokens):
            rates = measure(*shape, options.only, options.seconds)
            rows.append([" x ".join(map(str, shape)), *(f"{rate:.0f}" for rate in rates)])
        print(f"packed product: {rate_of_products(options.seconds):.0f} GFLOP/s\n")
    print(table(["batch x heads x tokens", *options.only], rows))


def measure(batch: int, heads: int, tokens: int, ways: Sequence[str], seconds: float) -> list[float]:
    """Return the GFLOP/s of each implementation, from its median time; they take turns."""
    states = [torch.randn(batch, tokens, heads * _HEAD_DIM) for _ in range(3)]
    query, key, value = (x.unflatten(2, (heads, _HEAD_DIM)).transpose(1, 2) for x in states)
    logits = query.double() @ key.double().transpose(2, 3) * _SCALING
    expected = (logits.softmax(dim=-1) @ value.double()).transpose(1, 2)
    calls = {name: functools.partial(WAYS[name], query, key, value) for name in ways}
    for call in calls.values():
        for _ in range(3):
            torch.testing.assert_close(call(), expected, check_dtype=False, rtol=0, atol=1e-5)
    times = take_turns(calls, seconds)
    return [4 * batch * heads * tokens**2 * _HEAD_DIM / times[name] / 1e9 for name in ways]


def take_turns(calls: dict[str, Callable], seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(measured) for name, measured in times.items()}


def rate_of_products(seconds: float, tokens: int = 197, inputs: int = 768, outputs: int = 3072) -> float:
    rows, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    call = functools.partial(torch.ops.mkldnn._linear_pointwise, rows, weight, None, "none", [], "")
    return 2 * tokens * inputs * outputs / take_turns({"product": call}, seconds)["product"] / 1e9


def torch_kernel(query, key, value):
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def torch_kernel_contiguous(query, key, value):
    return torch_kernel(query.contiguous(), key.contiguous(), value.contiguous())


def batched_products(query, key, value):
    return blocked_attention_forward(nn.Module(), query, key, value, scaling=_SCALING)[0]


def products_in_place(query, key, value, normalise: Callable | None = None):
    """Attention by `torch.baddbmm` and `bmm` on blocks of heads, with one buffer that stays in the cache."""
    batch, heads, tokens, _ = query.shape
    size = min(torch.get_num_threads() * max(_LOGITS // tokens**2, 1), batch * heads)
    attended, buffer = query.new_empty(batch * heads, tokens, _HEAD_DIM), query.new_empty(size, tokens, tokens)
    inputs = [states.flatten(0, 1).split(size) for states in (query, key, value)]
    for q, k, v, out in zip(*inputs, attended.split(size), strict=True):
        logits = buffer[: len(q)]
        torch.baddbmm(logits, q, k.transpose(1, 2), beta=0, alpha=_SCALING, out=logits)
        if normalise is None:
            torch.bmm(torch.softmax(logits, -1, out=logits), v, out=out)
        else:
            torch.bmm(logits.sub_(logits.amax(-1, keepdim=True)).exp_(), v, out=out)
            normalise(out, logits.sum(-1, keepdim=True))
    return attended.view(query.shape).transpose(1, 2)


def normalised_last(query, key, value):
    """Attention as in `products_in_place`, but normalised after the product with the values."""
    return products_in_place(query, key, value, torch.Tensor.div_)


def product_for_each_head(query, key, value):
    """Attention by oneDNN's linear layer; its weights are the keys of a head, then its values."""
    multiply, plain = torch.ops.mkldnn._linear_pointwise, (None, "none", [], "")
    heads = zip(*(x.contiguous().flatten(0, 1) for x in (query * _SCALING, key, value.transpose(2, 3))), strict=True)
    attended = [multiply(multiply(q, k, *plain).softmax(dim=-1), v, *plain) for q, k, v in heads]
    return torch.stack(attended).view(query.shape).transpose(1, 2)


def grouped_convolutions(query, key, value):
    """Attention by oneDNN's 1 x 1 convolutions, with a group for each head; its pixels are the queries."""
    batch, heads, tokens, _ = query.shape
    groups = batch * heads
    pixels = query.transpose(2, 3).reshape(1, groups * _HEAD_DIM, 1, tokens)
    logits = torch.conv2d(pixels, (key * _SCALING).reshape(groups * tokens, _HEAD_DIM, 1, 1), groups=groups)
    weights = logits.view(groups, tokens, tokens).softmax(dim=1).view(1, groups * tokens, 1, tokens)
    attended = torch.conv2d(weights, value.transpose(2, 3).reshape(groups * _HEAD_DIM, tokens, 1, 1), groups=groups)
    return attended.view(batch, heads, _HEAD_DIM, tokens).permute(0, 3, 1, 2)


def onednn_program(query, key, value):
    return onednn_attention_forward(nn.Module(), query, key, value, scaling=_SCALING)[0]


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": torch_kernel,
    "torch, contiguous": torch_kernel_contiguous,
    "bmm": batched_products,
    "bmm in place": products_in_place,
    "normalised last": normalised_last,
    "linear per head": product_for_each_head,
    "convolutions": grouped_convolutions,
    "oneDNN program": onednn_program,
}

if __name__ == "__main__":
    main()
