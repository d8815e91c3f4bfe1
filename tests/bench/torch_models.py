"""What is found in PyTorch models, and how far from PyTorch's own numbers it is.

``python3 -m tests.bench.torch_models --write`` fills the table of docs/torch.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json

import rewriter.torch
from tests.bench import record
from tests.support import torch_models as models


def measured(name: str) -> dict:
    """One model's row."""
    model, arguments = models.made(name)
    want, grads = models.gradients(model, arguments)
    fast = rewriter.torch.optimize(model, implementation=models.FORCED)
    got, found = models.gradients(fast, arguments)
    report = fast.report(**arguments)
    counts = {op: n for op, n in report.counts().items() if n and op in models.OPS}
    replaced = report.counts(replaced=True)
    pairs = [(grads[k], found[k]) for k in grads if grads[k] is not None]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return {
        "model": name,
        "found": counts,
        "kernels": sum(replaced[op] for op in counts),
        "by_hand": sum(models.MODELS[name][1].values()),
        "result": float((got - want).abs().max()),
        "gradients": max(float((a - b).abs().max()) for a, b in pairs) / largest,
    }


def main() -> None:
    """Measures, prints, and keeps the rows if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    rows = [measured(name) for name in models.MODELS]
    for row in rows:
        print(row)
    names = ("jax", "torch", "torchax", "transformers")
    versions = {n: importlib.metadata.version(n) for n in names}
    if write:
        text = json.dumps({"versions": versions, "rows": rows}, indent=1)
        record.named("torch_models").write_text(text + "\n")


if __name__ == "__main__":
    main()
