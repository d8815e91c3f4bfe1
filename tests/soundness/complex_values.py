"""Programs through complex numbers: made of real arrays, changed, and read again."""

from __future__ import annotations

from tests.soundness import losses, units
from tests.soundness.program import Program
from tests.soundness.writer import Writer

VALUES = (
    "normal", "normal", "normal", "times 60", "some zeros", "constant rows",
    "zero rows", "times 1e-3", "some nan", "rows of other means",
)  # fmt: skip
MADE = (
    "lax.complex({a}, {b})", "{a} + 1j * {b}", "{a} * (1.0 + 2.0j)", "{b} + {a} * 1j",
    "jnp.exp(1j * {a}) * {b}", "lax.complex({a}, 0.0 * {b})", "{a} * jnp.exp(0.5j)",
    "jnp.fft.fft({a}, axis=-1)", "lax.complex({a}, {a}) * {b}",
    "{a} * ({b} * 1j + 1.0)",
    "jnp.stack([{a}, {b}], -1) @ jnp.array([1.0, 1j])",
)  # fmt: skip
CHANGED = (
    "{z} * (1.0 + 2.0j)", "{z} * (1.0 + 2.0j) ** 2", "{z} * 1j", "jnp.conj({z})",
    "{z} * jnp.conj({z})", "{z} * {z}", "{z} / (1.0 + abs({z}))", "-{z}", "{z} * 0.5",
    "{z} + (0.5 - 0.25j)", "{z} - {z}.mean(-1, keepdims=True)", "jnp.sin({z} * 0.1)",
    "jnp.fft.ifft(jnp.fft.fft({z}, axis=-1) * 0.5, axis=-1)", "jnp.exp({z} * 0.01)",
    "jnp.where(jnp.real({z}) > 0.0, {z}, 0.0)", "{z} * 1j * -1j", "{z}[..., ::-1]",
    "jnp.where(jnp.imag({z}) > 0.0, {z}, 1j * {z})", "jnp.cumsum({z}, -1)",
    "lax.complex(jnp.imag({z}), jnp.real({z}))", "{z} - {z}.sum(-1, keepdims=True)",
    "{z} * lax.rsqrt((abs({z}) ** 2).mean(-1, keepdims=True) + 1e-6)",
    "lax.complex(jax.nn.softmax(jnp.real({z}), -1), jnp.imag({z}))", "{z} / (2.0 - 1j)",
    "jnp.nan_to_num({z})", "{z} / {z}.shape[-1] ** 0.5", "lax.stop_gradient({z}) + {z}",
)  # fmt: skip
READ = (
    "jnp.real({z})", "jnp.real({z})", "jnp.imag({z})", "abs({z})", "abs({z}) ** 2",
    "jnp.real({z} * jnp.conj({z}))", "jnp.real({z}) + jnp.imag({z})",
    "jnp.real({z} * (0.5 - 1.0j))", "jnp.real({z}) ** 2 + jnp.imag({z}) ** 2",
    "jnp.real({z} ** 2)", "jnp.imag(jnp.conj({z}))", "jnp.real({z} / (1.0 + 1.0j))",
    "jnp.real({z}) * jnp.imag({z})", "jnp.real(jnp.fft.ifft({z}, axis=-1))",
    "jnp.fft.irfft({z}, n={z}.shape[-1], axis=-1)", "jnp.imag({z} * 2j)",
)  # fmt: skip
SQUARES = (
    "({z} * jnp.conj({z})).mean(-1, keepdims=True)",
    "({z} * {z}).mean(-1, keepdims=True)", "(abs({z}) ** 2).mean(-1, keepdims=True)",
    "jnp.square({z}).mean(-1, keepdims=True)",
    "jnp.real({z} * jnp.conj({z})).mean(-1, keepdims=True)",
    "(jnp.real({z}) ** 2 + jnp.imag({z}) ** 2).mean(-1, keepdims=True)",
    "(jnp.real({z}) ** 2).mean(-1, keepdims=True)", "{z}.var(-1, keepdims=True)",
    "jnp.einsum('...n,...n->...', {z}, {z})[..., None] / {z}.shape[-1]",
    "jnp.einsum('...n,...n->...', {z}, jnp.conj({z}))[..., None] / {z}.shape[-1]",
)  # fmt: skip
ROOTS = (
    "{z} / jnp.sqrt({v} + 1e-6)", "{z} * lax.rsqrt({v} + 1e-5)",
    "{z} * lax.rsqrt(jnp.real({v}) + 1e-5)", "{z} / jnp.sqrt(jnp.real({v}) + 1e-6)",
)  # fmt: skip
SCALED = ("{o} * {g}", "{o} * ({g} * 1j)", "{o} * lax.complex({g}, {g})", "{g} * {o}")


def program(seed: int) -> Program:
    """One of several kinds of programs, with complex values somewhere in it."""
    w = Writer("complex", seed)
    kinds = (_norm, _norm, _attention, _attention, _unit, _loss, _lookup, _products)
    return w.program(w.one(kinds)(w))


def _given(w: Writer, name: str, *shape: int) -> str:
    """A real array, perhaps through complex numbers."""
    x = w.argument(name, shape, w.one(VALUES), operand=True)
    return _read(w, _complex(w, x, shape)) if w.chance(0.3) else x


def _complex(w: Writer, x: str, shape: tuple[int, ...]) -> str:
    """A complex array of a real one."""
    text = w.one(MADE)
    b = w.argument("b", shape, w.one(VALUES), operand=True) if "{b}" in text else ""
    z = w.let(text.format(a=x, b=b), "z")
    for _ in range(w.one((0, 1, 1, 2))):
        z = w.let(w.one(CHANGED).format(z=z), "z")
    return z


def _read(w: Writer, z: str) -> str:
    """A real array of a complex one."""
    return w.let(w.one(READ).format(z=z), "x")


def _norm(w: Writer) -> str:
    """Rows over the root of the mean of their squares."""
    m, n = w.one((8, 16)), w.one((16, 32))
    x = w.argument("x", (m, n), w.one(VALUES), operand=True)
    z = _complex(w, x, (m, n))
    z = _read(w, z) if w.chance(0.3) else z
    v = w.let(w.one(SQUARES).format(z=z), "v")
    out = w.let(w.one(ROOTS).format(z=z, v=v), "o")
    if w.chance(0.8):
        g = w.argument("g", (n,), "normal", operand=True)
        out = w.let(w.one(SCALED).format(o=out, g=g), "o")
    return _read(w, w.let(f"{out} * (1.0 + 0j)", "o"))


def _attention(w: Writer) -> str:
    """Attention with complex operands, scores or results."""
    shape = (1, 16, 2, 8)
    where = w.one(("q", "k", "v", "q, k", "q, k, v", "scores", "rotated", "bias"))
    names = where.split(", ")
    q, k, v = (
        _complex(w, w.argument(n, shape, w.one(VALUES), operand=True), shape)
        if n in names
        else w.argument(n, shape, "normal", operand=True)
        for n in ("q", "k", "v")
    )
    if where == "rotated":
        q, k = (_rotated(w, x) for x in (q, k))
    other = w.one((k, f"jnp.conj({k})"))
    s = w.let(f"jnp.einsum('btnh,bsnh->bnts', {q}, {other})", "s")
    if where == "scores":
        s = w.let(w.one(CHANGED).format(z=f"({s} * (1.0 + 0.5j))"), "s")
    if "q" in names or "k" in names or where == "scores":
        s = _read(w, s)
    if where == "bias":
        bias = w.argument("c", (1, 2, 16, 16), "normal", operand=True)
        s = w.let(f"{s} + {_read(w, _complex(w, bias, (1, 2, 16, 16)))}", "s")
    s = w.let(f"{s} * {w.one(('0.35', '1.0', '0.01'))}", "s")
    if w.chance(0.5):
        s = w.let(f"jnp.where(jnp.tril(jnp.ones((16, 16), bool)), {s}, -jnp.inf)", "s")
    p = w.let(f"jax.nn.softmax({s}, -1)", "p")
    out = w.let(f"jnp.einsum('bnts,bsnh->btnh', {p}, {v})", "o")
    return _read(w, out) if "v" in names else out


def _rotated(w: Writer, x: str) -> str:
    """Positions as turns of pairs of columns, as Llama had them at first."""
    pair = w.one((f"{x}[..., ::2], {x}[..., 1::2]", f"{x}[..., :4], {x}[..., 4:]"))
    turn = "jnp.exp(1j * jnp.arange(16.0)[:, None, None] / 10.0 ** jnp.arange(4.0))"
    z = w.let(f"lax.complex({pair}) * {turn}", "z")
    text = w.one((
        f"jnp.concatenate([jnp.real({z}), jnp.imag({z})], -1)",
        f"jnp.stack([jnp.real({z}), jnp.imag({z})], -1).reshape({x}.shape)",
        f"lax.complex(*jnp.unstack(jnp.zeros((2,) + {x}.shape))).real + "
        f"jnp.concatenate([jnp.imag({z}), jnp.real({z})], -1)",
    ))  # fmt: skip
    return w.let(text, "x")


def _unit(w: Writer) -> str:
    """A gated unit, one branch of which is complex on the way."""
    x = _given(w, "x", 8, 16)
    a, u = (w.argument(n, (16, 24), "normal", operand=True) for n in ("w", "u"))
    a, u = w.let(f"{x} @ {a}", "a"), w.let(f"{x} @ {u}", "u")
    if w.chance(0.5):
        a = _read(w, _complex(w, a, (8, 24)))
        return units.gated(w, a, u)
    u = _complex(w, u, (8, 24))
    h = w.let(w.one(w.one(units.GATES)).format(a=a), "h")
    return _read(w, w.let(f"{h} * {u}", "o"))


def _loss(w: Writer) -> str:
    """A loss over classes of logits that are read of complex numbers."""
    y = w.argument("y", (8, 16), w.one(VALUES), operand=True)
    if w.chance(0.5):
        matrix = w.argument("w", (16, 16), "normal", operand=True)
        z = w.let(f"{_complex(w, y, (8, 16))} @ ({matrix} * (1.0 - 1j))", "z")
    else:
        z = _complex(w, y, (8, 16))
    i = w.argument("i", (8,), "classes of 16", "int32")
    names = {"y": _read(w, z), "i": i, "v": 16, "m": 8}
    names["l"] = w.let(w.one(losses.LOGS).format(**names), "l")
    return w.let("-" + w.one(losses.PICKED).format(**names), "o")


def _lookup(w: Writer) -> str:
    """Rows of a complex table."""
    t = _complex(w, w.argument("t", (16, 8), w.one(VALUES), operand=True), (16, 8))
    i = w.argument("i", (24,), w.one(("classes of 16", "small")), "int32")
    text = w.one((
        "{t}[{i}]", "jnp.take({t}, {i}, axis=0, mode='clip')",
        "jax.nn.one_hot({i}, 16) @ {t}", "jnp.take({t}, {i}, axis=0, mode='fill')",
        "jnp.zeros((16, 8), {t}.dtype).at[{i}].add({t}[{i} % 16] * 1j)",
        "jax.ops.segment_sum({t}[{i} % 16], {i}, 16)",
    ))  # fmt: skip
    return _read(w, w.let(text.format(t=t, i=i), "o"))


def _products(w: Writer) -> str:
    """Products of groups, and those of stored integers, with complex scales."""
    x = _given(w, "x", 16, 8)
    if w.chance(0.5):
        sizes = w.argument("n", (3,), "group sizes of about 16", "int32")
        matrix = w.argument("w", (3, 8, 16), "normal", operand=True)
        out = w.let(f"lax.ragged_dot({x}, {matrix}, {sizes})", "o")
        return _read(w, _complex(w, out, (16, 16)))
    stored = w.argument("w", (8, 16), "small", "int8")
    scale = w.argument("s", (16,), "positive", operand=True)
    scale = w.one((f"({scale} * (1.0 + 1j))", f"lax.complex({scale}, -{scale})"))
    out = w.let(f"({x} @ {stored}.astype(jnp.float32)) * {scale}", "o")
    return _read(w, out)
