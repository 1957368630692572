"""SonicMoE's block on one H100, in PyTorch: its rates as its own benchmark times them, and without pauses.

    pip install torch==2.11.0 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2
    pip install --no-deps sonic-moe==0.1.2.post1
    QUACK_CACHE_AUTOTUNING=1 python benchmarks/peers/sonic.py --json sonic.json

An environment of its own; nothing of expertmesh is imported. A rate is that of the experts' GEMMs, as in
`benchmarks.single_gpu_blocks`: 6 T K D F operations forward, 12 T K D F backward, whose time is that of both passes
less that of the forward. A block of less than about 5 ms waits for Python, which launches its kernels one by one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from sonicmoe.enums import ActivationType
from sonicmoe.functional import moe_TC_softmax_topk_layer
from torch.nn import functional
from triton.testing import do_bench

# Tokens, width, expert width, experts, choices: those of SonicMoE's figure of which a block takes 20 ms and more.
SHAPES = [
    (32768, 4096, 256, 256, 16),
    (32768, 4096, 512, 128, 8),
    (32768, 4096, 512, 256, 16),
]
BURST, PAUSE, TURNS, HOT = 500, 0.5, 5, 0.15  # milliseconds; seconds; turns, seconds of each
EXAMINED = 4  # tokens whose output is compared with float32


def operands(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """x, the router's weight and the experts': [E, 2 F, D] of gates and others in turns, and [E, D, F]."""
    tokens, width, expert_width, experts, _ = shape

    def normal(scale: float, *sizes: int) -> torch.Tensor:
        numbers = torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)
        return (scale * numbers).requires_grad_()

    return (
        normal(0.2, tokens, width),
        normal(width**-0.5, experts, width),
        normal(0.02, experts, 2 * expert_width, width),
        normal(0.02, experts, width, expert_width),
    )


def passes(arrays: tuple[torch.Tensor, ...], top_k: int) -> dict[str, Callable]:
    """The forward, and both passes."""
    x, router, up, down = arrays
    stream, dy = torch.cuda.current_stream().cuda_stream, 0.2 * torch.randn_like(x)

    def forward() -> torch.Tensor:
        weights = up.permute(1, 2, 0), None, down.permute(1, 2, 0), None
        kind = ActivationType.SWIGLU
        return moe_TC_softmax_topk_layer(x, router, *weights, top_k, stream, kind)[0]

    def both() -> None:
        for array in arrays:
            array.grad = None
        forward().backward(dy)

    return {"forward": forward, "both": both}


@torch.no_grad()
def error(y: torch.Tensor, arrays: tuple[torch.Tensor, ...], top_k: int) -> float:
    """The relative norm of the first tokens' error against float32."""
    x, router, up, down = (array.float() for array in (arrays[0][:EXAMINED], *arrays[1:]))
    scores, chosen = functional.linear(x, router).topk(top_k, dim=-1)
    weights = scores.softmax(-1)
    h = torch.einsum("tkfd,td->tkf", up[chosen], x)
    a = functional.silu(h[..., 0::2]) * h[..., 1::2]
    exact = torch.einsum("tk,tkdf,tkf->td", weights, down[chosen], a)
    return ((y[:EXAMINED].float() - exact).norm() / exact.norm()).item()


def as_published(function: Callable) -> float:
    """Milliseconds of a call: the mean of half a second of them, L2 cleared before each, after a pause."""
    time.sleep(PAUSE)
    return do_bench(function, warmup=5, rep=BURST)


def hot(function: Callable, milliseconds: float) -> float:
    """Milliseconds of a call without pauses: the median of turns, the first of which does not count."""
    calls, found = max(3, round(1e3 * HOT / milliseconds)), []
    for _ in range(1 + TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / calls)
    return statistics.median(found[1:])


def row_of(shape: tuple[int, ...]) -> dict:
    tokens, width, expert_width, _, top_k = shape
    arrays = operands(shape)
    functions = passes(arrays, top_k)
    found = {"shape": shape, "error": error(functions["forward"](), arrays, top_k)}
    functions["both"]()  # tunes its kernels
    published = {name: as_published(function) for name, function in functions.items()}
    times = {"published": published}
    times["hot"] = {name: hot(function, published[name]) for name, function in functions.items()}
    flops = 6 * tokens * top_k * width * expert_width / 1e9
    for protocol, of in times.items():
        rates = flops / of["forward"], 2 * flops / (of["both"] - of["forward"])
        found |= {protocol: dict(zip(("forward", "backward"), rates, strict=True))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where the rates are written, in TFLOP/s")
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        rows.append(row_of(shape))
        print(rows[-1], flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
