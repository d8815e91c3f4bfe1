"""Estimates times of candidates for TPUs that are not attached.

The TPU compiler's simulator gives the cycles of each operation of a compiled program.
It does not see three things:

- Other memory traffic at the same time. A program takes at least the time of the bytes
  that its operations move.
- Values of prefetched scalars. It takes them for 0, so that work which they select is
  left out. Kernels with such scalars count the instruction bundles of their code for
  each step of their grid. `Speed.steps` says how many of those run. Bundles rank
  configs of one kernel, and say nothing against XLA.
- How often a loop of XLA turns. A program that is a loop is not estimated.

The simulator fails at some kernels, and at programs that leave it too little VMEM.
There kernels are ranked by their bundles too.

Each candidate is compiled in a child process, since the simulator ends the process on
what it does not know, and may take minutes.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from rewriter.hardware import ahead_of_time
from rewriter.measure.isolate import BEHIND, Order, order_of, place_of
from rewriter.measure.key import FORWARD
from rewriter.measure.measurement import BUNDLES, SIMULATED, Measurement
from rewriter.measure.programs import Task, function
from rewriter.ops.device import Device
from rewriter.ops.tpu import generation
from rewriter.site.implementation import XLA, Implementation, build, config_of
from rewriter.support.threads import STEP_S, check_stop, side_by_side

CHILD_S = 100.0
"""Seconds within which a candidate is compiled and simulated."""

FLAGS = {
    "cycles": "--xla_jf_dump_static_llo_profile_to={0}",
    "bundles": "--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final.*",
}
"""What libtpu is asked for, by what a child is to say."""

UNSEEN = ("v4", "7x")
"""Generations that the simulator ends the process for, or fails at many kernels."""


LOOPS = "no estimate: the turns of its loops are not counted"
ALONE = "no estimate: kernels are ranked by their bundles, and not against it"


@dataclass(frozen=True)
class Called:
    """One kernel in a program.

    Attributes:
        name: Its name.
        steps: Steps of its grid; 0 if that depends on values.
        prefetched: Whether it reads scalars that the simulator takes for 0.
    """

    name: str
    steps: int
    prefetched: bool


def estimated(
    task: Task,
    on: Device,
    wanted: Sequence[Implementation],
    until: float,
    say: Callable[[int, int], None],
) -> list[Measurement]:
    """Returns the estimated times of candidates, or why one has none.

    XLA's candidate is the op as programs usually write it. It takes minutes. It is
    tried as soon as one kernel could be simulated, so that none is chosen unopposed.
    Where none could, it is left out, since bundles say nothing against it.

    Args:
        task: The task, without the user's own equations.
        on: A TPU generation that `ahead_of_time.can_compile` takes.
        wanted: The candidates.
        until: The `time.monotonic` after which none is begun.
        say: Told how many candidates are done, of how many.
    """
    found: dict[Implementation, Measurement] = {}
    written = [i for i in wanted if i.forward == XLA]
    kernels = [i for i in wanted if i.forward != XLA]
    firsts = list({i.name: i for i in reversed(kernels)}.values())

    def estimate(some: Sequence[Implementation]) -> None:
        hopeless = {i.name for i, m in found.items() if m.problem == LOOPS}
        jobs = [
            lambda i=i: _estimated(task, on, i) for i in some if i.name not in hopeless
        ]
        results = iter(side_by_side(jobs, until, until + 2 * CHILD_S))
        for i in some:
            m = LOOPS if i.name in hopeless else next(results)
            found[i] = _without(task, i, m) if isinstance(m, str) else m
            say(len(found), len(wanted))

    estimate(firsts)
    for some in ([i for i in kernels if i not in firsts], []):
        if not kernels or any(map(_is_simulated, found.values())):
            estimate([i for i in written if i not in found])
        estimate(some)
    return [found.get(i) or _without(task, i, ALONE) for i in wanted]


def _is_simulated(m: Measurement) -> bool:
    return m.method == SIMULATED and m.median_us is not None


def _without(task: Task, implementation: Implementation, why: str) -> Measurement:
    version = task.version_of(implementation)
    return Measurement(implementation, version, jax.__version__, None, problem=why)


def _estimated(task: Task, on: Device, implementation: Implementation) -> Measurement:
    answer = _child("bundles", task, on, implementation)
    if isinstance(answer, str):
        return _without(task, implementation, answer)
    calls = [Called(**c) for c in answer["calls"]]
    if not calls and answer["loops"]:
        return _without(task, implementation, LOOPS)
    chip = generation(on)
    simulated: dict[str, Any] | str = f"no estimate: no simulator for {on.kind}"
    seen = chip.name not in UNSEEN and all(c.steps and not c.prefetched for c in calls)
    if seen:
        simulated = _child("cycles", task, on, implementation)
    if not isinstance(simulated, str):
        method, cycles = SIMULATED, simulated["cycles"]
    elif calls:
        counted = _cycles_of_steps(task, implementation, calls, answer["bundles"])
        if isinstance(counted, str):
            return _without(task, implementation, counted)
        method, cycles = BUNDLES, counted
    else:  # it compiled before: what fails is the compilation that simulates
        why = simulated.replace("does not compile", "no estimate: not simulated")
        return _without(task, implementation, why)
    clock = chip.clock or 1e9
    seconds = max(cycles / clock, answer["moved"] / (on.bandwidth or math.inf))
    return Measurement(
        implementation,
        task.version_of(implementation),
        jax.__version__,
        round(1e6 * seconds, 3),
        runs=1,
        method=method,
        temp_bytes=answer["temp"],
        driver=compiler(),
    )


def _cycles_of_steps(
    task: Task,
    implementation: Implementation,
    calls: Sequence[Called],
    bundles: Mapping[str, int],
) -> float | str:
    """Bundles of each kernel, as often as its steps are run; or why none are known."""
    known: dict[str, float] = {}
    by_name = {k.name: k for k in task.kernels}
    for name in implementation.kernels:
        kernel = by_name[name]
        if kernel.speed.steps is not None:
            first = config_of(kernel.space, implementation.config)
            second = config_of(kernel.backward_space, implementation.backward_config)
            known |= kernel.speed.steps(task.spec, first, second, task.passes)
    total = 0.0
    for call in calls:
        steps = known.get(call.name, call.steps)
        if not steps:
            return f"no estimate: the grid of {call.name} depends on values"
        if call.name not in bundles:
            return f"no estimate: XLA computes what {call.name} would, uncounted"
        total += steps * bundles[call.name]
    return total


def compiler() -> str:
    """Returns the version of the TPU compiler, as records name it."""
    try:
        return f"libtpu {importlib.metadata.version('libtpu')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


# ---------------------------------------------------------------------- children
def _child(
    mode: str, task: Task, on: Device, implementation: Implementation
) -> dict[str, Any] | str:
    """What a child says of a candidate; or why it says nothing."""
    place = place_of(task)
    if place is None:
        return (
            "not compiled: no other process can import it. Define the pattern and its "
            "kernels at the top level of a module"
        )
    order = pickle.dumps(order_of(task, place, [implementation]))
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, **ahead_of_time.ENVIRONMENT, "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "LIBTPU_INIT_ARGS": FLAGS[mode].format(folder),
        }  # fmt: skip
        code = "from rewriter.measure.static_cost import child; child()"
        command = [sys.executable, "-c", code, mode, on.kind, folder]
        try:
            code, out, err = _ran(command, order, environment)
        except subprocess.TimeoutExpired:
            return f"no estimate: not compiled within {CHILD_S:.0f} s"
    if code:
        return _cause(err.decode(errors="replace"), code)
    return json.loads(out.splitlines()[-1])


def _ran(
    command: Sequence[str], order: bytes, environment: Mapping[str, str]
) -> tuple[int, bytes, bytes]:
    """What a command gives: its status, and what it wrote.

    Raises:
        TimeoutExpired: If it takes too long; then it is ended.
        Stopped: If nobody wants it any more; then too.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    until = time.monotonic() + CHILD_S
    with subprocess.Popen(command, env=environment, **pipes, **BEHIND) as process:
        try:
            asked: bytes | None = order
            while True:
                try:
                    out, err = process.communicate(asked, STEP_S)
                    return process.returncode, out, err
                except subprocess.TimeoutExpired:
                    asked = None
                    check_stop()
                    if time.monotonic() > until:
                        raise
        finally:
            process.kill()


def _cause(answer: str, code: int) -> str:
    """Why a child ended, from what it wrote."""
    coded = re.search(r"E\d{4}: \w+", answer)
    if coded:
        more = re.search(r"^.*(?:exceeded|Ran out of memory).*$", answer, re.MULTILINE)
        text = f": {more[0].strip()[:120]}" if more else ""
        return f"does not compile: {coded[0]}{text}"
    fatal = re.search(r"^F\d{4} .*?\d\] (.*)$", answer, re.MULTILINE)
    if fatal or code < 0:
        return f"no estimate: the simulator ended: {fatal[1][:120] if fatal else code}"
    last = (answer.strip().splitlines() or [""])[-1]
    return f"does not compile: {last[:200]}"


def child() -> None:
    """Reads an order for one candidate, compiles it, and says what there is to say."""
    mode, kind, folder = sys.argv[1:]
    asked: Order = pickle.load(sys.stdin.buffer)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jax.config.update("jax_enable_x64", asked.x64)
    jax.config.update("jax_default_matmul_precision", asked.precision)
    op, kernels = asked.place.find(asked.spec.op)
    task = Task(op, asked.spec, kernels, asked.passes)
    (implementation,) = asked.wanted
    run, specs = function(task, implementation), [task.structs]
    if task.passes != FORWARD:
        params = dict(asked.spec.params)
        whole = lambda x: task.op.reference(**x, **params)
        specs.append(jax.eval_shape(whole, task.structs))
    on = Device(kind, "tpu")
    calls = [asdict(c) for c in _called(_inside(task, implementation, *specs))]
    program = ahead_of_time.compiled(on, run, *specs)
    answer = {"calls": calls, **_counts(mode, program, pathlib.Path(folder))}
    print(json.dumps(answer), file=answers, flush=True)


def _counts(mode: str, program: Any, folder: pathlib.Path) -> dict[str, Any]:
    text = program.as_text()
    if mode == "cycles":
        form = r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"'
        found = re.findall(form, text)
        if not found:
            raise RuntimeError("the simulator left no estimate in the program")
        return {"cycles": sum(map(int, found))}
    memory, kernels = program.memory_analysis(), called(text)
    # XLA's count has what is in VMEM too, but of what is sliced the slice alone.
    counted = program.cost_analysis().get("bytes accessed", 0.0)
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
    moved = max(moved, min(streamed(text), counted))
    if kernels:
        moved = counted + kernels
    return {
        "bundles": _bundles(folder),
        "moved": moved,
        "temp": memory.temp_size_in_bytes,
        "loops": len(re.findall(r" while\(", text)),
    }


def streamed(text: str) -> int:
    """Returns the bytes that a program's operations read and write in HBM.

    Each operation reads its operands whole and once. Not counted is what is in VMEM,
    which a layout says by ``S(1)``, and what is copied in the background.

    Example:
        >>> streamed('''ENTRY %main {
        ...   %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
        ...   %sum = (f32[8]{0:T(256)S(1)}, f32[8]{0}) fusion(%x), calls=%body
        ...   %part = f32[8]{0:T(256)S(1)} get-tuple-element(%sum), index=0
        ...   ROOT %y = bf16[8,128]{1,0} fusion(%x, %part), calls=%other
        ... }''')
        6176
    """
    sizes: dict[str, int] = {}
    total = 0
    for line in text[text.find("ENTRY") :].splitlines():
        found = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)", line)
        if found is None:
            continue
        name, types, operation, rest = found.groups()
        sizes[name] = _in_hbm(types)
        if operation in _MOVES_NOTHING or operation.endswith(("-start", "-done")):
            continue
        rest = rest.partition("control-predecessors")[0]
        names = dict.fromkeys(re.findall(r"%([\w.\-]+)", rest))
        total += sizes[name] + sum(sizes.get(n, 0) for n in names)
    return total


_MOVES_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def _in_hbm(types: str) -> int:
    """Bytes of the arrays of a type whose layouts name no other memory."""
    return sum(
        _nbytes(dtype, shape)
        for dtype, shape, layout in re.findall(
            r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", types
        )
        if "S(" not in layout
    )


def _nbytes(dtype: str, shape: str) -> int:
    return math.prod(int(n) for n in shape.split(",") if n) * _ITEM.get(dtype, 1)


def called(text: str) -> int:
    """Returns the bytes of operands and results of a program's Pallas kernels.

    The compiler's own count has none of them.

    Example:
        >>> called(
        ...     "%k.1 = (f32[8,128]{1,0}, s32[]) custom-call(%x), "
        ...     'custom_call_target="tpu_custom_call", '
        ...     "operand_layout_constraints={bf16[2,4]{1,0}, pred[8]{0}}, metadata={}"
        ... )
        4124
    """
    total = 0
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        results = line.partition(" custom-call(")[0].partition(" = ")[2]
        layouts = line.partition("operand_layout_constraints={")[2].partition("}}")[0]
        arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", results + layouts)
        total += sum(_nbytes(*array) for array in arrays)
    return total


_ITEM = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2,
         "f16": 2, "s16": 2, "u16": 2}  # fmt: skip
"""Bytes of a number by HLO's name of its type; 1 for others."""


def _bundles(folder: pathlib.Path) -> dict[str, int]:
    """Instruction bundles by kernel, those of its calls in a program together."""
    found: dict[str, int] = {}
    for path in folder.glob("*final_hlo-static-per-bundle-utilization.txt"):
        table = path.read_text().split("UTILIZATION:")[1]
        name = re.sub(r"^\d+-(.*?)(\.\d+)?-\d+-final.*", r"\1", path.name)
        rows = sum(1 for line in table.splitlines() if line.strip())
        found[name] = max(found.get(name, 0), rows)
    return found


def _inside(task: Task, implementation: Implementation, *specs: Any) -> Any:
    """The jaxpr of an implementation itself."""
    ours = implementation.forward != XLA
    kernel = build(implementation, task.op, task.kernels) if ours else None
    params = dict(task.spec.params)
    if kernel is None:
        return jax.make_jaxpr(lambda: 0)().jaxpr

    def forward(operands: Mapping[str, Any]) -> Any:
        return kernel.forward(**operands, **params)

    def both(operands: Mapping[str, Any], cotangent: Any) -> Any:
        if kernel.backward is None:
            return kernel.forward(**operands, **params)
        out, residuals = kernel.forward(**operands, **params, residuals=True)
        more = {"out": out, "residuals": residuals, "cotangent": cotangent}
        return out, kernel.backward(**operands, **more, **params)

    run = forward if task.passes == FORWARD else both
    return jax.make_jaxpr(run)(*specs).jaxpr


def _called(jaxpr: Any) -> Iterator[Called]:
    """The Pallas kernels of a program, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            grid = eqn.params["grid_mapping"]
            sizes = [s if isinstance(s, int) else 0 for s in grid.grid]
            prefetched = grid.num_index_operands > 0
            yield Called(eqn.params["name"], math.prod(sizes), prefetched)
            continue
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _called(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
