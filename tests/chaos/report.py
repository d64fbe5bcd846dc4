"""The report of a run, as JSON and as text."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from statistics import median
from typing import Any

from chaos.checker import Verdict
from chaos.evidence import Evidence
from chaos.faults import Injected
from chaos.history import OK
from chaos.schedule import DECK

# A gap that begins later than this after the end of a fault is another fault's.
AFTERMATH_S = 10.0
# A gap that begins so shortly before the next fault is the next one's: the last probe before it came through.
PROBED_EVERY_S = 0.5
EXAMPLES = 5
NOT_DRIVEN = {
    "a disk that forgets what it had synced": "SIGKILL keeps the page cache; the tests of crash images cover it",
    "clocks of SQLite and of the kernel": "a clock is moved in the broker's Python alone",
    "a broker that starts with a wrong clock": "it uses that clock until it has reached another broker",
}


def longest_gaps(evidence: Evidence, faults: list[Injected]) -> dict[str, list[float]]:
    """For each kind of fault, how long no probe of some partition was acknowledged: one figure for each fault."""
    acked = defaultdict(list)
    for act in evidence.of("send"):
        if act.asked["topic"] == "probe" and act.outcome == OK:
            acked[act.got["partition"]].append(act.ended)
    pairs = [pair for times in acked.values() for pair in pairwise(sorted(times))]
    done = sorted((fault for fault in faults if not fault.skipped), key=lambda fault: fault.began)
    gaps = defaultdict(list)
    for fault, following in zip(done, [*done[1:], None], strict=True):
        until = min(fault.ended + AFTERMATH_S, following.began if following else math.inf)
        within = [
            after - max(before, fault.began)
            for before, after in pairs
            if after > fault.began and before < until - PROBED_EVERY_S
        ]
        gaps[fault.kind].append(max(within, default=0.0))
    return dict(gaps)


def report(
    seed: int, seconds: float, evidence: Evidence, verdicts: dict[str, Verdict], faults: list[Injected], more: dict
) -> dict[str, Any]:
    gaps = longest_gaps(evidence, faults)
    done = Counter(fault.kind for fault in faults if not fault.skipped)
    acks = [act for act in evidence.of("send") if act.outcome == OK]
    return {
        "seed": seed,
        "seconds": seconds,
        "violations": sum(len(verdict.violations) for verdict in verdicts.values()),
        "faults": {
            kind: {
                "count": done[kind],
                "skipped": sum(fault.kind == kind and bool(fault.skipped) for fault in faults),
                "unavailable_s": {
                    "median": round(median(gaps[kind]), 2) if kind in gaps else None,
                    "worst": round(max(gaps[kind]), 2) if kind in gaps else None,
                    "each": [round(gap, 2) for gap in gaps.get(kind, [])],
                },
            }
            for kind in DECK
        },
        "rules": {
            name: {
                "checked": verdict.checked,
                "violations": len(verdict.violations),
                "examples": verdict.violations[:EXAMPLES],
            }
            for name, verdict in verdicts.items()
        },
        "acknowledged": len(acks),
        "sends": dict(Counter(act.outcome for act in evidence.of("send"))),
        "calls": dict(Counter(act.kind for act in evidence.acts)),
        "not_driven": NOT_DRIVEN,
        **more,
    }


def as_text(found: dict[str, Any]) -> str:
    count = sum(each["count"] for each in found["faults"].values())
    calls = f"{found['acknowledged']:,} acknowledged messages, {sum(found['calls'].values()):,} calls"
    run = f"chaos, seed {found['seed']}, {found['seconds']:g} s, {found['zookeepers']} ZooKeeper"
    lines = [
        f"{run}: {count} faults, {calls}, {found['violations']} violations",
        "",
        f"{'fault':<38}{'count':>6}{'skipped':>9}   unavailable, s: median  worst",
    ]
    for kind, each in found["faults"].items():
        gap = each["unavailable_s"]
        figures = f"{gap['median']:>22.2f} {gap['worst']:>6.2f}" if gap["median"] is not None else ""
        lines.append(f"{kind:<38}{each['count']:>6}{each['skipped']:>9}{figures}")
    lines += ["", f"{'rule':<46}{'checked':>10}{'violations':>12}"]
    for name, each in found["rules"].items():
        lines.append(f"{name:<46}{each['checked']:>10,}{each['violations']:>12}")
        lines += [f"    {example}"[:400] for example in each["examples"]]
    lines += ["", f"converged in {found['converged_s']} s, drained in {found['drained_s']} s"]
    lines += [f"note: {note}"[:400] for note in found["notes"]]
    lines += [f"not driven: {what}: {why}" for what, why in found["not_driven"].items()]
    return "\n".join(lines) + "\n"
