"""PyTorch's Llama on the attached device: by torchax, as rewritten, by torch.compile.

  python3 -m tests.bench.torch_on_gpu [--small] [--write]

One module of Hugging Face, in bfloat16, runs three ways: as torchax turns it into a JAX
program, as `rewriter.torch.optimize` does, and under `torch.compile` with PyTorch's own
attention. Each row is a forward and a gradient of the loss: milliseconds of a call, the
median of several runs of calls in a row, and seconds of the first call.

Needs the extra ``torch_tests``, and a PyTorch that knows the device for the last row.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from tests.bench import record

COMMAND = "python3 -m tests.bench.torch_on_gpu --write"
IN_A_ROW, RUNS = 10, 7
Call = Callable[[], Any]


def model(small: bool) -> torch.nn.Module:
    """A Llama of 0.4 billion parameters in bfloat16, or a small one."""
    sizes = (64, 128, 2, 4, 2, 128) if small else (1024, 4096, 12, 16, 4, 32000)
    width, hidden, layers, heads, key_heads, words = sizes
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, vocab_size=words,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def by_jax(
    module: Any, tokens: np.ndarray, wrap: Callable[..., Any]
) -> dict[str, Call]:
    """Calls of a module that `rewriter.torch.optimize` made, with arrays on device."""
    state = module.state()
    given = jnp.asarray(tokens)

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        out, _ = module.apply_to(state._replace(params=params), input_ids=tokens)
        return out["logits"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = forward(params, tokens).astype(jnp.float32)[:, :-1]
        log = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log, tokens[:, 1:, None], -1).mean()

    calls = {"forward": wrap(forward), "gradient": wrap(jax.value_and_grad(loss))}
    return {
        name: functools.partial(call, state.params, given)
        for name, call in calls.items()
    }


def by_torch(module: torch.nn.Module, tokens: np.ndarray) -> dict[str, Call]:
    """The same by ``torch.compile`` on CUDA, where torchax is not loaded."""
    module = module.to("cuda")
    given = torch.from_numpy(tokens).long().cuda()

    def loss() -> torch.Tensor:
        logits = module(input_ids=given).logits.float()[:, :-1]
        words = given[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words)

    compiled = torch.compile(lambda: module(input_ids=given).logits)
    compiled_loss = torch.compile(loss)

    def forward() -> None:
        with torch.no_grad():
            compiled()

    def gradient() -> None:
        module.zero_grad(set_to_none=True)
        compiled_loss().backward()

    return {"forward": forward, "gradient": gradient}


def wait(out: Any) -> None:
    """Waits until a call of JAX or of PyTorch has ended."""
    jax.block_until_ready(out)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(call: Call) -> dict[str, float]:
    """Milliseconds of a call, and seconds of the first one."""
    start = time.perf_counter()
    wait(call())
    first = time.perf_counter() - start
    wait(call())
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            out = call()
        wait(out)
        times.append(1e3 * (time.perf_counter() - start) / IN_A_ROW)
        del out
    return {"ms": round(statistics.median(times), 3), "first_s": round(first, 1)}


def apart(before: Any, after: Any) -> float:
    """The largest difference of two results, by the largest number of each array."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    each = [
        jnp.abs(a.astype("f4") - b.astype("f4")).max() / (jnp.abs(a).max() + 1e-30)
        for a, b in pairs
    ]
    return float(jnp.stack(each).max())


def peer_rows() -> list[dict[str, Any]]:
    """The rows of torch.compile, by a process of its own.

    torchax makes JAX a device of PyTorch, and torch.compile then compiles nothing.
    """
    command = [sys.executable, "-m", "tests.bench.torch_on_gpu", "--peer"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(run.stdout, flush=True)
    return [json.loads(x) for x in run.stdout.splitlines() if x.startswith("{")]


def main() -> None:
    """Prints the report and each row as it is measured, and keeps them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="to try it on a CPU")
    parser.add_argument("--write", action="store_true", help="keep the record")
    parser.add_argument("--peer", action="store_true", help="only torch.compile")
    given = parser.parse_args()
    shape = (2, 16) if given.small else (4, 2048)
    made = model(given.small)
    words = made.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, words, shape).astype("i4")
    if given.peer:
        for name, call in by_torch(made, tokens).items():
            row = {"pass": name, "by": "torch.compile", **measured(call)}
            print(json.dumps(row), flush=True)
        return
    import rewriter.torch  # not where torch.compile runs

    fast = rewriter.torch.optimize(made)
    plain = rewriter.torch.optimize(made, patterns="none")
    print(fast.report(input_ids=tokens), flush=True)
    counts = fast.report(input_ids=tokens).counts(replaced=True)
    ways = {
        "torchax": by_jax(plain, tokens, jax.jit),
        "rewritten": by_jax(fast, tokens, rewriter.optimize),
    }
    rows = []
    for name in ("forward", "gradient"):
        for way, calls in ways.items():
            rows.append({"pass": name, "by": way, **measured(calls[name])})
            print(json.dumps(rows[-1]), flush=True)
        differ = apart(ways["torchax"][name](), ways["rewritten"][name]())
        print(f"{name}: largest difference, relative {differ:.1e}", flush=True)
        rows[-1]["differs"] = differ
    if torch.cuda.is_available():
        rows += peer_rows()
    if given.write:
        names = ("torch", "torchax", "transformers")
        versions = {n: importlib.metadata.version(n) for n in names}
        found = {op: n for op, n in counts.items() if n}
        path = record.named("torch_on_gpu_h200")
        figures = {"versions": versions, "replaced": found, "rows": rows}
        record.write(path, COMMAND, shape=shape, **figures)


if __name__ == "__main__":
    main()
