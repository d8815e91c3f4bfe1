"""PyTorch modules: the numbers of PyTorch itself, with kernels forced."""

from __future__ import annotations

import copy
import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import rewriter

torch = pytest.importorskip("torch")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("torchax is not installed", allow_module_level=True)

import rewriter.torch  # noqa: E402
from rewriter.torch_modules.imported import torchax  # noqa: E402

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore")]
nn = torch.nn
ROOT = pathlib.Path(__file__).parent.parent.parent

NAMES = ("Llama", "BERT", "ViT", "Whisper", "Mixtral", "GPT-2")


@pytest.mark.parametrize("name", NAMES)
def test_public_models(name):
    transformers = pytest.importorskip("transformers", minversion="5")
    del transformers
    from tests.support import torch_models as models

    model, arguments = models.made(name)
    want, grads = models.gradients(model, arguments)
    fast = rewriter.torch.optimize(model, implementation=models.FORCED)
    got, found = models.gradients(fast, arguments)
    report = fast.report(**arguments)
    counts = {op: n for op, n in report.counts().items() if n and op in models.OPS}
    assert counts == models.MODELS[name][1]
    assert all(s.replaced for s in report.sites if s.op in models.OPS)
    assert not report.misses
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    scale = max(float(g.abs().max()) for g in grads.values() if g is not None)
    assert grads.keys() == found.keys()
    for key, grad in grads.items():
        assert (grad is None) == (found[key] is None), key
        if grad is not None:
            assert float((grad - found[key]).abs().max()) < 1e-5 * scale, key
    assert list(fast.state_dict()) == list(model.state_dict())


class Attention(nn.Module):
    """Causal attention as PyTorch has it, without a mask of its own."""

    def __init__(self, width=16, heads=2, **options):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads
        self.options = options

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (p.transpose(1, 2) for p in parts)
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, **self.options).transpose(1, 2).flatten(2)


class Masked(Attention):
    """The same with a buffer that says which keys are seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.arange(6)[None] < 4)

    def forward(self, x):
        self.options = {"attn_mask": self.seen}
        return super().forward(x)


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Packed(SwiGLU):
    def forward(self, x):
        gate, up = (x @ torch.cat([self.gate.weight, self.up.weight]).T).chunk(2, -1)
        return self.down(nn.functional.gelu(gate) * up)


class ByHand(nn.Module):
    """RMS norm as Llama writes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype)


X = np.random.default_rng(0).normal(size=(2, 6, 16)).astype("f4")
LAYERS = {
    "causal": (lambda: Attention(is_causal=True), X, "attention"),
    "scaled": (lambda: Attention(scale=0.3), X, "attention"),
    "masked": (Masked, X, "attention"),
    "rms_norm": (lambda: nn.RMSNorm(16, eps=1e-6), X, "rms_norm"),
    "rms_norm by hand": (ByHand, X[..., :8], "rms_norm"),
    "layer_norm": (lambda: nn.LayerNorm(16), X, "layer_norm"),
    "swiglu": (SwiGLU, X[..., :8], "gated_linear_unit"),
    "packed": (Packed, X[..., :8], "gated_linear_unit"),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True),
        X,
        "attention",
    ),
    "multihead": (
        lambda: nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True),
        (X, X[:, :4]),
        "attention",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    make, values, op = LAYERS[name]
    values = values if isinstance(values, tuple) else (values,)
    torch.manual_seed(0)
    layer = make()
    fast = rewriter.torch.optimize(
        copy.deepcopy(layer), implementation={op: "memory_bounded"}
    )
    inputs = [[torch.from_numpy(v).requires_grad_() for v in values] for _ in range(2)]
    want, got = layer(*inputs[0]), fast(*inputs[1])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert any(s.replaced for s in fast.report().sites if s.op == op)
    want.square().sum().backward()
    got.square().sum().backward()
    pairs = zip([*layer.parameters(), *inputs[0]], [*fast.parameters(), *inputs[1]])  # noqa: B905
    for a, b in pairs:
        torch.testing.assert_close(b.grad, a.grad, atol=1e-4, rtol=1e-4)


def test_training_is_pytorchs():
    """Four steps of AdamW, with a tied weight and a parameter that nothing reads."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(10, 6), nn.RMSNorm(6)
            self.head = nn.Linear(6, 10, bias=False)
            self.head.weight, self.unread = self.embed.weight, nn.Linear(2, 2)

        def forward(self, tokens):
            return {"logits": self.head(self.norm(self.embed(tokens)))}

    torch.manual_seed(0)
    plain = Tied()
    fast = rewriter.torch.optimize(copy.deepcopy(plain))
    tokens, losses = torch.arange(10).reshape(2, 5), []
    for model in (plain, fast):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            logits = model(tokens)["logits"].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    np.testing.assert_allclose(losses[:4], losses[4:], rtol=1e-4)
    for (name, a), (other, b) in zip(
        plain.state_dict().items(), fast.state_dict().items(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [1, 2])
def test_running_statistics(kind):
    layers = {
        1: (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(8, 4)),
        2: (nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False)),
            torch.randn(2, 3, 6, 6)),
    }  # fmt: skip
    plain, x = layers[kind]
    fast = rewriter.torch.optimize(copy.deepcopy(plain))
    for _ in range(2):
        torch.testing.assert_close(fast(x), plain(x), atol=1e-5, rtol=1e-5)
    for a, b in zip(plain.buffers(), fast.buffers(), strict=True):
        torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5)
    assert not fast.eval().original[1].training
    assert not fast.training
    torch.testing.assert_close(fast(x), plain.eval()(x), atol=1e-5, rtol=1e-5)


def test_what_a_module_sets_itself():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = torch.arange(3.0)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x, scale=1.0):
            self.last = x * 2
            self.count += 1
            self.plain = self.plain + 1
            return {"y": x * scale + self.plain, "at": x.argmax(), "name": "text"}

    plain, x = Counting(), torch.ones(3)
    fast = rewriter.torch.optimize(Counting())
    for _ in range(3):
        want, got = plain(x, scale=2.0), fast(x, scale=2.0)
    torch.testing.assert_close(got["y"], want["y"])
    assert (got["name"], int(got["at"]), int(fast.count)) == ("text", 0, 3)
    assert torch.equal(fast.original.plain, plain.plain)
    assert torch.equal(fast.original.last, plain.last)


def test_random_numbers_follow_pytorchs_seed():
    fast = rewriter.torch.optimize(nn.Dropout(0.5))
    torch.manual_seed(1)
    first, second = fast(torch.ones(64)), fast(torch.ones(64))
    torch.manual_seed(1)
    assert torch.equal(fast(torch.ones(64)), first)
    assert not torch.equal(first, second)
    assert set(first.tolist()) == {0.0, 2.0}
    assert torch.equal(fast.eval()(torch.ones(4)), torch.ones(4))
    with pytest.raises(rewriter.RewriterError, match="no key"):
        fast.train().apply_to(fast.state(), np.ones(4, "f4"))


def test_a_cache_goes_in_and_out():
    transformers = pytest.importorskip("transformers", minversion="5")
    from tests.support import torch_models as models

    model, arguments = models.made("Llama")
    model.config.use_cache = True
    fast = rewriter.torch.optimize(model)
    one = torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad():
        a, b = model(**arguments), fast(**arguments)
        assert isinstance(b.past_key_values, transformers.DynamicCache)
        a = model(input_ids=one, past_key_values=a.past_key_values)
        b = fast(input_ids=one, past_key_values=b.past_key_values)
    torch.testing.assert_close(b.logits, a.logits, atol=1e-5, rtol=1e-5)


def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


@rewriter.torch.kernel
def doubled(x):
    """A Pallas kernel; its gradient is that of its own rule."""
    return _doubled(x)


@jax.custom_vjp
def _doubled(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, out_shape=shape, interpret=True)(x)


_doubled.defvjp(lambda x: (_doubled(x), None), lambda _, g: (2 * g,))


def test_a_kernel_in_a_module_and_outside():
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3.0))

        def forward(self, x):
            return doubled(x * self.weight) + 1

    plain, x = Doubling(), torch.ones(2, 3)
    for model in (plain, rewriter.torch.optimize(plain)):
        model.zero_grad()
        out = model(x)
        torch.testing.assert_close(out, 2 * x * plain.weight + 1)
        out.sum().backward()
        torch.testing.assert_close(plain.weight.grad, torch.full((3,), 4.0))
    assert "pallas_call" in str(rewriter.torch.optimize(plain).jaxpr(x))


def test_a_function_of_jax_and_export():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8))
    fast, x = rewriter.torch.optimize(model), torch.randn(3, 4)
    state, want = fast.state(), model(x).detach().numpy()
    got, after = fast.apply_to(state, x.numpy())
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert after.params.keys() == state.params.keys() == dict(model.state_dict()).keys()
    loss = lambda p: fast.apply_to(state._replace(params=p), x.numpy())[0].sum()
    model(x).sum().backward()
    grads = jax.grad(loss)(state.params)
    np.testing.assert_allclose(grads["0.weight"], model[0].weight.grad, atol=1e-5)
    made = rewriter.torch.export(fast, platforms=("cpu", "tpu"))(x)
    assert made.manifest["platforms"] == ["cpu", "tpu"]
    held = {k: np.asarray(v.detach()) for k, v in model.state_dict().items()}
    np.testing.assert_allclose(made.call(held, x.numpy()), want, atol=1e-6)
    fast.load(jax.tree.map(jnp.zeros_like, state))
    assert not model[0].weight.any()
    batched = nn.BatchNorm1d(4)
    with pytest.raises(rewriter.StateLost, match="eval"):
        rewriter.torch.export(batched, platforms="cpu")(x)


def test_modules_without_numbers():
    with torch.device("meta"):
        layer, x = nn.RMSNorm(4096), torch.empty(4096, 4096)
    report = rewriter.torch.explain(layer, target="h200")(x)
    assert [s.replaced for s in report.sites] == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_dtypes_come_back(dtype):
    x = torch.arange(-4, 4).to(dtype)
    out = rewriter.torch.optimize(nn.Identity())(x)
    assert out.dtype == dtype
    assert torch.equal(out, x)


def test_what_is_refused():
    with pytest.raises(rewriter.NotTraceable, match="no torch"):
        rewriter.torch.optimize(lambda x: x)
    identity = rewriter.torch.optimize(nn.Identity())
    with pytest.raises(rewriter.RewriterError, match="jax_enable_x64"):
        identity(torch.ones(2, dtype=torch.float64))
    with pytest.raises(rewriter.RewriterError, match="int32 does not hold"):
        identity(torch.tensor([2**40]))
    with jax.enable_x64(True):
        assert identity(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_inside_of_torchax():
    env, layer = torchax().default_env(), nn.RMSNorm(4)
    fast = rewriter.torch.optimize(layer)
    x = np.ones((2, 4), "f4")
    out = fast(env.j2t_iso(jnp.asarray(x)))
    np.testing.assert_allclose(
        out.jax(), layer(torch.from_numpy(x)).detach(), atol=1e-6
    )


def test_the_package_does_not_import_pytorch():
    code = "import rewriter, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
