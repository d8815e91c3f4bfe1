"""The operations in float64 NumPy, straight from their definitions."""

from __future__ import annotations

from math import erf

import numpy as np


def attention(
    q,
    k,
    v,
    bias=None,
    mask=None,
    q_segments=None,
    kv_segments=None,
    kv_lengths=None,
    offset=None,
    prefix=None,
    alibi=None,
    sinks=None,
    dropout=None,
    scale_factor=None,
    kv_positions=None,
    first_position=None,
    last_position=None,
    *,
    scale=1.0,
    window=(None, None),
    shift=0,
    softcap=None,
    empty_rows="nan",
):
    """q [b t n h], k [b s k h], v [b s k e] to [b t n e]."""
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    if scale_factor is not None:
        scores = scores * scale_factor.reshape(())
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    t = np.arange(q.shape[1])[:, None]
    s = np.arange(k.shape[1])[None, :]
    start = np.zeros(1, int) if offset is None else np.atleast_1d(offset)
    at = t + start[:, None, None] + shift  # [b|1, t, 1]
    if alibi is not None:
        scores = scores + alibi[:, None, None] * (s - at)[:, None]
    if bias is not None:
        scores = scores + bias
    keep = _keep(at, s, window, prefix, kv_lengths, q_segments, kv_segments)
    keep = np.broadcast_to(keep[:, None], (keep.shape[0], *scores.shape[1:]))
    if mask is not None:
        keep = keep & mask.astype(bool)
    if first_position is not None:
        keep = keep & (kv_positions[:, None, None] >= first_position[:, None, :, None])
    if last_position is not None:
        keep = keep & (kv_positions[:, None, None] <= last_position[:, None, :, None])
    keep = np.broadcast_to(keep, scores.shape)
    return _weigh(scores, keep, v, sinks, dropout, empty_rows)


def _keep(at, s, window, prefix, kv_lengths, q_segments, kv_segments):
    keep = np.ones_like(at - s, bool)
    if window[0] is not None:
        keep = keep & (s >= at - window[0])
    if window[1] is not None:
        keep = keep & (s <= at + window[1])
    if prefix is not None:
        keep = keep | (s < np.atleast_1d(prefix)[:, None, None])
    if kv_lengths is not None:
        keep = keep & (s < np.atleast_1d(kv_lengths)[:, None, None])
    if q_segments is not None:
        keep = keep & (q_segments[:, :, None] == kv_segments[:, None, :])
    return keep


def _weigh(scores, keep, v, sinks, dropout, empty_rows):
    low = np.where(keep, scores, -np.inf)
    top = low.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    weights = np.exp(low - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    empty = ~keep.any(-1, keepdims=True)
    probs = weights / np.where(total > 0, total, 1.0)
    if sinks is None:
        row = {"nan": np.nan, "mean": 1.0 / scores.shape[-1], "zero": 0.0}[empty_rows]
        probs = np.where(empty, row, probs)
    if dropout is not None:
        probs = probs * dropout
    return np.einsum("bnts,bsne->btne", probs, v)


def rms_norm(x, scale=None, epsilon=None, *, eps=0.0):
    """x [... d] over its root mean square."""
    eps = eps if epsilon is None else epsilon.reshape(())
    out = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return out if scale is None else out * scale


def layer_norm(x, scale=None, bias=None, *, eps=0.0):
    """x [... d], centred, over its standard deviation."""
    x = x - x.mean(-1, keepdims=True)
    out = rms_norm(x, scale, eps=eps)
    return out if bias is None else out + bias


def group_norm(x, scale=None, bias=None, *, eps=0.0):
    """x [b m g c n], centred and over its deviation in each group g of each sample."""
    x = x - x.mean((1, 3, 4), keepdims=True)
    out = x / np.sqrt((x * x).mean((1, 3, 4), keepdims=True) + eps)
    out = out if scale is None else out * scale[..., None]
    return out if bias is None else out + bias[..., None]


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _elu(x, alpha):
    return np.where(x > 0, x, alpha * np.expm1(x))


ACTIVATIONS = {
    "silu": lambda x, beta: x * _sigmoid(x),
    "swish": lambda x, beta: x * _sigmoid(beta * x),
    "gelu_quick": lambda x, beta: x * _sigmoid(1.702 * x),
    "gelu_tanh": lambda x, beta: (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    ),
    "gelu_erf": lambda x, beta: 0.5 * x * (1 + np.vectorize(erf)(x / np.sqrt(2))),
    "relu": lambda x, beta: np.maximum(x, 0),
    "relu2": lambda x, beta: np.maximum(x, 0) ** 2,
    "relu_by_product": lambda x, beta: x * (x > 0),
    "relu2_by_product": lambda x, beta: (x * (x > 0)) ** 2,
    "sigmoid": lambda x, beta: _sigmoid(x),
    "tanh": lambda x, beta: np.tanh(x),
    "relu6": lambda x, beta: np.clip(x, 0, 6),
    "hard_sigmoid": lambda x, beta: np.clip(x + 3, 0, 6) / 6,
    "hard_silu": lambda x, beta: x * np.clip(x + 3, 0, 6) / 6,
    "selu": lambda x, beta: 1.0507009873554805 * _elu(x, 1.6732632423543772),
    "softplus": lambda x, beta: np.log1p(np.exp(x)),
    "mish": lambda x, beta: x * np.tanh(np.log1p(np.exp(x))),
    "elu": lambda x, beta: _elu(x, beta),
    "leaky_relu": lambda x, beta: np.where(x > 0, x, beta * x),
    "celu": lambda x, beta: np.where(x > 0, x, beta * np.expm1(x / beta)),
    "identity": lambda x, beta: x,
}


def gated_linear_unit(
    x,
    w_gate,
    w_up,
    b_gate=0.0,
    b_up=0.0,
    rows_gate=0.0,
    rows_up=0.0,
    *,
    activation="silu",
    beta=1.0,
    clip_gate=(None, None),
    clip_up=(None, None),
    up_shift=0.0,
):
    """x [... k], weights [k f] to [... f]."""
    gate = _clip(x @ w_gate + b_gate + rows_gate, clip_gate)
    up = _clip(x @ w_up + b_up + rows_up, clip_up) + up_shift
    return ACTIVATIONS[activation](gate, beta) * up


def _clip(x, bounds):
    low, high = bounds
    return x if low is None and high is None else np.clip(x, low, high)


def ragged_dot(lhs, rhs, group_sizes, *, mode="forward"):
    """Rows of `lhs` by the matrix of their group; rows past the groups are zero."""
    ends = np.cumsum(group_sizes)
    starts = ends - group_sizes
    groups = list(zip(starts, ends, strict=True))
    if mode == "contracting":
        return np.stack([lhs[a:b].T @ rhs[a:b] for a, b in groups])
    if mode == "transposed":
        rhs = rhs.swapaxes(1, 2)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for (a, b), matrix in zip(groups, rhs, strict=True):
        out[a:b] = lhs[a:b] @ matrix
    return out


def linear_cross_entropy(
    x,
    w,
    labels,
    bias=0.0,
    *,
    scale=1.0,
    soft_cap=0.0,
    label_smoothing=0.0,
    z_loss=0.0,
    outside="nan",
    of_log_probabilities=False,
):
    """x [... k], w [k v], labels [...] that are classes, to [...]."""
    y = scale * (x @ w) + bias
    y = soft_cap * np.tanh(y / soft_cap) if soft_cap else y
    lse = np.log(np.exp(y).sum(-1))
    own = lse - np.take_along_axis(y, labels[..., None], -1)[..., 0]
    alike = lse - y.mean(-1)
    return (1 - label_smoothing) * own + label_smoothing * alike + z_loss * lse**2


ORACLES = {
    "attention": attention,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "group_norm": group_norm,
    "gated_linear_unit": gated_linear_unit,
    "ragged_dot": ragged_dot,
    "linear_cross_entropy": linear_cross_entropy,
}
