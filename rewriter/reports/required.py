"""Compares a report with what ``require=`` asks for."""

from __future__ import annotations

from rewriter.errors import RequirementNotMet
from rewriter.reports.report import Report
from rewriter.support.requirement import ALL, Requirements, written

LEFT_TO_XLA = (
    "The lines above say why. To ask for recognised sites only, require "
    "{{{op!r}: {{'found': {count}}}}}; implementation= forces a kernel"
)
NOT_FOUND = "The lines above say why; report.why_not({op!r}) has all of it"
ALL_REPLACED = "Nothing else in {name} is close to {op}; ask for {count} of them"
NOTHING_CLOSE = "print(rewriter.explain(fn)(*args)) shows what is found there"


def check_required(report: Report, required: Requirements) -> None:
    """Raises if fewer sites were found or replaced than required.

    Args:
        report: What was found, and replaced.
        required: What ``require=`` was given.

    Raises:
        RequirementNotMet: With the counts, every reason, and what to do.
    """
    short, op, next_step = _shortfalls(report, required)
    if short:
        raise RequirementNotMet(
            f"{report.name}: require={written(required)}: {'; '.join(short)}\n"
            f"{report.why_not(op)}",
            next_step=next_step,
        )


def _shortfalls(report: Report, required: Requirements) -> tuple[list[str], str, str]:
    """What is missing, the op that it is about if it is one, and what to do."""
    found, replaced = report.counts(), report.counts(replaced=True)
    if required == ALL:
        left = sum(found.values()) - sum(replaced.values())
        short = [f"{left} left to XLA"] * bool(left)
        short += [f"{len(report.misses)} missed"] * bool(report.misses)
        return short, "", "Name the ops that matter, such as require={'attention': 1}"
    assert not isinstance(required, str)
    short, ops, next_step = [], [], ""
    for r in required:
        have = found.get(r.op, 0)
        if text := r.shortfall(have, replaced.get(r.op, 0)):
            short.append(text)
            ops.append(r.op)
            enough = have >= max(r.found, r.replaced)
            near = (*report.sites, *report.misses, *report.look_alikes())
            close = any(x.op == r.op for x in near)
            step = LEFT_TO_XLA if enough else NOT_FOUND if close else NOTHING_CLOSE
            missed = any(m.op == r.op for m in report.misses)
            if 0 < have == replaced.get(r.op, 0) and not missed:
                step = ALL_REPLACED
            next_step = next_step or step.format(
                op=r.op, count=max(have, 1), name=report.name
            )
    return short, ops[0] if len(ops) == 1 else "", next_step
