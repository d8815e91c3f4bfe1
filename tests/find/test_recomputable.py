"""The list of what a replacement computes itself is complete, and each entry holds."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.algebra import emit
from rewriter.find import recomputable

ROOT = pathlib.Path(rewriter.__file__).parent
READS = {
    "issubdtype", "dtype", "result_type", "promote_types", "finfo", "iinfo", "shape",
}  # fmt: skip
"""Functions of JAX that make no array."""

MAKES = {
    "find/reading.py": {"concatenate"},  # "join"
    "find/derivative.py": {"ones_like", "asarray"},  # traced for proofs alone
    "site/ring.py": {"all_gather", "axis_index", "zeros_like"},
    "site/shards.py": {"axis_index", "psum", "with_sharding_constraint"},
    "site/implement.py": {"optimization_barrier", "zeros"},
    "site/kernel_call.py": {"zeros"},
    "site/site.py": {"asarray", "moveaxis"},
    "site/vmap_levels.py": {"broadcast_to", "moveaxis"},
    "patterns/gated_linear_unit/slopes.py": {"asarray"},  # traced for proofs alone
}
"""Where else arrays are made for a site: layout, devices, and zeros."""

EMITS = {
    "layout": {"broadcast_to", "flip", "index_in_dim", "slice_in_dim", "full", "zeros"},
    "gather": {"broadcast_arrays", "arange"},
    "choose": {"where"},
    "clamp": {"maximum", "minimum", "asarray"},
    "log": {"log", "logaddexp"},
    "leaf": {"integer_pow", "sqrt", "rsqrt"},
}
"""Functions of JAX that make operands, by the entry of the list that covers them."""


def made_in(path: pathlib.Path) -> set[str]:
    """Names of functions of jax.numpy and jax.lax that a module calls or passes on."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in ("jnp", "lax", "jax.lax", "jax.numpy"):
                found.add(node.attr)
    called = {
        n.func.attr
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    }
    return (found & (called | {"logaddexp"})) - READS


def test_code_is_only_made_by_the_emitter() -> None:
    made = {}
    for folder in ("patterns", "find", "gradients", "site"):
        for path in (ROOT / folder).rglob("*.py"):
            if made_in(path):
                made[str(path.relative_to(ROOT))] = made_in(path)
    assert made == MAKES


def test_each_kind_with_code_is_in_the_list() -> None:
    assert recomputable.ALLOWED.keys() == emit.KINDS
    path = ROOT / "algebra" / "emit.py"
    compared = {
        right.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for right in ast.walk(node)
        if isinstance(right, ast.Constant) and isinstance(right.value, str)
    }
    of_indices = {"k", "aff", "cat", "div"}  # arguments of leaves
    assert compared - of_indices == emit.KINDS


def test_each_function_that_makes_an_operand_is_in_the_list() -> None:
    assert EMITS.keys() <= recomputable.ALLOWED.keys() | recomputable.AROUND.keys()
    assert made_in(ROOT / "algebra" / "emit.py") == set().union(*EMITS.values())


def test_each_entry_has_a_reason() -> None:
    lists = recomputable.ALLOWED, recomputable.AROUND, recomputable.PREPARED
    for name, reason in {k: v for each in lists for k, v in each.items()}.items():
        assert reason, name


def test_each_preparation_is_in_the_list() -> None:
    modules = {p.stem for p in (ROOT / "program" / "prepare").glob("*.py")}
    assert recomputable.PREPARED.keys() == modules - {"__init__"}


# ------------------------------------------------------- entries at the ends of dtypes
T = 12
EDGE = np.iinfo(np.int32).max
ROWS, J = np.arange(T, dtype=np.int32)[:, None], np.arange(T, dtype=np.int32)
ON = J % 2 == 0
NEAR = J + np.int32(EDGE - T + 1)
FEW = J // 3 + np.int32(30_000_000)  # beyond what float32 holds
SMALL = J.astype(np.uint8) + np.uint8(250)
MASKS = {
    "leaf": lambda: FEW[:, None] == FEW,
    "leaf, wrapped": lambda: (SMALL + jnp.uint8(3))[:, None] >= SMALL,
    "iota": lambda: ROWS >= J,
    "relu": lambda x: jnp.maximum(x, 3)[:, None] + ROWS >= jnp.maximum(x, 5) + J,
    "relu, at an end": lambda x: jnp.arange(T) < jnp.maximum(NEAR, x)[:, None],
    "ind": lambda: (jnp.asarray(FEW) + ON)[:, None] == jnp.asarray(FEW) + ON,
    "ge": lambda x: (NEAR + x)[:, None] >= NEAR,
    "ge, of a difference": lambda x: NEAR[:, None] - x - EDGE >= 0,
    "eq": lambda x: (NEAR + x)[:, None] == NEAR + x,
    "clamp": lambda x: x[:, None] + np.int32(1 << 28) > J,
    "clamp, at an end": lambda x: x[:, None] > J - NEAR,
}


def test_entries_hold_at_the_ends_of_dtypes() -> None:
    """Pair by pair: the values are one-hot, and the result shows the weights."""
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, T, 4), np.float32)
    shown = np.eye(T, dtype=np.float32)[None, None]
    x = (J * 5) % 7 - 3

    def every(q, k, v, x):
        out = {}
        for name, mask in MASKS.items():
            seen = mask(x) if mask.__code__.co_argcount else mask()
            s = jnp.where(seen, jnp.einsum("bnth,bnsh->bnts", q, k), -1e9)
            out[name] = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s), v)
        return out

    forced = rewriter.optimize(every, implementation={"attention": "memory_bounded"})
    assert len(forced.report(q, k, shown, x).sites) == len(MASKS)
    ours, wanted = forced(q, k, shown, x), jax.jit(every)(q, k, shown, x)
    for name, out in ours.items():
        np.testing.assert_allclose(out, wanted[name], atol=1e-5, err_msg=name)


def test_a_maximum_of_floats_is_not_computed_anew() -> None:
    """``b + max(a - b, 0)`` loses a where b is a fill of -1e9."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, T, 4), np.float32)
    bias = np.where(ON, q[0, 0, :, :1], np.float32(-1e9))

    def fn(q, k, v, a, b):
        s = jnp.einsum("bnth,bnsh->bnts", q, k) + jnp.maximum(a, b)
        return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(s), v)

    given = q, k, v, np.full_like(bias, 0.5), bias
    forced = rewriter.optimize(fn, implementation={"attention": "memory_bounded"})
    assert forced.report(*given).sites
    np.testing.assert_allclose(forced(*given), jax.jit(fn)(*given), atol=1e-5)
