"""The figure of a file of `--trace`; no MPI import."""

from __future__ import annotations

from a2d_mpi.experiments.trace import COMMUNICATION
from a2d_mpi.figures.pictures import WIDTH, finish, timeline

_SHOWN = ("compute", "merge", "wait")  # categories of slices


def draw_trace(plt, events: list[dict]):
    """Draw what every rank computes (upper bar) and waits for (lower bar), and all messages."""
    rows = {x["tid"]: x["pid"] + 0.4 * (x["args"]["name"] == COMMUNICATION)
            for x in events if x["name"] == "thread_name"}  # fmt: skip
    calls = [x for x in events if x.get("cat") == "total"]
    if not calls:
        raise ValueError("the trace has no calls")
    ranks = 1 + max(x["pid"] for x in events)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + min(0.35 * ranks, 5.0)))
    for tid, y in rows.items():
        spans = [(x["cat"], x["ts"] / 1e3, (x["ts"] + x["dur"]) / 1e3) for x in events
                 if x.get("cat") in _SHOWN and x["tid"] == tid]  # fmt: skip
        timeline(axes, y - 0.2, spans, 0.38)
    begins = {x["id"]: x for x in events if x["ph"] == "s"}
    for end in (x for x in events if x["ph"] == "f"):
        both = begins[end["id"]], end
        axes.plot([x["ts"] / 1e3 for x in both], [rows[x["tid"]] - 0.2 for x in both],
                  marker=".", markevery=[1], markersize=3, color="black", linewidth=0.5,
                  alpha=0.6, label="message")  # fmt: skip
    axes.set(xlabel="time, ms", ylabel="rank", ylim=(ranks - 0.4, -0.6))
    axes.set_xlim(min(x["ts"] for x in calls) / 1e3, max(x["ts"] + x["dur"] for x in calls) / 1e3)
    axes.yaxis.set_major_locator(plt.MaxNLocator(8, integer=True))
    names = ", ".join(dict.fromkeys(x["name"] for x in calls))
    return finish(figure, f"{names}, {ranks} ranks")
