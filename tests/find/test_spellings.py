"""Every spelling is found, read rightly, and gives the same numbers when swapped.

The default run reads all spellings and compiles a quarter of them, of attention's
an eighth. All of it:

    pytest tests/find/test_spellings.py -m "slow or not slow"
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from tests import slow
from tests.spellings import check
from tests.spellings.contexts import CONTEXTS, Context
from tests.spellings.corpus import BY_NAME, SPELLINGS
from tests.spellings.known import MISSED, NOT_IN_BFLOAT16, OTHERWISE
from tests.spellings.look_alikes import CAREFUL, REFUSED, LookAlike
from tests.spellings.spelling import Spelling


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip XLA's optimizations: compiling takes far longer than running here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def quarter(name: str) -> int:
    """Which quarter of the corpus a name falls in, the same on every machine."""
    return zlib.crc32(name.encode()) % 4


FOUND = [s for s in SPELLINGS if s.name not in MISSED | NOT_IN_BFLOAT16]


# ----------------------------------------------------------------- reading
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_found_and_read(spelling: Spelling) -> None:
    wrong = check.wrong(spelling)
    if wrong and spelling.name in MISSED | OTHERWISE:
        pytest.xfail(f"not read yet: {wrong}")
    assert not wrong


def test_found_in_bfloat16() -> None:
    chosen = [s for s in FOUND if quarter(s.name) == 1]
    assert not {s.name: w for s in chosen if (w := check.lost(s, jnp.bfloat16))}


@pytest.mark.slow
def test_all_found_in_bfloat16() -> None:
    assert not {s.name: w for s in FOUND if (w := check.lost(s, jnp.bfloat16))}


# ----------------------------------------------------------------- numbers
def numbers_of(spellings: list[Spelling]) -> dict[str, str]:
    return check.disagreements([c for s in spellings for c in check.cases_of(s)])


OPS = sorted({s.op for s in SPELLINGS})
PARTS = [(op, part) for op in OPS for part in range(4 if op == "attention" else 1)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("op", "part"), slow.unless(lambda op, part: part < 2, PARTS, several=True)
)
def test_numbers(op: str, part: int) -> None:
    chosen = [s for s in SPELLINGS if s.op == op and quarter(s.name) == 0]
    assert not numbers_of(chosen[part :: 4 if op == "attention" else 1])


@pytest.mark.slow
@pytest.mark.parametrize("rest", [1, 2, 3])
@pytest.mark.parametrize("op", OPS)
def test_all_numbers(op: str, rest: int) -> None:
    chosen = [s for s in SPELLINGS if s.op == op and quarter(s.name) == rest]
    assert not numbers_of(chosen)


# ---------------------------------------------------------------- contexts
SAMPLE = [
    BY_NAME[name]
    for name in (
        "mask/tril",
        "fill/with_causal",
        "mask/lengths",
        "softmax/divided_after_values",
        "heads/einsum_gemma",
        "layout/library_causal",
        "bias/softcap_gemma",
        "decode/update_slice",
        "rms/flax_linen",
        "layer/fast",
        "group/flax_fast",
        "glu/act_silu",
        "glu/concatenated_split",
        "ragged/gate_up_down",
        "loss/optax",
    )
]
COMPILED = [BY_NAME[name] for name in ("mask/tril", "rms/flax_linen", "glu/act_silu")]


def lost_in(context: Context, spellings: list[Spelling]) -> dict[str, str]:
    fitting = [s for s in spellings if not context.ops or s.op in context.ops]
    return {s.name: w for s in fitting if (w := check.lost_in(context, s))}


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: c.name)
def test_found_in_context(context: Context) -> None:
    assert not lost_in(context, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: c.name)
def test_all_found_in_context(context: Context) -> None:
    assert not lost_in(context, [s for s in SPELLINGS if s.count is not None])


def numbers_in(contexts: list[Context], spellings: list[Spelling]) -> dict[str, str]:
    cases = [
        check.case_in(c, s)
        for c in contexts
        for s in spellings
        if not c.ops or s.op in c.ops
    ]
    return check.disagreements(cases)


@pytest.mark.once
@pytest.mark.parametrize("part", slow.first(2, range(4)))
def test_numbers_in_context(part: int) -> None:
    assert not numbers_in(CONTEXTS[part::4], COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS, ids=lambda c: c.name)
def test_all_numbers_in_context(context: Context) -> None:
    assert not numbers_in([context], SAMPLE)


# ------------------------------------------------------------- look-alikes
@pytest.mark.parametrize("look_alike", REFUSED, ids=lambda x: x.name)
def test_look_alike_refused(look_alike: LookAlike) -> None:
    sites = check.explain(look_alike.fn, look_alike.args(), look_alike.op)
    assert not sites, f"{look_alike.reason}, yet: {sites[0].params}"


@pytest.mark.once
@pytest.mark.parametrize("part", slow.first(2, range(4)))
def test_careful_look_alike_keeps_its_numbers(part: int) -> None:
    found = [x for x in CAREFUL[part::4] if check.explain(x.fn, x.args(), x.op)]
    assert not check.disagreements(
        [check.Case(x.name, x.fn, x.args(), x.op, x.gradients) for x in found]
    )
