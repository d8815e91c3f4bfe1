"""Bytes and operations of kernels, from a program's text."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tests.bench.hlo_kernels import work_of

TEXT = """HloModule jit_f

%product (p0: bf16[8,4], p1: bf16[4,16]) -> bf16[8,16] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[4,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}
}

%half (p0: f32[8,16]) -> f32[4,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %twice = f32[8,16]{1,0} add(%p0, %p0)
  ROOT %part = f32[4,16]{1,0} slice(%twice), slice={[0:4], [0:16]}
}

ENTRY %main (a: bf16[8,4], b: bf16[4,16], c: f32[8,16]) -> f32[4,16] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,16]{1,0} parameter(1)
  %c = f32[8,16]{1,0} parameter(2)
  %gemm_fusion.2 = bf16[8,16]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
  %call.1 = (bf16[8,16]{1,0}, s8[4096]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"lhs_contracting_dimensions":["1"]}}
  ROOT %slice_fusion = f32[4,16]{1,0} fusion(%c), kind=kLoop, calls=%half
}
"""


@dataclass
class Program:
    """A compiled program, by its text."""

    text: str

    def as_text(self) -> str:
        """Returns the text."""
        return self.text


def test_products_and_parts() -> None:
    """cuBLAS' room for work does not count, nor what a slice does not read."""
    works = {x.name: (x.nbytes, x.flops) for x in work_of(Program(TEXT))}
    product = 2 * (8 * 4 + 4 * 16 + 8 * 16), 2.0 * 8 * 4 * 16
    assert works == {
        "gemm_fusion_2": product, "call_1": product,
        "slice_fusion": (2 * 4 * 4 * 16, 0.0),
    }  # fmt: skip


def test_a_compiled_program() -> None:
    program = jax.jit(lambda x: jnp.sin(x) + 1).lower(jnp.ones((8, 128))).compile()
    assert sum(x.nbytes for x in work_of(program)) == 2 * 4 * 8 * 128
