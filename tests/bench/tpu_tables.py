"""Tables of what the TPU compiler's simulator says of our kernels and of JAX's own."""

from __future__ import annotations

import itertools
import json
import math
import re

from rewriter.ops.device import KNOWN
from rewriter.ops.tpu import generation
from tests.bench import record
from tests.bench import tpu_attention_cycles as of_attention
from tests.bench import tpu_norms_cycles as of_norms
from tests.bench import tpu_ragged_bundles as of_ragged
from tests.bench.markdown import table


def attention() -> str:
    """Simulated cycles of causal attention, ours and JAX's own, by generation."""
    path = "tpu_attention_cycles.json"
    data = json.loads((record.RESULTS / path).read_text())
    found = {
        name.removesuffix(", cycles"): cycles
        for name, cycles in data["estimates"].items()
        if name.endswith(", cycles") and isinstance(cycles, dict)
    }
    rows = []
    for chip in ("v5e", "v5p", "v6e"):
        for label, kind, blocks, kernel in (
            ("forward", "", "1024 1024 1024 512", "flash_attention"),
            ("gradients", "backward ", "1024 1024 512 512", "flash_mha_bwd"),
        ):
            ours = [
                sum(found.get(f"{chip}, ours {kind}{part}{blocks}", {}).values()) / 16
                for part in ("", "part ")
            ]  # a block, of 16 that were simulated
            theirs = [
                sum(n for operation, n in by.items() if operation.startswith(kernel))
                for name, by in found.items()
                if name.startswith(f"{chip}, flash {kind}")
            ]
            theirs = [n for n in theirs if n]
            whole, part = ours
            if part and theirs:  # steps with a mask take longer
                made = 28 * (whole or part) + 8 * part
                mine = f"{'' if whole else '≤ '}{made / 1e3:.0f}"
                rows.append((chip, label, mine, f"{min(theirs) / 1e3:.0f}"))
    head = ("TPU", "pass", "ours, thousand cycles", "JAX's flash attention")
    return (
        f"{table(head, rows)}\n\nThe use is causal attention of 8192 tokens with a "
        "head of 128 in bfloat16, and with two heads on v5p, one for each core. The "
        "TPU compiler's simulator gives the cycles. No TPU ran it. JAX's kernel is "
        "simulated as it is, with the fastest of up to three block sizes. For "
        "gradients, only its two kernels are counted. The simulator does not see our "
        "list of blocks. So 28 steps without and 8 with a mask are simulated apart and "
        "added up. A ≤ says that only the second kind was simulated. Reproduce with "
        f"`python3 -m tests.bench.tpu_attention_cycles` (jax {data['jax']}, "
        f"{data['date']})."
    )


def splash() -> str:
    """Bundles of causal attention, ours and JAX's splash attention, by generation."""
    data = json.loads(record.named("tpu_attention_cycles").read_text())
    found = {
        name.removesuffix(", bundles"): by
        for name, by in data["estimates"].items()
        if name.endswith(", bundles") and isinstance(by, dict)
    }

    def once(name: str, kernel: str) -> int:
        """Bundles of a kernel's code."""
        return sum(n for key, n in found[name].items() if key.startswith(kernel))

    whole, part = 28, 8  # blocks of 1024 x 1024 below and on the diagonal
    rows = []
    for chip in ("v5e", "v5p"):
        for label, kind, kernel in (
            ("forward", "", "splash_mha_fwd"),
            ("gradients", "backward ", "splash_mha_dkv"),
        ):
            ours, theirs = {}, {}
            for name in found:
                head, sizes = re.match(r"(.*?)((?: \d+)*)$", name).groups()
                if head == f"{chip}, ours {kind}part":
                    full = f"{chip}, ours {kind}{sizes.strip()}"
                    ours[sizes.strip()] = whole * once(full, "attention")
                    ours[sizes.strip()] += part * once(name, "attention")
                if head == f"{chip}, splash {kind}".rstrip():
                    each = of_attention.steps(*map(int, sizes.split()[:2]))
                    theirs[sizes.strip()] = each * once(name, kernel)
            cells = []
            for which in (ours, theirs):
                best = min(which, key=which.__getitem__)
                cells += [f"{which[best] / 1e3:.0f}", best]
            rows.append((chip, label, *cells))
    head = ("TPU", "pass", "ours, thousand bundles", "its blocks",
            "JAX's splash attention", "its blocks")  # fmt: skip
    return (
        f"{table(head, rows)}\n\nThe use is the same attention. A figure is the "
        "number of instruction bundles in a kernel's code, times the blocks that some "
        "query sees. It says nothing of waits. Both kernels read the list of blocks "
        "from memory, which the simulator does not see.\n\n"
        "Our kernel has separate code for blocks with and without a mask, and each is "
        "counted apart. Its blocks are given as queries, keys, queries at a time, keys "
        "at a time. For gradients, it is the better of two such choices. Splash "
        "attention's is the best of four: queries, keys, keys at a time. For gradients "
        "it is its fused kernel with one choice, without the sum of the queries' "
        "gradients that follows it. No TPU ran it. Reproduce with "
        f"`python3 -m tests.bench.tpu_attention_cycles` (jax {data['jax']}, "
        f"{data['date']})."
    )


def ragged() -> str:
    """Bundles of ragged dots, ours and megablox, by mode and generation."""
    path = "tpu_ragged_bundles.json"
    data = json.loads((record.RESULTS / path).read_text())

    def taken(chip: str, name: str) -> float:
        by = data["estimates"].get(f"{chip}, {name}, bundles")
        if not isinstance(by, dict):
            return math.inf
        return sum(by.values()) * of_ragged.steps(name, chip) / 1e3

    rows = []
    for sizes, mode in itertools.product(of_ragged.SIZES, of_ragged.MODES):
        cells = []
        for chip in of_ragged.CHIPS:
            mine, theirs = (
                min(taken(chip, name) for name in of_ragged.names(whose, mode, sizes))
                for whose in ("ours", "megablox")
            )
            cells.append(f"{mine:.0f} / {theirs:.0f}")
        rows.append((mode, "{}, {}, {} by {}".format(*sizes), *cells))
    head = ("mode", "m, k, n by groups", *of_ragged.CHIPS)
    return (
        f"{table(head, rows)}\n\nEach cell is ours / JAX's megablox, in thousands of "
        "instruction bundles, each with the best of up to three tilings. The dtype is "
        "bfloat16, and all tiles are whole. A figure is the number of bundles in a "
        "kernel's code, times the steps that run it. It says nothing of waits. No TPU "
        "ran it. Reproduce with `python3 -m tests.bench.tpu_ragged_bundles` "
        f"(jax {data['jax']}, {data['date']})."
    )


def norms() -> str:
    """Simulated cycles of norms in a residual stream, XLA's and ours, by generation."""
    data = json.loads(record.named("tpu_norms_cycles").read_text())
    rows = []
    for chip, op, shape in itertools.product(
        of_norms.GENERATIONS,
        ("rms_norm", "layer_norm"),
        of_norms.SHAPES,
    ):
        on = KNOWN[f"tpu_{chip}"]
        of_array = 2 * math.prod(map(int, shape.split())) / on.bandwidth
        cells = []
        for what in ("sum", "gradients"):
            for whose in ("xla", "ours"):
                name = f"{chip}, {whose} {what} {op} {shape}, cycles"
                cells.append(f"{sum(data['estimates'][name].values()) / 1e3:.0f}")
        least = 4 * of_array * generation(on).clock  # both read and write four arrays
        rows.append((chip, op, shape.replace(" ", "×"), *cells, f"{least / 1e3:.0f}"))
    head = ("TPU", "op", "rows", "sum and norm, XLA", "ours", "gradients, XLA", "ours",
            "bytes of either")  # fmt: skip
    return (
        f"{table(head, rows)}\n\nFigures are thousands of cycles in bfloat16, by the "
        "TPU compiler's simulator. The first pair is `h = x + addend` and its norm, "
        "both kept. The second is the gradient of a norm, with the gradient of the "
        "residual stream added. The simulator knows no limit of the memory's "
        "bandwidth. So the last column says how long it takes at least to move four "
        "arrays, which is what our kernel reads and writes. XLA's fusions read and "
        "write five or more. No TPU ran it. Reproduce with "
        f"`python3 -m tests.bench.tpu_norms_cycles` (jax {data['jax']}, "
        f"{data['date']})."
    )
