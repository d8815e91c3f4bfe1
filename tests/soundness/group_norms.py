"""Programs that are group norms, or nearly."""

from __future__ import annotations

from tests.soundness import operands
from tests.soundness.norms import AFTER, EPSILONS, VALUES
from tests.soundness.program import Program
from tests.soundness.writer import Writer

CENTERS = (
    "{y} - {y}.mean({a}, keepdims=True)",
    "{y} - {y}.sum({a}, keepdims=True) / {n}",
)
ODD_CENTERS = (
    "{y} - {y}.mean(1, keepdims=True)", "{y} - {y}.mean((0, 1, 3), keepdims=True)",
    "{y} - lax.stop_gradient({y}.mean({a}, keepdims=True))", "{y}",
    "{y} - {y}.mean((1, 2), keepdims=True)", "{y} - {y}.max({a}, keepdims=True)",
)  # fmt: skip
SQUARES = (
    "({c} * {c}).mean({a}, keepdims=True)",
    "jnp.square({c}).sum({a}, keepdims=True) / {n}",
    "{y}.var({a}, keepdims=True)",
    "({y} * {y}).mean({a}, keepdims=True) - {y}.mean({a}, keepdims=True) ** 2",
    "jnp.maximum(({y} * {y}).mean({a}, keepdims=True)"
    " - {y}.mean({a}, keepdims=True) ** 2, 0.0)",
)  # fmt: skip
ODD_SQUARES = (
    "{y}.var({a}, ddof=1, keepdims=True)", "({c} * {c}).mean((1, 2), keepdims=True)",
    "lax.stop_gradient(({c} * {c}).mean({a}, keepdims=True))",
    "({c} * {c}).mean((0, 1, 3), keepdims=True)",
    "({c} * {y}).mean({a}, keepdims=True)",
)  # fmt: skip
ROOTS = (
    "{c} * lax.rsqrt({v} + {e})", "{c} / jnp.sqrt({v} + {e})",
    "{c} * ({v} + {e}) ** -0.5",
)  # fmt: skip
ODD_ROOTS = (
    "{c} / (jnp.sqrt({v}) + {e})", "{c} * lax.rsqrt(jnp.maximum({v}, {e}))",
    "{c} * jnp.where({v} > 0.0, lax.rsqrt({v}), 1.0)", "{c} / ({v} + {e})",
)  # fmt: skip
SCALED = (
    "{o} * {g} + {b}", "{o} * {g} + {b}", "{o} * {g}", "{o} * (1.0 + {g}) - {b}",
    "{o}[..., ::-1] * {g} + {b}", "{o} * {g} + {x}", "{o} * {g} * {g} + {b}",
)  # fmt: skip


def program(seed: int) -> Program:
    """A norm of positions and the channels of a group, or what looks like one."""
    w = Writer("group", seed)
    batch, places = w.one((1, 2, 3)), w.one((4, 6, 12))
    groups, width = w.one((1, 2, 4, 8)), w.one((1, 2, 4))
    channels = groups * width
    dtype = w.mostly("float32", ("bfloat16", "float16"), 0.8)
    shape = (batch, places, channels)
    x = w.argument("x", shape, w.one(VALUES), dtype, operand=True)
    if dtype == "float16" or w.chance(0.3):
        x = w.let(f"{x}.astype(jnp.float32)", "x")
    x = operands.changed(w, x, 1) if w.chance(0.2) else x
    if w.chance(0.2):  # channels in front
        cut, back = (
            f"transpose(0, 2, 1).reshape({batch}, {groups}, {width}, {places})",
            (f"reshape({batch}, {channels}, {places}).transpose(0, 2, 1)"),
        )
        axes = "(2, 3)"
    else:
        order = (groups, width) if w.chance(0.85) else (width, groups)
        cut, back = (
            f"reshape({batch}, {places}, {order[0]}, {order[1]})",
            f"reshape{shape}",
        )
        axes = "(1, 3)"
    names = {"y": w.let(f"{x}.{cut}", "y"), "a": axes, "n": places * width, "x": x}
    names["c"] = w.let(w.usually(CENTERS, ODD_CENTERS, 0.1).format(**names), "c")
    names["v"] = w.let(w.usually(SQUARES, ODD_SQUARES, 0.1).format(**names), "v")
    root = w.usually(ROOTS, ODD_ROOTS, 0.1).format(e=w.one(EPSILONS), **names)
    names["o"] = w.let(f"({w.let(root, 'o')}).{back}", "o")
    names |= {
        n: w.argument(n, (channels,), operands.values(w, 0.1), operand=True)
        for n in "gb"
    }
    out = w.let(w.one(SCALED).format(**names), "o")
    if w.chance(0.15):
        out = w.let(w.one(AFTER).format(o=out, x=x), "o")
    return w.program(out)
