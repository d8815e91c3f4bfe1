"""Training steps and inference of public models, unmodified: as written and rewritten.

  python3 -m tests.bench.models [--only NAMES] [--passes step] [--small] [--json PATH]

Hugging Face's flax models of their usual sizes, with drawn weights in bfloat16. A step
is the loss, its gradients and an update by `optax.adamw`. Programs are compiled first,
several at once, and timed afterwards, one by one. Figures are:

- milliseconds of a call (median, several in a row), and those of its kernels alone
- XLA's temporary memory
- seconds of tracing, lowering and compiling
- the share of the chip's peak, at 6 operations a weight and token, or 2 for inference
- the kernels that take most of the rewritten program's time

Needs flax, optax and transformers before 5.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import re
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers

import rewriter
from rewriter import _jax
from rewriter.hardware import timing
from tests.bench import passes, record

PEAK = {"H100": 989e12, "H200": 989e12}
"""Operations in bfloat16 a second, by the vendor's data sheets."""
IN_A_ROW = 10
"""Calls that follow each other without waiting, as in a training loop: a step gets the
weights that the last one gave. The host prepares a step while another runs."""
PASSES = ("inference", "step")
SHOWN = 8
"""How many kernels of a profile are kept."""

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """A public model and what it is trained on.

    Attributes:
        name: What the figures call it.
        family: The library's name of it.
        head: What the class's name ends in.
        batch: Makes a batch from (config, whether it is small).
        loss: Gives the loss of what the model returns, and the batch.
        tokens: The tokens (patches, frames) of a batch.
        sizes: Settings that differ from the library's defaults.
        small: Settings to try it on a CPU.
    """

    name: str
    family: str
    head: str
    batch: Callable[[Any, bool], Batch]
    loss: Callable[[Any, Batch], jax.Array]
    tokens: Callable[[Batch], int]
    sizes: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)


def words(b: int, t: int, *, padded: bool = False) -> Callable[[Any, bool], Batch]:
    """Batches of tokens; of which, if `padded`, every second row is half padding."""

    def made(config: Any, small: bool) -> Batch:
        rows, length = (2, 64) if small else (b, t)
        draw = np.random.default_rng(0)
        ids = draw.integers(2, config.vocab_size, (rows, length), dtype=np.int32)
        ends = np.where(np.arange(rows) % 2, length // 2, length) if padded else length
        mask = np.arange(length) < np.reshape(ends, (-1, 1))
        mask = np.broadcast_to(mask, ids.shape).astype("int32")
        return {"input_ids": ids, "attention_mask": mask}

    return made


def two_texts(b: int, t: int, s: int) -> Callable[[Any, bool], Batch]:
    """Batches of tokens for an encoder, half of each padded, and for a decoder."""

    def made(config: Any, small: bool) -> Batch:
        both = words(b, t, padded=True)(config, small)
        later = words(b, s)(config, small)
        return {**both, "decoder_input_ids": later["input_ids"]}

    return made


def images(b: int) -> Callable[[Any, bool], Batch]:
    def made(config: Any, small: bool) -> Batch:
        n = config.image_size
        draw = np.random.default_rng(0)
        shape = (2 if small else b, 3, n, n)
        return {"pixel_values": draw.normal(size=shape).astype("float32")}

    return made


def sounds(b: int, t: int) -> Callable[[Any, bool], Batch]:
    def made(config: Any, small: bool) -> Batch:
        rows, length = (2, 16) if small else (b, t)
        draw = np.random.default_rng(0)
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        ids = draw.integers(2, config.vocab_size, (rows, length), dtype=np.int32)
        return {
            "input_features": draw.normal(size=shape).astype("float32"),
            "decoder_input_ids": ids,
        }

    return made


def next_words(key: str = "input_ids") -> Callable[[Any, Batch], jax.Array]:
    """The mean cross entropy of each next token."""

    def loss(out: Any, batch: Batch) -> jax.Array:
        logits = out.logits[:, :-1].astype(jnp.float32)
        labels = jnp.asarray(batch[key])[:, 1:]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean()

    return loss


def masked_words(out: Any, batch: Batch) -> jax.Array:
    """The mean cross entropy of the tokens that are no padding."""
    logits = out.logits.astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["input_ids"])
    mask = batch["attention_mask"]
    return (each * mask).sum() / mask.sum()


def classes(out: Any, batch: Batch) -> jax.Array:
    labels = jnp.arange(out.logits.shape[0]) % out.logits.shape[1]
    logits = out.logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def count_of(key: str) -> Callable[[Batch], int]:
    return lambda batch: batch[key].size


def patches(batch: Batch) -> int:
    b, _, n, _ = batch["pixel_values"].shape
    return b * ((n // 16) ** 2 + 1)


_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip
_SMALL_DECODER = {
    **_SMALL, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128
}  # fmt: skip
_SMALL_PAIR = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 512,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip

MODELS = (
    Model("BERT-base 32x512, padded", "Bert", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"), {}, _SMALL),
    Model("GPT-2 8x1024", "GPT2", "LMHeadModel", words(8, 1024), next_words(),
          count_of("input_ids"), {},
          {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512}),
    Model("ViT-B 128 images", "ViT", "ForImageClassification", images(128), classes,
          patches, {}, {**_SMALL, "image_size": 32}),
    Model("Whisper-small 16 clips", "Whisper", "ForConditionalGeneration",
          sounds(16, 448), next_words("decoder_input_ids"),
          lambda batch: 16 * (1500 + 448),
          {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12,
           "encoder_attention_heads": 12, "decoder_attention_heads": 12,
           "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
          {**_SMALL_PAIR, "max_source_positions": 64, "max_target_positions": 64,
           "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1,
           "decoder_start_token_id": 1}),
    Model("Gemma-2B, 8 of 18 layers, 4x2048", "Gemma", "ForCausalLM", words(4, 2048),
          next_words(), count_of("input_ids"),
          {"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8,
           "num_key_value_heads": 1, "head_dim": 256, "num_hidden_layers": 8},
          _SMALL_DECODER),
    Model("GPT-J, 4 of 28 layers, 4x2048", "GPTJ", "ForCausalLM", words(4, 2048),
          next_words(), count_of("input_ids"), {"n_layer": 4},
          {"n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16,
           "vocab_size": 512, "n_positions": 128}),
    Model("OPT-125m 8x1024", "OPT", "ForCausalLM", words(8, 1024), next_words(),
          count_of("input_ids"), {},
          {**_SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64,
           "max_position_embeddings": 128}),
    Model("BART-base 16x512, padded, and 128", "Bart", "ForConditionalGeneration",
          two_texts(16, 512, 128), next_words("decoder_input_ids"),
          lambda batch: batch["input_ids"].size + batch["decoder_input_ids"].size,
          {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
           "encoder_attention_heads": 12, "decoder_attention_heads": 12,
           "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
          {**_SMALL_PAIR, "max_position_embeddings": 128}),
    Model("GPT-Neo-125m 8x1024", "GPTNeo", "ForCausalLM", words(8, 1024), next_words(),
          count_of("input_ids"),
          {"hidden_size": 768, "num_layers": 12, "num_heads": 12,
           "attention_types": [[["global", "local"], 6]],
           "max_position_embeddings": 1024},
          {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 512,
           "attention_types": [[["global", "local"], 1]],
           "max_position_embeddings": 128}),
    Model("Llama 1B, 4 of 16 layers, 4x2048", "Llama", "ForCausalLM", words(4, 2048),
          next_words(), count_of("input_ids"),
          {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
           "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 128256,
           "max_position_embeddings": 2048},
          _SMALL_DECODER),
    Model("RoBERTa-base 32x512, padded", "Roberta", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"),
          {"max_position_embeddings": 514}, {**_SMALL, "max_position_embeddings": 80}),
    Model("DistilBERT 32x512, padded", "DistilBert", "ForMaskedLM",
          words(32, 512, padded=True), masked_words, count_of("input_ids"), {},
          {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128,
           "vocab_size": 512}),
)  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """A model's programs, being compiled, and their arguments.

    Attributes:
        model: The model.
        weights: How many numbers its weights are.
        programs: By pass and ``"written"`` or ``"rewritten"``.
        reports: What was rewritten, by pass.
        seconds: Of tracing and lowering, by pass and program.
        draw: Makes the arguments of a pass.
        batch: What the model is given.
    """

    model: Model
    weights: int
    programs: dict[tuple[str, str], Future[tuple[Any, float]]]
    reports: dict[str, rewriter.Report]
    seconds: dict[tuple[str, str], float]
    draw: Callable[[str], tuple[Any, ...]]
    batch: Batch


def prepared(
    model: Model, small: bool, pool: ThreadPoolExecutor, only: Sequence[str] = PASSES
) -> Prepared:
    """Traces and lowers some of a model's passes, and has them compiled."""
    config = getattr(transformers, f"{model.family}Config")(
        **(model.small if small else model.sizes)
    )
    made = getattr(transformers, f"Flax{model.family}{model.head}")(
        config, dtype=jnp.bfloat16, _do_init=False
    )
    batch = model.batch(config, small)
    optimizer = optax.adamw(1e-4)

    def initial(key: jax.Array) -> Any:
        shape = next(iter(batch.values())).shape
        shape = (1, *shape[2:], shape[1]) if len(shape) == 4 else (1, *shape[1:])
        return made.to_bf16(made.init_weights(key, shape))

    def loss(weights: Any, given: Batch) -> jax.Array:
        return model.loss(made(**given, params=weights), given)

    def step(weights: Any, state: Any, given: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, given)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    def inference(weights: Any, given: Batch) -> jax.Array:
        return made(**given, params=weights).logits

    weights = jax.eval_shape(initial, jax.random.key(0))
    state = jax.eval_shape(optimizer.init, weights)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    functions = {
        "inference": (inference, (weights, given)),
        "step": (step, (weights, state, given)),
    }
    programs, reports, seconds = {}, {}, {}
    for what in only:
        fn, args = functions[what]
        fast = rewriter.optimize(fn)
        for name, jitted in (("written", jax.jit(fn)), ("rewritten", fast)):
            start = time.perf_counter()
            lowered = jitted.lower(*args)
            seconds[what, name] = time.perf_counter() - start
            programs[what, name] = pool.submit(_compiled, lowered)
        reports[what] = fast.report(*args)
    count = sum(x.size for x in jax.tree.leaves(weights))

    @functools.cache
    def drawn() -> Any:
        return jax.jit(initial)(jax.random.key(0))

    def draw(what: str) -> tuple[Any, ...]:
        if what == "inference":
            return drawn(), batch
        return drawn(), jax.jit(optimizer.init)(drawn()), batch

    return Prepared(model, count, programs, reports, seconds, draw, batch)


def _compiled(lowered: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def measured(one: Prepared, repeats: int) -> list[dict[str, Any]]:
    """A row for each pass."""
    rows = []
    tokens = one.model.tokens(one.batch)
    for what, report in one.reports.items():
        args = jax.device_put(one.draw(what))
        row: dict[str, Any] = {
            "model": one.model.name, "pass": what, "weights": one.weights,
            "tokens": tokens, "sites": passes.sites(report),
        }  # fmt: skip
        results = {}
        for name in ("written", "rewritten"):
            program, seconds = one.programs[what, name].result()
            row[name], results[name] = _timed(program, args, repeats)
            row[name]["lower_s"] = round(one.seconds[what, name], 2)
            row[name]["compile_s"] = round(seconds, 2)
        before, after = row["written"]["ms"], row["rewritten"]["ms"]
        row["faster"] = round(before / after, 3)
        row["difference"] = float(passes.difference(*map(_shown, results.values())))
        each = 6 if what == "step" else 2
        peak = next((x for n, x in PEAK.items() if n in _device()), None)
        if peak:
            share = each * one.weights * tokens / (after * 1e-3) / peak
            row["share_of_peak"] = round(share, 3)
        if timing.method() == "cupti":
            for name in ("written", "rewritten"):
                profile = _profile(one.programs[what, name].result()[0], args)
                row[name]["device_ms"] = profile.pop("all")
            row["profile"] = profile
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _device() -> str:
    return jax.devices()[0].device_kind


def _timed(program: Any, args: Any, repeats: int) -> tuple[dict[str, Any], Any]:
    out = jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        given = args
        for _ in range(IN_A_ROW):
            last = program(*given)
            given = (*last[:2], *args[2:]) if isinstance(last, tuple) else args
        jax.block_until_ready(last)
        times.append(1e3 * (time.perf_counter() - start) / IN_A_ROW)
        del last, given
    memory = program.memory_analysis().temp_size_in_bytes
    return {"ms": round(statistics.median(times), 3), "temporary_bytes": memory}, out


def _shown(out: Any) -> Any:
    """What is compared: logits, or the loss of a step."""
    return out[2] if isinstance(out, tuple) else out


def _profile(program: Any, args: Any) -> dict[str, float]:
    """Milliseconds of the kernels that take most time, by name without numbers."""
    found: Counter[str] = Counter()
    for name, seconds in _jax.kernel_seconds(lambda: program(*args)):
        found[re.sub(r"[_.]?\d+", "", name)[:60]] += 1e3 * seconds
    most = {name: round(ms, 3) for name, ms in found.most_common(SHOWN)}
    return {"all": round(sum(found.values()), 3), **most}


def main() -> None:
    """Measures every model that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts of names, by commas")
    parser.add_argument("--passes", default=",".join(PASSES), help="by commas")
    parser.add_argument("--small", action="store_true", help="to try it on a CPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="to prepare models")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) * 3 // 4)) as pool:
        models = []
        for model in MODELS:
            if not any(part in model.name for part in given.only.split(",")):
                continue
            if time.perf_counter() - start > given.seconds:
                print(f"no time for {model.name}", flush=True)
                continue
            try:
                chosen = given.passes.split(",")
                models.append(prepared(model, given.small, pool, chosen))
                print(f"lowered {model.name}", flush=True)
            except Exception:
                traceback.print_exc()
        for one in models:
            for program in one.programs.values():
                program.exception()
    while models:
        one = models.pop(0)
        try:
            rows += measured(one, given.repeats)
        except Exception:
            traceback.print_exc()
        if given.json:
            versions = {"transformers": transformers.__version__}
            command = "python3 -m tests.bench.models" + " --small" * given.small
            record.write(given.json, command, **versions, results=rows)


if __name__ == "__main__":
    main()
