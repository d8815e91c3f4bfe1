"""PyTorch's products of few rows and matrices of few bits, on a GPU: a peer.

  python3 -m tests.bench.quantized_dot_torch [--rows "1;16"] [--sizes "4096x14336"]
      [--ways "int8 kernel;int8 compiled"] [--json PATH]

The shapes of `quantized_dot`: rows x summed axis x columns, in bfloat16. `kernel` is
the function that PyTorch has for such a matrix: ``torch._weight_int8pack_mm``, with a
scale for each column, and ``torch._weight_int4pack_mm``, with scales and zero points of
groups of 128. `compiled` is the product as written, by ``torch.compile``. Figures are
microseconds of all kernels of a call by PyTorch's profiler, on several sets of inputs
in turns. Needs PyTorch, not JAX.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

COMMAND = "python3 -m tests.bench.quantized_dot_torch"
ROWS = "1;16;64;256"
SIZES = "4096x14336;8192x28672"
GROUP = 128
TURNS = 10
BITS = {"int8": 8, "int4": 4, "fp8": 8, "bfloat16": 16}


def numbers(torch: Any, stored: str, n: int, k: int) -> tuple[Any, Any]:
    """Returns a matrix [n, k] of stored numbers, and scales of its columns."""
    scale = torch.full((n,), 0.01, device="cuda", dtype=torch.bfloat16)
    if stored == "int8":
        w = torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8)
    else:
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        w = w.to(torch.float8_e4m3fn) if stored == "fp8" else w
    return w, scale


def by_kernel(torch: Any, stored: str, n: int, k: int) -> Callable[[Any], Any]:
    """Returns the function of rows that PyTorch's own kernel computes."""
    if stored == "int8":
        w, scale = numbers(torch, "int8", n, k)
        return lambda x: torch._weight_int8pack_mm(x, w, scale)
    if stored == "int4":
        w = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        packed = torch._convert_weight_to_int4pack(w, 8)
        shape = k // GROUP, n, 2
        steps = torch.full(shape, 0.01, device="cuda", dtype=torch.bfloat16)
        return lambda x: torch._weight_int4pack_mm(x, packed, GROUP, steps)
    w, _ = numbers(torch, stored, n, k)
    return lambda x: torch.nn.functional.linear(x, w)


def by_compiler(torch: Any, stored: str, n: int, k: int) -> Callable[[Any], Any]:
    """Returns the function that ``torch.compile`` makes of the product as written."""
    w, scale = numbers(torch, stored, n, k)

    def written(x: Any, w: Any, scale: Any) -> Any:
        return torch.nn.functional.linear(x, w.to(x.dtype)) * scale

    run = torch.compile(written, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda x: run(x, w, scale)


MAKERS = {"kernel": by_kernel, "compiled": by_compiler}
WAYS = "bfloat16 kernel;int8 kernel;int4 kernel;int8 compiled;fp8 compiled"


def kernel_us(torch: Any, calls: list[Callable[[], Any]]) -> float:
    """Returns the mean time of all kernels of a call, in microseconds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(TURNS):
            for call in calls:
                call()
        torch.cuda.synchronize()
    total = sum(event.self_device_time_total for event in profile.key_averages())
    return total / (TURNS * len(calls))


def measured(torch: Any, way: str, rows: list[int], k: int, n: int) -> list[dict]:
    """Returns a row for each number of rows."""
    stored, by = way.split()
    size = k * n * BITS[stored] // 8
    runs = [MAKERS[by](torch, stored, n, k) for _ in range(3 if size < 1 << 27 else 2)]
    found = []
    for m in rows:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        calls = [functools.partial(run, x) for run in runs]
        row = {"m, k, n": [m, k, n], "kind": stored, "by": by}
        try:
            us = kernel_us(torch, calls)
            row |= {"us": round(us, 1), "gb_per_s": round(size / us / 1e3)}
        except Exception as problem:  # what a version of PyTorch does not have
            row["failed"] = str(problem).splitlines()[0][:200]
        print(row, flush=True)
        found.append(row)
    return found


def main() -> None:
    """Measures all shapes."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    name = torch.cuda.get_device_name(0)
    print(f"torch {torch.__version__}, {name}", flush=True)
    rows, found = [int(x) for x in given.rows.split(";")], []
    for way in given.ways.split(";"):
        for size in given.sizes.split(";"):
            k, n = (int(x) for x in size.split("x"))
            found += measured(torch, way, rows, k, n)
            torch.cuda.empty_cache()
    if given.json:
        head = {"command": COMMAND, "device": name, "torch": torch.__version__}
        given.json.write_text(json.dumps({**head, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
