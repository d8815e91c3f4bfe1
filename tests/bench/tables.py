"""The tables of the pages, from data: ``python3 -m tests.bench.tables --write``.

Without ``--write``, prints them. Supported ops come from the registry, figures
from ``tests/bench/results``, versions from ``versions.json`` there.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import pathlib
import re

import jax

import rewriter
from rewriter.measure.decision import fastest
from rewriter.measure.key import Key
from rewriter.measure.measurement import ESTIMATES
from rewriter.measure.sources import shipped
from rewriter.ops.device import KNOWN
from rewriter.ops.registry import package_of, registry
from rewriter.ops.tpu import generation
from rewriter.reports.report import size
from rewriter.site.implementation import XLA
from rewriter.tools import demo
from tests.bench import hopper_table, record
from tests.bench import tpu_attention_cycles as attention
from tests.bench import tpu_norms_cycles as norms
from tests.bench import tpu_ragged_bundles as ragged

ROOT = pathlib.Path(__file__).parent.parent.parent


def explained() -> str:
    """What explain says about the demo's model."""
    fn, values = demo.build()
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)
    return f"```text\n{rewriter.explain(fn)(*specs)}\n```"


def supported() -> str:
    """One row per op: what it is, its kernels."""
    rows = []
    for name in registry().ops():
        text = importlib.import_module(package_of(name)).__doc__ or ""
        kernels = ", ".join(k.name for k in registry().kernels(name)) or "reference"
        rows.append((f"`{name}`", text.splitlines()[0].split(": ", 1)[-1], kernels))
    return _table(("op", "computes", "kernels besides XLA's own"), rows)


def measured() -> str:
    """One row per benchmark, with the machine and the command."""
    rows, notes = [], []
    for path in sorted(record.RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or not data.get("about"):
            continue
        notes.append(f"`{data['command']}` ({data['about']})")
        for row in data["rows"]:
            before, after = row["original"], row["rewritten"]
            rows.append((
                row["what"], row["mode"], _ms(before), _ms(after),
                f"{row['speedup']:.1f}×", _memory(before), _memory(after),
            ))  # fmt: skip
    head = (
        "program", "pass", "original", "rewritten", "gain", "memory before", "after",
    )  # fmt: skip
    return f"{_table(head, rows)}\n\nReproduce with {' and '.join(notes)}."


def decoder() -> str:
    """One row per pass of the decoder of a billion parameters on an H200."""
    return _passes(json.loads(record.named("decoder_h200").read_text()))


def public_decoder() -> str:
    """One row per pass of a public library's decoder of that size."""
    return _passes(json.loads(record.named("public_decoder_h200").read_text()))


def public_experts() -> str:
    """One row per pass of a public library's decoder with experts."""
    return _passes(json.loads(record.named("public_experts_h200").read_text()))


def public_decode() -> str:
    """One row per cache of a public library's decoder that gives its next token."""
    data = json.loads(record.named("public_decode_h200").read_text())
    rows = []
    for row in data["results"]:
        old, new = row["written"], row["rewritten"]
        device = [f"{sum(x['device_ms'].values()):.1f} ms" for x in (old, new)]
        times = f"{old['ms']:.1f} ms", f"{new['ms']:.1f} ms", f"{row['faster']:.1f}×"
        rows.append((row["batch_and_tokens"][0], row["what"], *times, *device))
    head = ("sequences", "step", "original", "rewritten", "gain", "computing", "after")
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})"
    return (
        f"{_table(head, rows)}\n\nComputing is the time of the device's kernels; the "
        f"cache, which is not donated, is copied besides. Reproduce with {note}."
    )


def _passes(data: dict) -> str:
    by_hand = "by_hand" in data["results"][0]
    rows = []
    for row in data["results"]:
        b, t = row["batch_and_tokens"]
        old, new = row["written"], row["rewritten"]
        gain = f"{row['faster']:.1f}×" if "faster" in row else "runs"
        rows.append((
            f"{b} × {t - 1}", row["what"], _or_failed(old), _or_failed(new),
            *([_or_failed(row["by_hand"])] if by_hand else []), gain,
            size(old["bytes"]) if "bytes" in old else "", size(new["bytes"]),
        ))  # fmt: skip
    head = (
        "batch", "pass", "original", "rewritten",
        *(["cuDNN by hand"] if by_hand else []), "gain", "memory before", "after",
    )  # fmt: skip
    versions = ", ".join(
        f"{name} {data[name]}"
        for name in ("jax", "flax", "transformers", "tunix")
        if name in data
    )
    note = f"`{data['command']}` ({data['device']}, {versions}, {data['date']})"
    sites = data["results"][1]["sites"].items()
    found = ", ".join(f"{count} × {what}" for what, count in sites)
    told = f"Sites in the gradient: {found}. Reproduce with {note}."
    return f"{_table(head, rows)}\n\n{told}"


def tuned() -> str:
    """Shipped measurements of an H200 where a kernel beats XLA by far."""
    rows = []
    for op in registry().ops():
        for key, found in shipped(op).entries:
            decision = fastest(found)
            xla = next((m for m in found if m.implementation.forward == XLA), None)
            if decision is None or xla is None or decision.best is xla:
                continue
            best = decision.best
            if best.method in ESTIMATES:  # of TPUs, that are not there
                continue
            gain = (xla.median_us or 0.0) / (best.median_us or 1.0)
            rows.append((
                _use(key), key.passes, f"{(xla.median_us or 0) / 1e3:.2f} ms",
                f"{(best.median_us or 0) / 1e3:.2f} ms", best.implementation.name,
                f"{gain:.1f}×", _mib(xla.temp_bytes), _mib(best.temp_bytes),
            ))  # fmt: skip
    head = ("use", "pass", "XLA", "chosen", "kernel", "gain", "memory", "after")
    return _table(head, sorted(rows)) + (
        "\n\nDevice time by CUPTI, median of 20 runs that take turns on three and more "
        "sets of inputs; reproduce with `python3 -m tests.bench.tuning tune --shapes "
        "targets,others --out tuned.json` (NVIDIA H200, jax 0.11.2)."
    )


BESIDE = {"bias": "bias", "mask": "mask", "kv_lengths": "lengths"}
"""Operands of attention beside queries, keys and values, and their names here."""


def _use(key: Key) -> str:
    first, params = key.shapes[0][1], dict(key.params)
    dtype = {"bfloat16": "bf16", "float32": "f32"}[key.dtypes[0][1]]
    if key.op == "ragged_dot":
        g, k, n = dict(key.shapes)["rhs"]
        return f"ragged dot {first[0]}×{k}×{n} by {g} experts, {dtype}"
    if key.op == "gated_linear_unit":
        width = dict(key.shapes)["w_gate"][-1]
        return f"gated linear unit {first[0]}×{first[1]}×{width}, {dtype}"
    size = "×".join(map(str, first))
    if key.op in ("rms_norm", "layer_norm"):
        return f"{key.op.replace('_', ' ')} {size}, {dtype}"
    heads = dict(key.shapes)["k"][2]
    causal = "causal " if params["window"] == (None, 0) else ""
    grouped = f", {heads} key heads" if heads != first[2] else ""
    capped = ", soft cap" if params["softcap"] is not None else ""
    beside = "".join(
        f", {name}" for operand, name in BESIDE.items() if operand in dict(key.shapes)
    )
    return f"{causal}attention {size}{grouped}{capped}{beside}, {dtype}"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.0f} MiB"


def _or_failed(timing: dict) -> str:
    return f"{timing['ms']:.0f} ms" if "ms" in timing else "out of memory"


def training() -> str:
    """What came of training GPT-2 twice."""
    data = json.loads(record.named("training").read_text())
    row = data["results"]
    before, after = row["loss"], row["loss_rewritten"]
    seconds = row["step_seconds"]
    return (
        f"{row['steps']} steps of Hugging Face's GPT-2 (small) on the standard"
        f" library's sources: the loss falls from {before['first']:.2f} to"
        f" {before['last']:.3f} as written and to {after['last']:.3f} rewritten;"
        f" no step differs by more than {row['largest_difference']:.0e}, where two"
        " runs as written from weights that differ in the last bit differ by"
        f" {row['largest_difference_of_equal_runs']:.0e}. A step takes"
        f" {seconds['original']:.2f} s as written, {seconds['rewritten']:.2f} s after"
        f" (`{data['command']}`, 2 CPU cores, jax {data['jax']})."
    )


def sharded() -> str:
    """One row per mesh that a decoder's step was compiled for."""
    path = "sharded_cpu.json"
    data = json.loads((record.RESULTS / path).read_text())
    rows = [
        (
            row["mesh"] + ", keys in a ring" * row["ring"],
            _split_over(row["specs"][0]),
            *(_moved(row[x]) for x in ("original", "rewritten")),
            *(size(row[x]) for x in ("memory_before", "memory_after")),
        )
        for row in data["lines"]
        if (row["program"], row["pass"]) == ("decoder", "train step")
    ]  # fmt: skip
    head = ("mesh", "parameters split over", "moved between devices", "after",
            "memory per device", "after")  # fmt: skip
    count = len(data["lines"])
    return (
        f"{_table(head, rows)}\n\nA training step of a decoder of 3 layers, compiled "
        f"for 8 CPU devices. In all {count} lines of [the results]"
        f"(tests/bench/results/{path}), 6 programs on meshes of data, model, sequence "
        "and experts, there is no kind of collective that the original does not have, "
        "but for what goes around a ring; no more bytes are moved, those of a sum "
        "counted twice (it is scattered, and gathered); and memory grows by 5 % or 64 "
        "KiB at most. "
        "Reproduce with `XLA_FLAGS="
        "--xla_force_host_platform_device_count=8 python3 -m "
        f"tests.support.sharded_programs` (jax {data['jax']})."
    )


def sharded_decoder() -> str:
    """One row per mesh of GPUs that a public library's training step ran on."""
    path = "sharded_decoder_h200.json"
    data = json.loads((record.RESULTS / path).read_text())
    rows = []
    for row in data["results"]:
        old, new = row["written"], row["rewritten"]
        parts, b = row["data, model"], row["batch_and_tokens"][0]
        rows.append((
            f"{parts[0]} data × {parts[1]} model", b, _or_failed(old), _or_failed(new),
            f"{old['ms'] / new['ms']:.1f}×", *(size(x["bytes"]) for x in (old, new)),
            *(_moved(x["collectives"]) for x in (old, new)),
        ))  # fmt: skip
    head = ("mesh", "rows of 4096", "original", "rewritten", "gain",
            "memory per GPU", "after", "moved", "after")  # fmt: skip
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})"
    return f"{_table(head, rows)}\n\nReproduce with {note}."


def _split_over(specs: dict) -> str:
    """The mesh axes that any of several arrays is split over."""
    axes = sorted({a for spec in specs.values() for a in re.findall(r"'(\w+)'", spec)})
    return " and ".join(axes) or "nothing"


def _moved(collectives: dict) -> str:
    """Bytes of all collectives, by kind."""
    return ", ".join(f"{size(n)} {kind}" for kind, (_, n) in collectives.items())


def tpu_attention() -> str:
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
        f"{_table(head, rows)}\n\nCausal attention of 8192 tokens, a head of 128 in "
        "bfloat16; on v5p two heads, one for each core. By the TPU compiler's "
        "simulator, not on a TPU. JAX's is simulated as it is, the fastest of up to "
        "three block sizes, for gradients its two kernels alone. Of ours, 28 steps "
        "without and 8 with a mask are added up, each kind simulated on its own, since "
        "the simulator does not see the list of blocks; ≤ where only the second kind "
        "was. Reproduce with "
        f"`python3 -m tests.bench.tpu_attention_cycles` (jax {data['jax']}, "
        f"{data['date']})."
    )


def tpu_splash() -> str:
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
                    each = attention.steps(*map(int, sizes.split()[:2]))
                    theirs[sizes.strip()] = each * once(name, kernel)
            cells = []
            for which in (ours, theirs):
                best = min(which, key=which.__getitem__)
                cells += [f"{which[best] / 1e3:.0f}", best]
            rows.append((chip, label, *cells))
    head = ("TPU", "pass", "ours, thousand bundles", "its blocks",
            "JAX's splash attention", "its blocks")  # fmt: skip
    return (
        f"{_table(head, rows)}\n\nThe same attention: the instruction bundles of a "
        "kernel's code by the TPU compiler, times the blocks that some query sees, "
        "which says nothing of waits, since both read the list of these from memory, "
        "which the simulator does not see. Ours has code of its own for blocks with "
        "and without a mask, each counted apart, and blocks of queries and keys, then "
        "of those computed at a time; for gradients the better of two such. Splash's "
        "is the best of four configurations (queries, keys, keys at a time), for "
        "gradients its fused kernel with one, without the sum of its parts of the "
        "queries' gradients behind it. No TPU ran it. Reproduce with "
        f"`python3 -m tests.bench.tpu_attention_cycles` (jax {data['jax']}, "
        f"{data['date']})."
    )


def tpu_ragged() -> str:
    """Bundles of ragged dots, ours and megablox, by mode and generation."""
    path = "tpu_ragged_bundles.json"
    data = json.loads((record.RESULTS / path).read_text())

    def taken(chip: str, name: str) -> float:
        by = data["estimates"].get(f"{chip}, {name}, bundles")
        if not isinstance(by, dict):
            return math.inf
        return sum(by.values()) * ragged.steps(name, chip) / 1e3

    rows = []
    for sizes, mode in itertools.product(ragged.SIZES, ragged.MODES):
        cells = []
        for chip in ragged.CHIPS:
            mine, theirs = (
                min(taken(chip, name) for name in ragged.names(whose, mode, sizes))
                for whose in ("ours", "megablox")
            )
            cells.append(f"{mine:.0f} / {theirs:.0f}")
        rows.append((mode, "{}, {}, {} by {}".format(*sizes), *cells))
    head = ("mode", "m, k, n by groups", *ragged.CHIPS)
    return (
        f"{_table(head, rows)}\n\nThousands of instruction bundles, ours / JAX's "
        "megablox, each with the best of up to three tilings; bfloat16, whole tiles: "
        "the code of a kernel by the TPU compiler, times the steps that run it, which "
        "says nothing of waits. No TPU ran it. "
        "Reproduce with `python3 -m tests.bench.tpu_ragged_bundles` "
        f"(jax {data['jax']}, {data['date']})."
    )


def tpu_norms() -> str:
    """Simulated cycles of norms in a residual stream, XLA's and ours, by generation."""
    data = json.loads(record.named("tpu_norms_cycles").read_text())
    rows = []
    for chip, op, shape in itertools.product(
        norms.GENERATIONS, ("rms_norm", "layer_norm"), norms.SHAPES
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
        f"{_table(head, rows)}\n\nThousands of cycles, bfloat16: `h = x + addend` "
        "and its norm, both kept, and the gradients of a norm with what comes back "
        "along the stream added. By the TPU compiler's simulator, which knows no "
        "limit of the memory's bandwidth; behind them what the bytes of four arrays "
        "take at least, as ours reads and writes; XLA's fusions read and write five "
        "and more. No TPU ran it. Reproduce with "
        f"`python3 -m tests.bench.tpu_norms_cycles` (jax {data['jax']}, "
        f"{data['date']})."
    )


def hopper() -> str:
    """Our kernels for Hopper GPUs beside XLA and cuDNN."""
    head, rows = hopper_table.table()
    data = json.loads(record.named("hopper_norms_h200").read_text())
    benches = ("attention", "decode", "norms", "glu")
    commands = ", ".join(f"`python3 -m tests.bench.hopper_{x}`" for x in benches)
    return (
        f"{_table(head, rows)}\n\nMicroseconds on the device by CUPTI, medians of 20 "
        "runs in turns on three sets of inputs; bfloat16; both is the result and its "
        f"gradients. Reproduce with {commands} ({data['device']}, jax {data['jax']}, "
        f"{data['date']})."
    )


def versions() -> str:
    """One row per supported pair of Python and JAX."""
    pairs = json.loads(record.named("versions").read_text())["tested"]
    return _table(("Python", "jax", "tested"), [tuple(p) for p in pairs])


def _ms(timing: dict) -> str:
    return f"{timing['median_ms']:.3g} ms ±{timing['spread']:.0%}"


def _memory(timing: dict) -> str:
    count = timing["temp_bytes"]
    return "unknown" if count is None else size(count)


def _table(head: tuple, rows: list) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def attention_profile() -> str:
    """What our attention on a Hopper GPU is busy with, and what its warps wait for."""
    data = json.loads(record.named("attention_profile_h200").read_text())
    rows = []
    for row in data["results"]:
        busy, waits = row["busy_percent"], row["waits_cycles"]
        first = ", ".join(f"{n.replace('_', ' ')} {x}" for n, x in [*waits.items()][:4])
        spilled = row["instructions"]["LDL"] + row["instructions"]["STL"]
        rows.append([
            row["case"], f"{row['us']:.0f}", f"{busy['tensor_cores']:.0f} %",
            f"{busy['exponentials']:.0f} %", f"{busy['issue']:.0f} %",
            str(row["instructions"]["HGMMA"]), str(spilled), first,
        ])  # fmt: skip
    head = ["use", "µs", "tensor cores", "exponentials", "issue", "HGMMA", "LDL, STL",
            "waits, cycles between two instructions"]  # fmt: skip
    note = (
        "Shares of the time in which these are busy, instructions in SASS, and what a "
        "warp waits for, the longest first, with the warpgroup that only copies, by "
        f"Nsight Compute; of the forward as of commit {data['commit']}. Reproduce with "
        f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})."
    )
    return f"{_table(head, rows)}\n\n{note}"


TABLES = {
    "sharded": sharded,
    "sharded_decoder": sharded_decoder,
    "explain": explained,
    "supported": supported,
    "tuned": tuned,
    "measured": measured,
    "decoder": decoder,
    "public_decoder": public_decoder,
    "public_decode": public_decode,
    "public_experts": public_experts,
    "training": training,
    "hopper": hopper,
    "attention_profile": attention_profile,
    "tpu_attention": tpu_attention,
    "tpu_splash": tpu_splash,
    "tpu_ragged": tpu_ragged,
    "tpu_norms": tpu_norms,
    "versions": versions,
}


PAGES = ("README.md", "kernels/README.md")
"""What has tables."""


def filled(text: str) -> str:
    """Returns a page with every table that it has made anew."""
    for name in re.findall(r"<!-- table: (\w+) -->", text):
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        table = TABLES[name]()
        text = re.sub(
            pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
    return text


def main() -> None:
    """Prints or writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        for page in (ROOT / name for name in PAGES):
            page.write_text(filled(page.read_text()))
        return
    print("\n\n".join(make() for make in TABLES.values()))


if __name__ == "__main__":
    main()
