"""Records a terminal session: ``python3 -m tests.bench.session --write``.

Runs the commands below in an empty folder, as a reader of the README may, and fills
docs/session.md with what they print.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "session.md"
EXAMPLE = """\
import jax, jax.numpy as jnp


def attention(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    keep = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def args():
    return tuple(jax.random.normal(jax.random.key(0), (3, 1, 2048, 4, 64)))
"""
COMMANDS = (
    "cat example.py",
    "python3 -m rewriter explain example.py:attention --html page.html",
    "python3 -m rewriter verify example.py:attention",
    "python3 -m rewriter bench example.py:attention --pairs 3",
)


def recorded() -> str:
    """The commands, each with what it prints."""
    said = []
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "example.py").write_text(EXAMPLE)
        for command in COMMANDS:
            run = command.replace("python3", sys.executable, 1)
            done = subprocess.run(
                run, shell=True, cwd=folder, env=env, text=True, check=True,
                stdout=subprocess.PIPE,
            )  # fmt: skip
            text = done.stdout.replace(os.path.realpath(folder) + os.sep, "")
            said.append(f"$ {command}\n{text.strip()}\n")
    return "\n".join(said).strip()


def filled(page: str, session: str) -> str:
    """Returns a page with a session in its place."""
    block = f"```text\n{session}\n```"
    pattern = r"(<!-- session -->\n).*?(\n<!-- end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{block}{m[2]}", page, flags=re.S)


def main() -> None:
    """Prints the session, or writes it to its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    session = recorded()
    if parser.parse_args().write:
        PAGE.write_text(filled(PAGE.read_text(), session))
    else:
        print(session)


if __name__ == "__main__":
    main()
