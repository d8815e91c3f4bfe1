"""Keeps a checkpoint's policy from saving names that the rewriter added.

    checkpoint[policy = any names but "scores"]
        a, l = attention q k v   named rewriter.attention

Sites name the values they can save, so that a policy may ask for them. A policy that
saves every name but some would save these too, though the program as written does not
have them. So a policy decides about our names only if it treats them differently from
names that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies

OURS = "rewriter."
NOBODYS = "a name that nothing has"


@dataclass(frozen=True)
class Policy:
    """A checkpoint's policy that saves values named by sites only on request.

    Attributes:
        written: The policy in the program as written.
    """

    written: Callable[..., Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """Returns whether an equation's results are saved; JAX calls policies so."""
        ours = str(params.get("name", "")).startswith(OURS)
        if primitive.name == "name" and ours:
            other = {**params, "name": NOBODYS}
            if self.written(primitive, *avals, **other) is True:
                return False
        return self.written(primitive, *avals, **params)


def keep_policies(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose checkpoints follow their policies; itself without any.

    Args:
        program: A rewritten program.
    """
    return map_bodies(program, _with_policies, wanted=_jax.REMAT)


def _with_policies(body: Any) -> Any:
    checkpoints = [(k, _with_policy(e)) for k, e in _jax.of_kind("remat", body.eqns)]
    if all(body.eqns[k] is e for k, e in checkpoints):
        return body
    eqns = list(body.eqns)
    for k, eqn in checkpoints:
        eqns[k] = eqn
    return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)


def _with_policy(eqn: Any) -> Any:
    policy = eqn.params.get("policy")
    if policy is None or isinstance(policy, Policy):
        return eqn
    return eqn.replace(params={**eqn.params, "policy": Policy(policy)})
