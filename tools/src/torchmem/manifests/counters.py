"""The increase of a counter of a process within a window, as PromQL for all rules and dashboards.

`increase()` sees only what changes between two scrapes, and `counter - counter offset` loses
processes that are gone. This expression counts processes that have ended, events before a process's
first scrape, and nothing twice after a restart of the exporter. A process starts at the value that
it had before the window; if it was not known then, at 0, or at its first value if that is known to
be older than the window. The counter of a pid never resets.
"""

from __future__ import annotations

# The recording rule with the counters of OOMs that are above 0.
POSITIVE_OOMS = "rank:torchmem_ooms:positive"
# The recording rule with each rank that the exporter serves, one series of each.
KNOWN_RANKS = "rank:torchmem_process_state:current"
# The windows of the rules in seconds; Grafana's variables have their own name for that.
SECONDS = {"10m": "600", "1h": "3600", "$__range": "$__range_s"}
# How far before the window a value is looked for: a longer gap, such as an exporter that is down,
# makes a process unknown.
LOOKBACK = {"10m": "1h", "1h": "1h", "$__range": "$__range"}


def increase(counter: str, window: str, older: str) -> str:
    """Return the increase of `counter`, a selector, within `window`, such as 1h.

    `older` completes the expression of first values that are older than the window.
    """
    return (
        f"max_over_time({counter}[{window}]) - (\n"
        f"  last_over_time({counter}[{LOOKBACK[window]}] offset {window})\n"
        f"  or min_over_time({counter}[{window}]) {older}\n"
        f"  or 0 * max_over_time({counter}[{window}])\n"
        ")"
    )


def ooms(positive: str, known: str, newest: str, window: str) -> str:
    """Return the OOMs within a window; `newest` selects the time of the newest OOM.

    `positive` selects the counters that are above 0, which are few. A rank that was among the
    `known` ones before the window, and not among these, had none. To read all counters instead
    would cost more than any other rule.
    """
    older = (
        f"and ignoring (cause) time() - min_over_time({newest}[{window}]) >= {SECONDS[window]}\n"
        f"  unless on (job, instance, rank, pid, run) {known} offset {window}"
    )
    return increase(positive, window, older)


def retries(counter: str, window: str) -> str:
    """Return the retries within a window.

    They have no times. First values count only if the exporter was up before the window, so that
    the process must be younger.
    """
    return increase(counter, window, f"unless on (job, instance) up offset {window} == 1")
