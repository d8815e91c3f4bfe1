"""The models of `models` as PyTorch's classes under torch.compile: a peer.

  python3 -m tests.bench.models_torch [--only NAMES] [--mode MODE] [--json PATH]

The same architectures, sizes, batches and losses in bfloat16, with PyTorch's own best
attention, compiled with ``mode="max-autotune-no-cudagraphs"`` or the one given:
``default`` compiles in far less time. A step is the loss, its gradients and a fused
`torch.optim.AdamW`. Figures are milliseconds of a call (median, several in a row),
those of its kernels alone, the most memory beyond weights, gradients and the
optimizer's state, and seconds until the first call has ended.

Needs PyTorch and transformers before 5. JAX only draws the batches, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import torch
import transformers

from tests.bench import in_turns
from tests.bench.public_models import MODELS, Batch, Model

IN_A_ROW = 10
"""Calls that follow each other without waiting, as in a training loop."""
SHOWN = 8
"""How many kernels of a profile are kept."""
Call = Callable[[], Any]


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def built(model: Model, small: bool) -> tuple[Any, Any, str]:
    """Returns the configuration, the module and the attention that it uses."""
    config = getattr(transformers, f"{model.family}Config")(
        **(model.small if small else model.sizes)
    )
    made = getattr(transformers, f"{model.family}{model.head}")
    for attention in ("sdpa", "eager"):
        try:
            module = made._from_config(config, attn_implementation=attention)
        except ValueError:  # this model has no such attention
            continue
        return config, module.to(torch.bfloat16).to(device()).eval(), attention
    raise ValueError(f"{model.name}: no attention of transformers serves it")


def loss_of(model: Model, logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """The loss that `public_models` states for JAX."""
    logits = logits.float()
    if model.family == "ViT":
        labels = torch.arange(len(logits), device=device()) % logits.shape[1]
        return torch.nn.functional.cross_entropy(logits, labels)
    if model.head == "ForMaskedLM":
        labels, mask = batch["input_ids"].flatten(), batch["attention_mask"].flatten()
        logits = logits.flatten(0, 1)
        each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return (each * mask).sum() / mask.sum()
    labels = batch.get("decoder_input_ids", batch["input_ids"])[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)


def calls(
    model: Model, module: Any, batch: dict[str, Any], mode: str
) -> dict[str, Call]:
    """Returns a compiled inference and a compiled step."""

    def logits() -> torch.Tensor:
        return module(**batch).logits

    forward = torch.compile(logits, mode=mode)
    loss = torch.compile(lambda: loss_of(model, logits(), batch), mode=mode)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def inference() -> Any:
        with torch.no_grad():
            return forward()

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value

    return {"inference": inference, "step": step}


def on_device(batch: Batch) -> dict[str, Any]:
    made = {name: torch.tensor(x).to(device()) for name, x in batch.items()}
    return {
        name: x.to(torch.bfloat16) if x.is_floating_point() else x.long()
        for name, x in made.items()
    }


def wait() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def timed(call: Call, repeats: int) -> dict[str, float]:
    """Milliseconds of a call, and bytes beyond what is held between calls."""
    call()
    wait()
    found: dict[str, float] = {}
    if device() == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        wait()
        most = torch.cuda.max_memory_allocated()
        found["temporary_bytes"] = most - held
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        wait()
        times.append(1e3 * (time.perf_counter() - start) / IN_A_ROW)
    return {"ms": round(statistics.median(times), 3), **found}


def profile(call: Call) -> dict[str, float]:
    """Milliseconds of the kernels that take most time, and of all."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        call()
        wait()
    each = {
        row.key[:60]: row.self_device_time_total / 1e3 for row in seen.key_averages()
    }
    most = sorted(each.items(), key=lambda item: -item[1])[:SHOWN]
    return {"all": round(sum(each.values()), 3), **{n: round(ms, 3) for n, ms in most}}


def measure_all(given: argparse.Namespace, names: Sequence[str]) -> None:
    """Compiles the models of these names, and measures when the device is free."""
    prepared = []
    for model in (m for m in MODELS if m.name in names):
        try:
            config, module, attention = built(model, given.small)
            batch = on_device(model.batch(config, given.small))
            for what, call in calls(model, module, batch, given.mode).items():
                if what not in given.passes.split(","):
                    continue
                start = time.perf_counter()
                call()
                wait()
                seconds = round(time.perf_counter() - start, 1)
                row = {"model": model.name, "pass": what, "attention": attention}
                row["mode"] = given.mode
                prepared.append((call, row | {"compile_s": seconds}))
                print(f"compiled {model.name}, {what}, {seconds} s", flush=True)
        except Exception:
            traceback.print_exc()
    rows = []
    with in_turns.turn():
        for call, row in prepared:
            row |= timed(call, given.repeats)
            if device() == "cuda":
                row["profile"] = profile(call)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if given.json:
                in_turns.write(given.json, rows)


def main() -> None:
    """Measures the models that are asked for, in several processes if so asked."""
    parser = in_turns.parser(__doc__)
    parser.add_argument(
        "--mode", default="max-autotune-no-cudagraphs", help="of torch.compile"
    )
    given = parser.parse_args()
    names = [model.name for model in MODELS]
    rows = in_turns.rows_of("tests.bench.models_torch", names, given, measure_all)
    if rows is not None and given.json:
        record = {
            "command": f"python3 -m tests.bench.models_torch --mode {given.mode}"
            + " --small" * given.small,
            "device": torch.cuda.get_device_name() if device() == "cuda" else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "results": rows,
        }
        text = json.dumps(record, indent=1)
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
