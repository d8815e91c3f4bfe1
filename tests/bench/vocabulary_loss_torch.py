"""The loss over a vocabulary and its gradients by torch.compile, on a GPU.

  python3 -m tests.bench.vocabulary_loss_torch

A peer of `vocabulary_loss --gpu`: the same shapes in bfloat16. Figures are milliseconds
of a call (median, with the device waited for) and the most memory beyond arguments and
results.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

SHAPES = ((8192, 768, 50257), (8192, 4096, 128256), (32768, 2560, 128256))


def measured(torch: Any, shape: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """Times of a shape, forward alone and with gradients."""
    n, k, v = shape
    torch.manual_seed(0)
    x = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(k, v, device="cuda", dtype=torch.bfloat16) * k**-0.5
    w.requires_grad_(True)
    labels = torch.randint(0, v, (n,), device="cuda")

    def loss(x: Any, w: Any) -> Any:
        return torch.nn.functional.cross_entropy((x @ w).float(), labels)

    run = torch.compile(loss, dynamic=False)

    def both() -> None:
        x.grad = w.grad = None
        run(x, w).backward()

    def forward() -> None:
        with torch.no_grad():
            run(x, w)

    found: dict[str, Any] = {}
    for name, call in (("with gradients", both), ("forward", forward)):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        compiled = time.perf_counter() - start
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        own = 2 * 2 * (n * k + k * v)  # arguments and results
        most = torch.cuda.max_memory_allocated() - own
        found[name] = {
            "ms": round(statistics.median(times), 3),
            "least_ms": round(min(times), 3),
            "temporary_mib": round(most / 2**20, 1),
            "compile_s": round(compiled, 1),
        }
        print(f"  torch.compile {shape} {name:15} {found[name]}", flush=True)
    return found


def main() -> None:
    """Measures all shapes."""
    import torch

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}", flush=True)
    for shape in SHAPES:
        measured(torch, shape, repeats=10)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
