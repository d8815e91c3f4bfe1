"""FlexAttention by ``torch.compile``, on the arrays that JAX reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tests.bench.scored_functions import Function

WARM, TURNS = 3, 7

Step = Callable[[], list[Any]]


def prepared(function: Function, arrays: Sequence[Any]) -> dict[str, Step]:
    """Returns compiled steps, by pass, that return what JAX's programs do.

    Args:
        function: The function.
        arrays: JAX's queries, keys and values, the function's arrays, and the
            result's cotangent.

    Raises:
        ImportError: If PyTorch is not there.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # it gives up after eight programs
    del sys.argv[1:]  # Inductor writes what follows --only between apostrophes
    given = [torch.from_dlpack(jax.device_put(x)).clone() for x in arrays]
    heads_first = lambda x: x.transpose(1, 2).contiguous()
    q, k, v, up = map(heads_first, (*given[:3], given[-1]))
    read = given[3:-1]
    b, t = q.shape[0], q.shape[2]
    score = lambda *x: function.flex(*x, *read)
    mask = None
    if function.flex_sees is not None:
        sees = lambda b, h, i, j: function.flex_sees(b, h, i, j, *read)
        mask = create_block_mask(sees, b, None, t, t, device=q.device)
    run = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=mask),
        dynamic=False,
    )
    moving = [q, k, v, *(read if function.learned else [])]
    for x in moving:
        x.requires_grad_(True)

    def both() -> list[Any]:
        out = run(q, k, v)
        return [out, *torch.autograd.grad(out, moving, up)]

    return {"forward": lambda: [run(q, k, v)], "both": both}


def results(step: Step) -> list[np.ndarray]:
    """Returns a step's results in JAX's layout, in float32; of one batch entry."""
    turned = lambda x: x[:1].transpose(1, 2) if x.ndim == 4 else x
    return [turned(x.detach()).float().cpu().numpy() for x in step()]


def microseconds(step: Step) -> float:
    """Returns the median of some runs, by CUDA's events."""
    import torch

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(times))
