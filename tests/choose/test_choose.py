"""Which kernel is chosen, by size and by platform."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.choose.choose import choose
from rewriter.config import Config
from rewriter.kernels.attention import cudnn
from rewriter.measure import oracle
from rewriter.measure.sources import shipped, sources
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry
from rewriter.support.verdict import YES, no

T = 1024
QKV = jax.ShapeDtypeStruct((1, T, 4, 32), jnp.float32)
HUGE = jax.ShapeDtypeStruct((4, 1 << 16, 8, 64), jnp.float32)


def on(platform: str) -> Device:
    return Device(platform, platform)


def attention(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 32**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("x", "platform", "kernel"),
    [(QKV, "cpu", "memory_bounded"), (QKV, "cuda", "xla"), (QKV, "tpu", "xla"),
     (HUGE, "cuda", "memory_bounded")],
)  # fmt: skip
def test_attention_by_platform(x, platform: str, kernel: str) -> None:
    op = registry().op("attention")
    spec = spec_of(op, {"q": x, "k": x, "v": x}, {})
    choice = choose(spec, Config(), registry().kernels("attention"), on(platform))
    assert choice.kernel == kernel
    if kernel == "xla":
        assert "XLA" in dict(choice.not_chosen)["memory_bounded"]


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "gated_linear_unit"])
def test_memory_bound_ops_stay_with_xla_on_a_gpu(op: str) -> None:
    kernel = next(k for k in registry().kernels(op) if k.name == "memory_bounded")
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    operands = {"x": x} if "norm" in op else dict.fromkeys(("x", "w_gate", "w_up"), x)
    spec = spec_of(registry().op(op), operands, {})
    assert kernel.profitable(spec, "cpu").ok
    assert not kernel.profitable(spec, "cuda").ok


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chooses for a CPU")
def test_one_program_holds_a_kernel_per_platform() -> None:
    """Traced on a CPU: a loop over blocks there, dense attention on a GPU."""
    fast = jax.jit(rewriter.optimize(attention))
    dense = f"{T}x{T}xf32"
    for platform, is_dense in (("cpu", False), ("cuda", True)):
        lowered = fast.trace(QKV, QKV, QKV).lower(lowering_platforms=(platform,))
        assert (dense in lowered.as_text()) == is_dense


def test_a_failure_at_one_anchor_leaves_the_others(monkeypatch) -> None:
    """Neither comparing with a proved region nor reading a new one stops the rest."""
    from rewriter.find import match

    def broken(*args):
        raise ValueError("a bug")

    def norms(x, scale):
        for _ in range(2):
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        return x

    monkeypatch.setattr(match, "apply", broken)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with pytest.warns(rewriter.RewriterWarning, match="a bug"):
        report = rewriter.explain(norms)(x, jax.ShapeDtypeStruct((16,), jnp.float32))
    assert report.counts()["rms_norm"] == 2
    assert any("a bug" in str(f) for f in report.failures)


def test_nothing_is_said_of_kernels_for_other_platforms() -> None:
    op = registry().op("attention")
    spec = spec_of(op, {"q": QKV, "k": QKV, "v": QKV}, {})
    kernels = registry().kernels("attention")
    assert "cudnn" not in dict(choose(spec, Config(), kernels, on("cpu")).not_chosen)
    assert "cudnn" in dict(choose(spec, Config(), kernels, on("cuda")).not_chosen)
    alone = [k for k in kernels if k.name == "cudnn"]
    why = dict(choose(spec, Config(), alone, on("cpu")).not_chosen)
    assert why["cudnn"] == "runs on cuda, not cpu"


def test_a_kernel_is_chosen_only_for_devices_it_runs_on() -> None:
    op = registry().op("attention")
    spec = spec_of(op, {"q": QKV, "k": QKV, "v": QKV}, {})
    bounded = registry().kernel("attention", "memory_bounded")
    picky = dataclasses.replace(
        bounded,
        runs_on=lambda device: YES if "7" in device.kind else no("device", "too old"),
    )
    assert choose(spec, Config(), [picky], Device("cpu 7", "cpu")).kernel == picky.name
    there = choose(spec, Config(), [picky], Device("cpu 6", "cpu"))
    assert (there.kernel, dict(there.not_chosen)) == ("xla", {picky.name: "too old"})
    forced = Config(implementation=(("attention", (picky.name,), ()),))
    with pytest.raises(rewriter.KernelError, match="too old"):
        choose(spec, forced, [picky], Device("cpu 6", "cpu"))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chooses for a CPU")
def test_a_kernel_forced_for_one_platform_leaves_others_their_plain_form() -> None:
    """A program with it is exported for both, and runs here."""
    pattern = rewriter.pattern(dims="x: n -> n")(lambda x: jnp.sin(x) * jnp.cos(x))

    @pattern.kernel(platform="cuda")
    def halved(x):
        return jnp.sin(x + x) / 2

    options = {"patterns": [pattern], "implementation": {pattern.op.name: "halved"}}
    x = jnp.linspace(0.0, 1.0, 8)
    fast = rewriter.optimize(lambda x: jnp.sin(x) * jnp.cos(x), **options)
    assert fast.report(x).sites[0].kernel == "halved"
    assert jnp.allclose(fast(x), jnp.sin(x) * jnp.cos(x))
    for platform, cosines in (("cpu", 1), ("cuda", 0)):
        lowered = fast.trace(x).lower(lowering_platforms=(platform,))
        assert lowered.as_text().count("stablehlo.cosine") == cosines


def test_what_is_exported_has_only_kernels_that_may_be() -> None:
    op = registry().op("attention")
    spec = spec_of(op, {"q": QKV, "k": QKV, "v": QKV}, {})
    bounded = registry().kernel("attention", "memory_bounded")
    kernels = [dataclasses.replace(bounded, exportable=False)]
    assert choose(spec, Config(), kernels, on("cpu")).kernel == bounded.name
    choice = choose(spec, Config(exporting=True), kernels, on("cpu"))
    assert choice.kernel == "xla"
    assert "exported" in dict(choice.not_chosen)[bounded.name]
    forced = (("attention", (bounded.name,), ()),)
    config = Config(implementation=forced)
    assert choose(spec, config, kernels, on("cpu")).kernel == bounded.name
    with pytest.raises(rewriter.KernelError, match="exported"):
        choose(spec, dataclasses.replace(config, exporting=True), kernels, on("cpu"))


def ragged(m: int, g: int = 128, dtype: str = "bfloat16"):
    operands = {
        "lhs": jax.ShapeDtypeStruct((m, 2048), dtype),
        "rhs": jax.ShapeDtypeStruct((g, 2048, 1536), dtype),
        "group_sizes": jax.ShapeDtypeStruct((g,), jnp.int32),
    }
    return spec_of(registry().op("ragged_dot"), operands, {})


def chosen(spec, differentiated: int = 0, target: str = "h200", **options):
    kernels = registry().kernels(spec.op)
    on_it = device.named(target)
    return choose(spec, Config(**options), kernels, on_it, differentiated)


def test_shipped_measurements_choose_for_a_device_that_is_not_here() -> None:
    forward, both = chosen(ragged(32768)), chosen(ragged(32768), 1)
    for choice in (forward, both):
        assert (choice.kernel, choice.origin) == ("hopper", "shipped")
        assert float(dict(choice.not_chosen)["xla"].split()[0]) > 10
    assert forward.implementation.backward_config == both.implementation.backward_config


def causal(b: int, t: int, n: int, h: int) -> Spec:
    x = jax.ShapeDtypeStruct((b, t, n, h), jnp.bfloat16)
    params = {"scale": h**-0.5, "window": (None, 0)}
    return spec_of(registry().op("attention"), {"q": x, "k": x, "v": x}, params)


@pytest.mark.parametrize(("b", "k"), [(8, 16), (32, 16), (8, 4)])
def test_a_decoding_step_is_not_left_to_a_loop_over_blocks(b: int, k: int) -> None:
    """Which on an H200 took 2.9 times as long as XLA, under any mask."""
    operands = {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for name, shape in {
            "q": (b, 1, 16, 128), "k": (b, 4096, k, 128), "v": (b, 4096, k, 128)
        }.items()
    }  # fmt: skip
    for heads, kernel in ((1, "hopper_decode"), (16, "xla")):  # that takes one for all
        mask = {"mask": jax.ShapeDtypeStruct((b, heads, 1, 4096), jnp.bool)}
        given = spec_of(registry().op("attention"), operands | mask, {"scale": 0.1})
        assert chosen(given).kernel == kernel


def test_kernels_whose_sums_differ_from_run_to_run_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cudnn, "_asked", lambda spec: YES)  # as if it were installed
    monkeypatch.setenv("XLA_FLAGS", "")
    use, full = causal(1, 8192, 16, 128), causal(1, 16384, 16, 128)

    def backward(choice) -> dict:
        return dict(choice.implementation.backward_config or ())

    # Measured on a newer JAX than the oldest, which has no such kernel.
    assert backward(chosen(use, 1))["fused"] == (jax.__version_info__ >= (0, 11))
    assert chosen(full, 1).kernel == "cudnn"
    for made in (use, full):
        choice = chosen(made, 1, deterministic=True)
        assert choice.kernel == "hopper"
        assert not backward(choice).get("fused")
        assert "differ from run to run" in dict(choice.not_chosen)["cudnn"]
    # XLA's own flag says the same, which XLA hands on to cuDNN.
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert not backward(chosen(use, 1)).get("fused")
    assert chosen(full, 1).kernel == "cudnn"
    with pytest.raises(rewriter.ConfigError, match="Choose True, False"):
        rewriter.optimize(attention, deterministic="yes")(QKV, QKV, QKV)


def test_measurements_are_looked_for_among_those_of_the_device() -> None:
    here = device.named("h200")
    found = dict(sources(Config(), here, "ragged_dot"))
    assert {key.device for key, _ in found["shipped"]} == {here.kind}
    assert "shipped" not in dict(sources(Config(), on("cpu"), "ragged_dot"))


def test_near_shapes_choose_where_there_are_no_equal_ones() -> None:
    near = chosen(ragged(20000))
    assert (near.kernel, near.origin) == ("hopper", "nearest")
    for far in (
        chosen(ragged(32768, dtype="float16")),
        chosen(ragged(32768), tune="off"),
    ):
        assert (far.kernel, far.origin) == ("hopper", "estimated")


@pytest.mark.parametrize("name", ["h100", "h200"])
@pytest.mark.parametrize("differentiated", [0, 1])
def test_times_of_larger_shapes_do_not_make_others_look_fast(
    name: str, differentiated: int
) -> None:
    """A time for 4096 positions is no time for 1024, to compare estimates with."""
    for t, width in ((1024, 64), (1024, 128), (2048, 128)):
        choice = chosen(causal(4, t, 16, width), differentiated, name)
        assert choice.kernel in ("hopper", "cudnn"), (t, width, choice)


def test_a_kernel_that_cannot_be_traced_here_is_passed_over() -> None:
    """cuDNN won, but this machine has none: what is left decides."""
    x = jax.ShapeDtypeStruct((4, 4096, 16, 128), jnp.bfloat16)
    op = registry().op("attention")
    spec = spec_of(op, {"q": x, "k": x, "v": x}, {"scale": 0.1, "window": (None, 0)})
    if cudnn.supports(spec).ok:
        assert chosen(spec).kernel == "cudnn"
        return
    choice = chosen(spec)
    assert (choice.kernel, choice.origin) == ("hopper", "shipped")
    assert "cuDNN" in dict(choice.not_chosen)["cudnn"]
    assert "times as long" in dict(choice.not_chosen)["xla"]
    kernels = [k for k in registry().kernels("attention") if k.name != "hopper"]
    choice = choose(spec, Config(), kernels, device.named("h200"), 0)
    assert (choice.kernel, choice.origin) == ("xla", "shipped")


def test_a_target_decides_and_the_program_still_runs_here() -> None:
    def experts(lhs, rhs, sizes):
        return jax.lax.ragged_dot(lhs, rhs, sizes)

    m, k, n, g = 512, 64, 64, 64
    specs = [
        jax.ShapeDtypeStruct((32768, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((128, 2048, 1536), jnp.bfloat16),
        jax.ShapeDtypeStruct((128,), jnp.int32),
    ]
    report = rewriter.explain(experts, target="h200")(*specs)
    (site,) = report.sites
    assert (site.kernel, site.origin) == ("hopper", "shipped")
    assert report.target == "NVIDIA H200"
    (site,) = rewriter.explain(experts, target="a100")(*specs).sites
    assert (site.kernel, site.origin) == ("memory_bounded", "estimated")
    report = rewriter.explain(experts, target="tpu_v5p")(*specs)
    assert "[estimated]" in str(rewriter.explain(experts, target="a100")(*specs))
    (site,) = report.sites
    assert (site.kernel, site.origin) == ("xla", "estimated")
    assert "estimated to take" in dict(site.not_chosen)["tiled"]
    with pytest.raises(rewriter.ConfigError, match=r"target='h20'. Did you mean"):
        rewriter.explain(experts, target="h20")(*specs)
    lhs = jax.random.normal(jax.random.key(0), (m, k))
    rhs = jax.random.normal(jax.random.key(1), (g, k, n))
    sizes = jnp.full((g,), m // g, jnp.int32)
    for target in ("h200", "tpu_v6e", "cpu"):
        fast = rewriter.optimize(experts, target=target)
        assert jnp.allclose(fast(lhs, rhs, sizes), experts(lhs, rhs, sizes), atol=1e-4)


def test_ragged_dots_on_a_gpu_follow_the_estimate() -> None:
    assert chosen(ragged(32768), tune="off").kernel == "hopper"
    kernels = [k for k in registry().kernels("ragged_dot") if k.name != "hopper"]
    by = lambda spec: choose(
        spec, Config(tune="off"), kernels, device.named("h200"), 0
    )  # fmt: skip
    assert by(ragged(32768)).kernel == "tiled"
    assert by(ragged(8192, 8)).kernel == "memory_bounded"
    few = by(ragged(256))
    assert few.kernel == "xla"
    assert "estimated to take" in dict(few.not_chosen)["tiled"]


@pytest.mark.parametrize("name", ["attention", "gated_linear_unit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_usual_spelling_computes_the_same(name: str, dtype: str) -> None:
    op = registry().op(name)
    shapes = {"q": (2, 9, 4, 8), "k": (2, 9, 2, 8), "v": (2, 9, 2, 8),
              "bias": (1, 4, 9, 9)}  # fmt: skip
    params = {"window": (None, 0), "softcap": 5.0}
    if name != "attention":
        shapes = {"x": (3, 5, 8), "w_gate": (8, 6), "w_up": (8, 6), "b_up": (6,)}
        params = {"activation": "gelu_tanh", "up_shift": 1.0, "clip_up": (-1.0, 1.0)}
    structs = {n: jax.ShapeDtypeStruct(s, dtype) for n, s in shapes.items()}
    given = op.sample(jax.random.key(0), structs, params)
    want, got = op.reference(**given, **params), op.usual(**given, **params)
    assert got.dtype == want.dtype
    limit = oracle.allowed(dtype)
    assert oracle.error(got, want) <= limit


def test_branches_that_are_kept_for_every_layer_count_together() -> None:
    """One layer's are small; those of all steps of a scan are not."""
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)

    def weights(n: int):
        shapes = (64, 1024), (64, 1024), (1024, 64)
        return [jax.ShapeDtypeStruct((n, *s), jnp.float32) for s in shapes]

    def layer(x, weights):
        gate, up, down = weights
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down, None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    def kernel(fn, n: int) -> str:
        report = rewriter.explain(fn, patterns="gated_linear_unit")(weights(n), x)
        (site,) = report.sites
        return site.kernel

    assert kernel(jax.grad(loss), 2) == "xla"
    assert kernel(jax.grad(loss), 8) == "memory_bounded"
    assert kernel(loss, 8) == "xla"


SHAPES = {
    "attention": {"q": (4, 2048, 16, 64), "k": (4, 2048, 16, 64),
                  "v": (4, 2048, 16, 64)},
    "gated_linear_unit": {"x": (8192, 4096), "w_gate": (4096, 14336),
                          "w_up": (4096, 14336)},
    "rms_norm": {"x": (16384, 4096), "scale": (4096,)},
    "layer_norm": {"x": (16384, 4096), "scale": (4096,), "bias": (4096,)},
    "ragged_dot": {"lhs": (8192, 4096), "rhs": (16, 4096, 4096)},
}  # fmt: skip


def use(op: str, dtype: str = "bfloat16", **params):
    given = {n: jax.ShapeDtypeStruct(s, dtype) for n, s in SHAPES[op].items()}
    if op == "ragged_dot":
        given["group_sizes"] = jax.ShapeDtypeStruct((16,), jnp.int32)
    return spec_of(registry().op(op), given, params)


@pytest.mark.parametrize("differentiated", [0, 1])
@pytest.mark.parametrize("target", ["tpu_v5p", "h100", "a100", "b200"])
@pytest.mark.parametrize("op", SHAPES)
def test_every_op_is_estimated_for_devices_without_measurements(
    op: str, target: str, differentiated: int
) -> None:
    on_it = device.named(target)
    kernels = registry().kernels(op)
    config = Config(tune="off") if target == "h100" else Config()  # an H200's serve it
    choice = choose(use(op), config, kernels, on_it, differentiated)
    on_tpu = on_it.platform == "tpu"
    if op == "attention" and on_tpu:  # by its own rule, before others
        assert (choice.kernel, choice.origin) == ("mosaic_tpu", "heuristic")
        kernels = tuple(k for k in kernels if k.name != "mosaic_tpu")
        choice = choose(use(op), Config(), kernels, on_it, differentiated)
    counted = on_tpu and differentiated and op.endswith("norm")  # and shipped
    assert choice.origin == ("simulated" if counted else "estimated")
    passes = "forward_and_vjp" if differentiated else "forward"
    models = (k.estimate for k in kernels if k.estimate is not None)
    found = {n: s for f in models for n, s in f(use(op), on_it, passes).items()}
    least = (
        registry()
        .op(op)
        .cost(dict(use(op).shapes), dict(use(op).dtypes), dict(use(op).params), passes)
    )
    roof = max(least.flops / on_it.flops, least.bytes / on_it.bandwidth)
    here = [k for k in kernels if on_it.platform in k.platforms]
    for kernel in (k for k in here if k.estimate and k.supports(use(op)).ok):
        assert roof < found[kernel.name] < 50 * roof  # never faster than the device
    assert roof < found["xla"] < 500 * roof
    wins = "xla" if op != "ragged_dot" or on_tpu else "memory_bounded"
    if target == "h100" and op in ("attention", "ragged_dot"):
        wins = "hopper"
    if target == "h100" and op.endswith("norm") and (differentiated or op[0] == "l"):
        wins = "hopper"
    if counted:
        wins = "mosaic_tpu"
    assert choice.kernel == wins


def test_what_does_not_fit_is_estimated_to_be_endless() -> None:
    x = jax.ShapeDtypeStruct((1, 1 << 18, 16, 128), jnp.bfloat16)
    spec = spec_of(registry().op("attention"), {"q": x, "k": x, "v": x}, {})
    kernels = [k for k in registry().kernels("attention") if k.name != "mosaic_tpu"]
    choice = choose(spec, Config(), kernels, device.named("tpu_v5p"))
    assert choice.kernel == "memory_bounded"
    told = dict(choice.not_chosen)["xla"]
    assert told == "its temporary arrays take more than 80% of the 95 GiB of TPU v5"


def test_estimates_agree_with_what_was_measured_on_an_h200() -> None:
    """Of kernels within a factor of two and a half, over a range of a thousand.

    But for what was not tried, a loop over groups of two rows, and a bias's cotangent.
    """
    on_it, ratios = device.named("h200"), []
    for op in SHAPES:
        kernels = {k.name: k for k in registry().kernels(op) if k.estimate is not None}
        for key, measured in shipped(op).entries:
            if key.device != on_it.kind:
                continue
            spec = Spec(op, key.shapes, key.dtypes, key.params)
            few = op == "ragged_dot" and (
                spec.shape("lhs")[0] < 8 * spec.shape("group_sizes")[0]
            )
            left = {"memory_bounded"} if few else set()
            if op == "attention" and not cudnn.modelled(spec).ok:
                left |= {"cudnn"} | ({"hopper"} if key.passes != "forward" else set())
            for m in measured:
                name = m.implementation.name
                if name in left:
                    continue
                if name in kernels and m.median_us:
                    model = kernels[name].estimate(spec, on_it, key.passes)
                    ratios.append(1e6 * model[name] / m.median_us)
    assert len(ratios) > 40
    assert all(0.4 < r < 2.5 for r in ratios), sorted(ratios)


def test_a_users_kernel_without_a_model_is_chosen_by_its_own_rule() -> None:
    kernels = registry().kernels("rms_norm")
    plain = next(k for k in kernels if k.name == "memory_bounded")
    mine = dataclasses.replace(
        plain, name="mine", estimate=None, profitable=lambda spec, platform: YES
    )
    target = device.named("a100")
    choice = choose(use("rms_norm"), Config(), [mine, plain], target)
    assert (choice.kernel, choice.origin) == ("mine", "heuristic")
    never = dataclasses.replace(
        mine, profitable=lambda spec, platform: no("never", "never pays")
    )
    choice = choose(use("rms_norm"), Config(), [never, plain], target)
    assert (choice.kernel, choice.origin) == ("xla", "estimated")
    assert dict(choice.not_chosen)["mine"] == "never pays"
    unknown = device.Device("NVIDIA Z80", "cuda")
    assert choose(use("rms_norm"), Config(), [plain], unknown).origin == "heuristic"


@pytest.mark.parametrize(
    ("forced", "error", "suggestion"),
    [
        ({"atention": "xla"}, rewriter.UnknownPattern, "'attention'"),
        ({"attention": "hoper"}, rewriter.UnknownKernel, "'hopper'"),
        ({"attention": ("xla", "memory-bound")}, rewriter.UnknownKernel, "'memory_bou"),
        ({"rms_norm": "hopper_decode"}, rewriter.UnknownKernel, "'hopper'"),
        ({"rms_norm": {"backward": "hoper"}}, rewriter.UnknownKernel, "'hopper'"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_told_where_the_program_has_no_such_op(
    forced: Any, error: type[Exception], suggestion: str
) -> None:
    with pytest.raises(error, match=suggestion):
        rewriter.optimize(jnp.sin, implementation=forced)(1.0)


def test_a_kernel_of_a_form_alone_may_be_asked_for() -> None:
    forced = {"attention": "hopper_latent"}
    assert rewriter.optimize(jnp.sin, implementation=forced)(0.0) == 0
