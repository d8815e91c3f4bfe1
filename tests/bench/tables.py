"""The tables of the pages, from data: ``python3 -m tests.bench.tables --write``.

Without ``--write``, prints them. Names of tables do that for those alone. Supported ops
come from the registry, options and the API from docstrings, figures from
``tests/bench/results``, versions from ``versions.json`` there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import re
from collections.abc import Sequence

import jax

import rewriter
from docs import hooks, public_names
from rewriter.config import OPTIONS, Config
from rewriter.measure.decision import fastest
from rewriter.measure.key import Key
from rewriter.measure.measurement import ESTIMATES, time_text
from rewriter.measure.sources import shipped
from rewriter.ops.registry import package_of, registry
from rewriter.run.pipeline import PASSES
from rewriter.site.implementation import XLA
from rewriter.support.assumptions import ASSUMPTIONS
from rewriter.support.sizes import size_text
from rewriter.tools import demo
from tests.bench import (
    choices_table,
    few_bits_tables,
    hopper_table,
    record,
    torch_tables,
    tpu_tables,
)
from tests.bench.markdown import table

ROOT = pathlib.Path(__file__).parent.parent.parent


def explained() -> str:
    """What explain says about the demo's model."""
    fn, values = demo.build()
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)
    return f"```text\n{rewriter.explain(fn)(*specs)}\n```"


def first_example() -> str:
    """What the README's first example prints; `gains` says by which command."""
    data = json.loads(record.named("first_example").read_text())
    return f"```text\n{data['text']}\n```"


def gains() -> str:
    """A few programs of every kind, as written and as rewritten."""
    rows: list[tuple[str, ...]] = []
    notes: dict[str, list[str]] = {}
    for name, whats in {
        "first_example": {
            "causal attention 1×2048×4×64": "causal attention of 2048 tokens"
        },
        "ops": {
            "the demo's transformer, 2048 tokens": "the demo's transformer",
            "ragged_dot 2048×512 by 64 experts": "ragged dot of 64 experts",
        },
    }.items():
        data = json.loads(record.named(name).read_text())
        notes.setdefault(data["about"], []).append(f"`{data['command']}`")
        for row in data["rows"]:
            if row["what"] in whats:
                old, new = row["original"], row["rewritten"]
                ms = [time_text(1e3 * x["median_ms"]) for x in (old, new)]
                both = row["mode"] == "forward_and_vjp"
                if name == "ops" and "demo" in row["what"] and not both:
                    continue
                rows.append((
                    "2 CPU cores", whats[row["what"]] + ", with gradients" * both, *ms,
                    f"{row['speedup']:.1f}×", _memory(old), _memory(new),
                ))  # fmt: skip
    for name, what, number in (
        ("public_decoder_h200", "flax Llama of a billion parameters, gradient", 1),
        ("public_experts_h200", "six layers of Gemma 4 with 128 experts, forward", 0),
    ):
        data = json.loads(record.named(name).read_text())
        on = f"{data['device']}, jax {data['jax']}"
        notes.setdefault(on, []).append(f"`{data['command']}`")
        row = data["results"][number]
        old, new = row["written"], row["rewritten"]
        rows.append((
            data["device"].removeprefix("NVIDIA "), what, _or_failed(old),
            _or_failed(new), f"{row['faster']:.1f}×", size_text(old["bytes"]),
            size_text(new["bytes"]),
        ))  # fmt: skip
    data = json.loads(record.named("models_h200").read_text())
    on = f"{data['device']}, jax {data['jax']}"
    notes.setdefault(on, []).append(f"`{data['command']}`")
    row = next(r for r in data["results"] if r["pass"] == "step")
    what = f"flax {row['model']}, training step"
    rows.append(("H200", what, *_model_figures(row)))
    head = ("on", "program", "original", "rewritten", "gain", "memory", "after")
    told_by = " ".join(f"On {on}: {', '.join(c)}." for on, c in notes.items())
    return f"{table(head, rows)}\n\nThese commands measure them. {told_by}"


def _model_figures(row: dict) -> tuple[str, ...]:
    """Times, gain and memory of a pass of a public model."""
    old, new = row["written"], row["rewritten"]
    memory = [size_text(x["temporary_bytes"]) for x in (old, new)]
    return *(f"{x['ms']:.3g} ms" for x in (old, new)), f"{row['faster']:.1f}×", *memory


def other_models() -> str:
    """One row per pass of public models for which nothing was tuned."""
    return models("models_other_h200", shows_profiles=False)


def models(name: str = "models_h200", *, shows_profiles: bool = True) -> str:
    """One row per public model and pass, and what takes the rewritten step's time."""
    data = json.loads(record.named(name).read_text())
    rows, profiles = [], []
    for row in data["results"]:
        old, new = row["written"], row["rewritten"]
        seconds = [f"{x['lower_s'] + x['compile_s']:.0f} s" for x in (old, new)]
        share = f"{row['share_of_peak']:.0%}"
        figures = *_model_figures(row), share, *seconds
        rows.append((row["model"], row["pass"], *figures))
        if row["pass"] == "step":
            parts = list(row["profile"].items())[:4]
            most = ", ".join(f"`{name}` {ms:.1f}" for name, ms in parts)
            times = f"{old['device_ms']:.1f} → {new['device_ms']:.1f} ms"
            profiles.append(f"{row['model']}: {times}. Of the latter: {most}.")
    head = (
        "model", "pass", "original", "rewritten", "gain", "memory before", "after",
        "share of the peak", "until compiled, before", "after",
    )  # fmt: skip
    versions = f"jax {data['jax']}, transformers {data['transformers']}"
    note = f"`{data['command']}` ({data['device']}, {versions}, {data['date']})"
    if not shows_profiles:
        return f"{table(head, rows)}\n\nReproduce with {note}."
    return (
        f"{table(head, rows)}\n\nThese are the device's times of a step, and what "
        f"takes most of the rewritten one. {' '.join(profiles)} Reproduce with {note}."
    )


def keras_models() -> str:
    """One row per backbone of Keras Hub: what is replaced, and how far numbers are."""
    data = json.loads(record.named("keras_models").read_text())
    passes = ("forward", "gradient")
    rows = []
    for row in data["rows"]:
        found = [row[p]["replaced"] for p in passes]
        counts = [
            " and ".join(dict.fromkeys(str(f[k]) for f in found)) + f" of {n}"
            if n
            else "none"
            for k, n in enumerate(row["written"])
        ]
        errors = [f"{row[p]['error']:.0e}" for p in passes]
        rows.append((row["model"], *counts, *errors))
    head = ("model", "attention", "norms", "gated units", "error", "of gradients")
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    return f"{table(head, rows)}\n\nOn a CPU, with jax {data['jax']}, {versions}."


def options() -> str:
    """One row per option of `rewriter.config`, with its default."""
    about = public_names.arguments(Config.__doc__ or "", "Attributes")
    defaults = Config()
    return table(
        ("option", "default", "what it does"),
        [(f"`{n}`", f"`{getattr(defaults, n)!r}`", about[n]) for n in OPTIONS],
    )


def assumptions() -> str:
    """One row per thing that may be taken for granted."""
    rows = [(f'`"{name}"`', f"{text}.") for name, text in ASSUMPTIONS.items()]
    return table(("name", "what it says"), rows)


def passes() -> str:
    """One row per pass of the pipeline."""
    rows = []
    for step in PASSES:
        about = (step.run.__doc__ or "").strip().splitlines()[0]
        rows.append((f"`{step.name}`", about, "yes" if step.optional else ""))
    return table(("pass", "what it does", "can be left out"), rows)


def supported() -> str:
    """One row per op: what it is, its kernels."""
    rows = []
    for name in registry().ops():
        text = registry().op(name).about
        text = text or importlib.import_module(package_of(name)).__doc__ or ""
        kernels = ", ".join(k.name for k in registry().kernels(name)) or "reference"
        rows.append((f"`{name}`", text.splitlines()[0].split(": ", 1)[-1], kernels))
    return table(("op", "computes", "kernels besides XLA's own"), rows)


def operands() -> str:
    """One table per op: its operands, in order."""
    parts = []
    for name in registry().ops():
        op = registry().op(name)
        rows = [
            (f"`{o.name}`", _axes(o.axes), "yes" if o.required else "", o.doc)
            for o in op.operands
        ]
        held = table(("operand", "axes", "always there", "what it holds"), rows)
        parts.append(f"## {name}\n\n{held}\n\nThe result is {_axes(op.out)}.")
    return "\n\n".join(parts)


def _axes(letters: str) -> str:
    return f"`[{letters}]`".replace("|", r"\|")


def measured() -> str:
    """One row per benchmark, with the machine and the command."""
    rows, notes = [], []
    for path in sorted(record.RESULTS.glob("*.json")):
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or not {"about", "rows"} <= {*data}:
            continue
        if "what" not in data["rows"][0]:  # a bench with a page of its own
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
    return f"{table(head, rows)}\n\nReproduce with {', and with '.join(notes)}."


def decoder() -> str:
    """One row per pass of the decoder of a billion parameters on an H200."""
    return _passes(json.loads(record.named("decoder_h200").read_text()))


def public_decoder() -> str:
    """One row per pass of a public library's decoder of that size."""
    return _passes(json.loads(record.named("public_decoder_h200").read_text()))


def public_bert() -> str:
    """One row per pass of a public library's encoder on padded sequences."""
    return _passes(json.loads(record.named("public_bert_h100").read_text()))


def packed_decoder() -> str:
    """One row per pass of the decoder of a billion parameters on packed documents."""
    return _passes(json.loads(record.named("packed_decoder_h100").read_text()))


def training_steps() -> str:
    """One row per pass of the models that need JAX alone."""
    return _passes(json.loads(record.named("training_steps_h100").read_text()))


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
        f"{table(head, rows)}\n\n*Computing* is the time of the device's kernels. "
        "The cache is not donated, so a step also copies it. "
        f"Reproduce with {note}."
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
            size_text(old["bytes"]) if "bytes" in old else "", size_text(new["bytes"]),
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
    return f"{table(head, rows)}\n\n{told}"


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
    return table(head, sorted(rows)) + (
        "\n\nTimes are the device's, by CUPTI: medians of 20 runs, taken in turns, on "
        "three or more sets of inputs. Reproduce with `python3 -m tests.bench.tuning "
        "tune --shapes targets,others --out tuned.json` (NVIDIA H200, jax 0.11.2)."
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
        f"The run is {row['steps']} steps of Hugging Face's GPT-2 (small) on the"
        " sources of Python's standard library. The loss falls from"
        f" {before['first']:.2f} to {before['last']:.3f} as written, and to"
        f" {after['last']:.3f} rewritten. At no step do the losses differ by more than"
        f" {row['largest_difference']:.0e}. Two runs as written, from weights that"
        " differ in the last bit, differ by"
        f" {row['largest_difference_of_equal_runs']:.0e}. A step takes"
        f" {seconds['original']:.2f} s as written and {seconds['rewritten']:.2f} s"
        f" rewritten. Reproduce with `{data['command']}` (2 CPU cores, jax"
        f" {data['jax']})."
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
            *(size_text(row[x]) for x in ("memory_before", "memory_after")),
        )
        for row in data["lines"]
        if (row["program"], row["pass"]) == ("decoder", "train step")
    ]  # fmt: skip
    head = ("mesh", "parameters split over", "moved between devices", "after",
            "memory per device", "after")  # fmt: skip
    count = len(data["lines"])
    return (
        f"{table(head, rows)}\n\nThe program is a training step of a decoder of 3 "
        "layers, compiled for 8 CPU devices. [The results]"
        f"(../tests/bench/results/{path}) have {count} such lines, of 6 programs on "
        "meshes of data, model, sequence and experts. In all of them:\n\n"
        "- There is no kind of collective that the original lacks, except around a "
        "ring.\n"
        "- No more bytes are moved. A sum's bytes count twice, since it is scattered "
        "and gathered.\n"
        "- Memory grows by 5 % or 64 KiB at most.\n\n"
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
            f"{old['ms'] / new['ms']:.1f}×", size_text(old["bytes"]),
            size_text(new["bytes"]), *(_moved(x["collectives"]) for x in (old, new)),
        ))  # fmt: skip
    head = ("mesh", "rows of 4096", "original", "rewritten", "gain",
            "memory per GPU", "after", "moved", "after")  # fmt: skip
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})"
    return f"{table(head, rows)}\n\nReproduce with {note}."


def _split_over(specs: dict) -> str:
    """The mesh axes that any of several arrays is split over."""
    axes = sorted({a for spec in specs.values() for a in re.findall(r"'(\w+)'", spec)})
    return " and ".join(axes) or "nothing"


def _moved(collectives: dict) -> str:
    """Bytes of all collectives, by kind."""
    return ", ".join(f"{size_text(n)} {kind}" for kind, (_, n) in collectives.items())


def hopper() -> str:
    """Our kernels for Hopper GPUs beside XLA and cuDNN."""
    head, rows = hopper_table.table()
    data = json.loads(record.named("hopper_norms_h200").read_text())
    benches = ("attention", "decode", "norms", "glu")
    commands = ", ".join(f"`python3 -m tests.bench.hopper_{x}`" for x in benches)
    return (
        f"{table(head, rows)}\n\nFigures are microseconds on the device, by CUPTI: "
        "medians of 20 runs, taken in turns, on three sets of inputs in bfloat16. "
        "*Both* is the result and its gradients. "
        f"Reproduce with {commands} ({data['device']}, jax {data['jax']}, "
        f"{data['date']})."
    )


def versions() -> str:
    """One row per supported pair of Python and JAX."""
    pairs = json.loads(record.named("versions").read_text())["tested"]
    return table(("Python", "jax", "tested"), [tuple(p) for p in pairs])


def _ms(timing: dict) -> str:
    return f"{time_text(1e3 * timing['median_ms'])} ±{timing['spread']:.0%}"


def _memory(timing: dict) -> str:
    count = timing["temp_bytes"]
    return "unknown" if count is None else size_text(count)


def scored() -> str:
    """Functions of scores on a Hopper GPU, beside PyTorch's FlexAttention."""
    by: dict[str, dict[str, dict]] = {}
    for row in json.loads(record.named("scored_gpu_h100").read_text())["rows"]:
        by.setdefault(row["row"], {})[row["pass"]] = row["us"]
    cell = lambda us, arm: f"{us[arm] / 1e3:.1f}" if arm in us else "-"
    rows = [
        (name, *(cell(us[x], arm) for x in us for arm in ("written", "flex", "hopper")))
        for name, us in by.items()
        if "menu" not in name and len(us) == 2
    ]
    arms = ("as written", "FlexAttention", "ours")
    return table(("function, sizes", *arms, *(f"{x}, both" for x in arms)), rows)


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
        "The figures are by Nsight Compute, of the forward as of commit "
        f"{data['commit']}. Percentages are shares of the time in which a unit is "
        "busy. Instructions are those in SASS. The last column says what a warp waits "
        "for, the longest first, and includes the warpgroup that only copies. "
        "Reproduce with "
        f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})."
    )
    return f"{table(head, rows)}\n\n{note}"


def _costs_of_rewriting() -> dict[str, dict]:
    data = json.loads(record.named("rewrite_cost").read_text())
    return {row["program"]: row for row in data["results"]}


def rewriting_costs() -> str:
    """What rewriting 48 layers costs, of JAX's own time."""
    found, by_hand = _costs_of_rewriting(), "hand-written decoder, 48 layers"
    programs = {
        "layers of flax": "flax linen decoder, 48 layers",
        "layers written by hand": by_hand,
        "layers written by hand, for an H100": f"{by_hand}, for an H100",
        "the gradient of those": f"gradient of the {by_hand}",
        "the gradient of those, for an H100": f"gradient of the {by_hand}, for an H100",
        "a program in which nothing is found": "no sites, 48 layers",
    }
    rows = [
        (name, f"{100 * found[program]['share']:.0f} %")
        for name, program in programs.items()
    ]
    return table(("program", "share"), rows)


def rewriting_costs_of_few_layers() -> str:
    """What rewriting 2 and 4 layers costs, of JAX's own time."""
    found = _costs_of_rewriting()
    programs = {
        "layers of flax": "flax linen decoder",
        "layers written by hand": "hand-written decoder",
        "the gradient of those, `optimize(jax.grad(loss))`": (
            "gradient of the hand-written decoder"
        ),
        "the same, `jax.grad(optimize(loss))`": (
            "jax.grad of the optimized hand-written decoder"
        ),
    }
    rows = []
    for name, program in programs.items():
        costs = [found[f"{program}, {n} layers"] for n in (2, 4)]
        shares = [c[key] for key in ("share", "share_again") for c in costs]
        rows.append((name, *(f"{100 * share:.0f} %" for share in shares)))
    head = "2 layers", "4 layers", "2, shapes known", "4, shapes known"
    return table(("program", *head), rows)


def first_step() -> str:
    """Seconds until the training steps of public models are lowered."""
    data = json.loads(record.named("first_step").read_text())
    each = ("model", "written_s", "rewritten_s", "stored_s", "kernels")
    rows = [tuple(row[name] for name in each) for row in data["rows"]]
    optimized = "`rewriter.optimize`", "in a later process"
    head = ("model", "`jax.jit`", *optimized, "kernels of Pallas")
    note = f"`{data['command']}` measures them ({data['machine']}, {data['date']})."
    return f"{table(head, rows)}\n\n{note}"


def structure() -> str:
    """The counts of the package before its folders, and now."""
    data = json.loads(record.named("structure").read_text())
    old, new = data["before"], data["now"]
    rows = [
        ("modules in the fullest folder", "{modules}, `{fullest}`"),
        ("folders with modules", "{folders}"),
        ("lines of the longest file", "{longest}, `{longest_file}`"),
        ("functions of more than 60 lines", "{long} of {functions}"),
        ("pairs of places that repeat six lines or more", "{repeated}"),
        ("lines", "{lines}"),
        ("files of `rewriter` that run for one attention", "{rewriter_files}"),
        ("functions of `rewriter` that run for it", "{rewriter_functions}"),
        ("files of `patterns` that run for it", "{patterns_files}"),
        ("seconds of the import after JAX's own", "{import_s:.2f}"),
        ("seconds of the first rewriting of one attention", "{first_s:.2f}"),
    ]
    lines = ["| | before | now |", "| --- | --- | --- |"]
    for name, form in rows:
        lines.append(f"| {name} | {form.format(**old)} | {form.format(**new)} |")
    return "\n".join(lines)


def modules_of_folders() -> str:
    """The modules of each folder, before the folders and now."""
    data = json.loads(record.named("structure").read_text())
    old, new = (data[when]["modules_of"] for when in ("before", "now"))
    lines = ["| folder | modules before | now |", "| --- | --- | --- |"]
    for folder in sorted({*old, *new}):
        lines.append(f"| `{folder}` | {old.get(folder, '')} | {new.get(folder, '')} |")
    return "\n".join(lines)


def running() -> str:
    """The files of the engine that run for one attention, by folder."""
    data = json.loads(record.named("structure").read_text())
    folders: dict[str, list[str]] = {}
    for path in data["now"]["running"]:
        folder, _, name = path.rpartition("/")
        folders.setdefault(folder or "rewriter", []).append(name)
    lines = ["| folder | files | their names |", "| --- | --- | --- |"]
    for folder, names in folders.items():
        lines.append(f"| `{folder}` | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines)


def latent_decode() -> str:
    """One row per case of decoding against a latent cache, in microseconds."""
    data = json.loads(record.named("latent_decode_h200").read_text())
    by = {(r["case"], r["lengths"], r["by"]): r for r in data["results"]}
    rows = []
    for case, (sequences, tokens) in data["cases"].items():
        for lengths in ("full", "drawn"):
            ours = by[case, lengths, "two arrays"]
            others = (by[case, lengths, x]["us"] for x in ("xla", "pages of 64"))
            old, paged = (f"{us:.0f}" for us in others)
            figures = f"{ours['us']:.0f}", paged, f"{ours['tf_per_s']:.0f}"
            rows.append((sequences, tokens, lengths, old, *figures))
    head = ("sequences", "tokens", "lengths", "as written", "`hopper_latent`")
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})"
    timed = table((*head, "in pages of 64", "TF/s"), rows)
    return f"{timed}\n\nReproduce with {note}."


def quantized_cache() -> str:
    """One row per cache of 8 bits, in microseconds on an H100 and an H200."""
    found: dict[tuple[int, int], dict[tuple[str, str], float]] = {}
    notes = []
    for kind in ("h100", "h200"):
        data = json.loads(record.named(f"quantized_cache_{kind}").read_text())
        notes.append(f"{data['device']}, jax {data['jax']}, {data['date']}")
        for row in data["results"]:
            if row.get("stored") == "int4":
                continue
            case = found.setdefault((row["sequences"], row["tokens"]), {})
            case.setdefault((kind, row["by"]), row["us"])
    ways = ("as written", "hopper", "in 16 bits")
    rows = [
        (*case, *(f"{us[kind, by]:.0f}" for kind in ("h100", "h200") for by in ways))
        for case, us in found.items()
    ]
    ours = ("as written", "`hopper`", "in 16 bits, by `hopper_decode`")
    head = (
        "sequences",
        "tokens",
        *(f"{way}, {k}" for k in ("H100", "H200") for way in ours),
    )
    note = f"`python3 -m tests.bench.quantized_cache --first` ({'; '.join(notes)})"
    return f"{table(head, rows)}\n\nReproduce with {note}."


def group_norms() -> str:
    """One row per shape of a group norm: microseconds of XLA, and of our kernel."""
    data = json.loads(record.named("group_norms_h200").read_text())
    shapes: dict[str, dict[tuple[str, str], str]] = {}
    for row in data["rows"]:
        if row["pass"] == "copy":  # how long reading and writing x takes
            continue
        name = f"{' × '.join(map(str, row['shape']))}, {row['groups']}"
        shapes.setdefault(name, {})[row["pass"], row["by"]] = f"{row['us']:.0f}"
    passes = ("forward", "silu forward", "both", "silu both")
    pair = lambda found, x: f"{found[x, 'hopper']} ({found[x, 'xla']})"
    rows = [(name, *(pair(found, x) for x in passes)) for name, found in shapes.items()]
    head = ("x, groups", "forward", "and a silu", "with gradients", "silu, gradients")
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})"
    return f"{table(head, rows)}\n\nReproduce with {note}."


def eight_bits() -> str:
    """One row per product of 8-bit rows and matrices, in microseconds."""
    data = json.loads(record.named("eight_bits_h200").read_text())
    cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in data["results"]:
        case = cases.setdefault((", ".join(map(str, row["m, k, n"])), row["kind"]), {})
        if row["by"] not in case or row["us"] < case[row["by"]]["us"]:
            case[row["by"]] = row
    rows = [
        (size, kind, f"{by['xla']['us']:.3g}", f"{by['hopper']['us']:.3g}",
         f"{by['hopper']['tflops']:.0f}")
        for (size, kind), by in cases.items()
        if by.keys() >= {"xla", "hopper"}
    ]  # fmt: skip
    head = ("rows, summed, columns", "numbers", "XLA, µs", "`hopper_eight_bits`, µs")
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})"
    return f"{table((*head, 'TF/s'), rows)}\n\nReproduce with {note}."


def by_blocks() -> str:
    """One row per product with scales of blocks, in microseconds."""
    data = json.loads(record.named("by_blocks_h200").read_text())
    cases: dict[tuple[str, str], dict[str, dict]] = {}
    for row in data["results"]:
        case = cases.setdefault((", ".join(map(str, row["m, k, n"])), row["kind"]), {})
        if row["by"] == "as written" or row["default"]:
            case["written" if row["by"] == "as written" else "ours"] = row
    rows = [
        (size, kind, f"{by['written']['us']:.0f}", f"{by['ours']['us']:.0f}",
         f"`{by['ours']['by']}`")
        for (size, kind), by in cases.items()
    ]  # fmt: skip
    head = ("rows, summed, columns", "numbers", "as written, µs", "ours, µs", "by")
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {data['date']})"
    return f"{table(head, rows)}\n\nReproduce with {note}."


def public_suites() -> str:
    """Tests of public packages that ran under both, and how many differ."""
    data = json.loads(record.named("public_suites").read_text())
    sets: dict[str, list[dict]] = {}
    for name, figures in data["modules"].items():
        file = "/" in name
        suite = "/".join(name.split("/")[:3]) if file else name.split(".")[0]
        sets.setdefault(suite, []).append(figures)
    rows = [
        (
            suite,
            len(modules),
            sum(m["tests"] for m in modules),
            sum(m["optimized"] for m in modules),
            sum(len(m["differ"]) for m in modules),
        )
        for suite, modules in sorted(sets.items())
    ]
    head = ("suite", "files", "tests that pass under `jax.jit`", "functions optimized")
    versions = ", ".join(f"{name} {v}" for name, v in data["packages"].items())
    note = f"`.ci/suites` counts them ({versions}; {data['device']}, {data['date']})."
    return f"{table((*head, 'tests that differ'), rows)}\n\n{note}"


TABLES = {
    "rewriting_costs": rewriting_costs,
    "rewriting_costs_of_few_layers": rewriting_costs_of_few_layers,
    "first_step": first_step,
    "structure": structure,
    "running": running,
    "modules_of_folders": modules_of_folders,
    "public_suites": public_suites,
    "by_blocks": by_blocks,
    "eight_bits": eight_bits,
    "group_norms": group_norms,
    "quantized_cache": quantized_cache,
    "rows_of_models": choices_table.rows_of_models,
    "packed_dot": few_bits_tables.packed_dot,
    "few_rows": few_bits_tables.few_rows,
    "quantized_unit": few_bits_tables.quantized_unit,
    "quantized_rows": few_bits_tables.quantized_rows,
    "latent_decode": latent_decode,
    "first_example": first_example,
    "gains": gains,
    "options": options,
    "assumptions": assumptions,
    "passes": passes,
    "api": public_names.page,
    "sharded": sharded,
    "sharded_decoder": sharded_decoder,
    "explain": explained,
    "supported": supported,
    "operands": operands,
    "tuned": tuned,
    "measured": measured,
    "decoder": decoder,
    "public_decoder": public_decoder,
    "public_decode": public_decode,
    "models": models,
    "other_models": other_models,
    "torch_models": torch_tables.models,
    "torch_on_gpu": torch_tables.on_gpu,
    "flex": torch_tables.flex,
    "keras_models": keras_models,
    "public_bert": public_bert,
    "packed_decoder": packed_decoder,
    "training_steps": training_steps,
    "public_experts": public_experts,
    "training": training,
    "hopper": hopper,
    "attention_profile": attention_profile,
    "scored": scored,
    "tpu_attention": tpu_tables.attention,
    "tpu_splash": tpu_tables.splash,
    "tpu_ragged": tpu_tables.ragged,
    "tpu_norms": tpu_tables.norms,
    "versions": versions,
}


def filled(text: str, only: Sequence[str] = ()) -> str:
    """Returns a page with its tables made anew: all, or those of some names."""
    for name in re.findall(r"<!-- table: (\w+) -->", text):
        if only and name not in only:
            continue
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        table = TABLES[name]()
        text = re.sub(
            pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S
        )
    return text


def main() -> None:
    """Prints or writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="tables to make; all by default")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        for page in (ROOT / name for name in hooks.pages()):
            page.write_text(filled(page.read_text(), given.names))
        return
    print("\n\n".join(TABLES[name]() for name in given.names or TABLES))


if __name__ == "__main__":
    main()
