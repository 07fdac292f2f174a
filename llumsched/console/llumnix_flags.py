# SPDX-License-Identifier: Apache-2.0
"""Flags of Llumnix's scheduler and gateway that are not settings here, and their replacements.

`cli` reports them for command lines of Llumnix, and `docs/reference/defaults.md` lists them (`make docs`).
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final, NamedTuple


class Absent(NamedTuple):
    """Flags with one explanation. `*` at the end of a name matches any ending."""

    flags: tuple[str, ...]
    instead: str
    """The replacement here, or the reason why there is none, in Markdown; it follows a colon."""


ABSENT: Final = (
    Absent(
        ("--llm-backend-discovery", "--discovery-redis-*", "--discovery-etcd-*"),
        "engines report to the scheduler by themselves, from `--llumlet-cms` to `--cms`; those of stock vLLM are named "
        "in `--llm-backend-endpoints`",
    ),
    Absent(("--scheduler-discovery",), "its only value is what the gateway's `--scheduler-endpoints` does"),
    Absent(
        ("--cms-redis-host", "--cms-redis-port", "--cms-redis-username"),
        "parts of the URL, `--cms redis://USERNAME@HOST:PORT`",
    ),
    Absent(
        ("--cms-redis-password",),
        "an option of the URL, `--cms redis://HOST:PORT?password_file=FILE`, as all users of a host see command lines",
    ),
    Absent(("--cms-redis-timeout",), "an option of the URL, `--cms redis://HOST:PORT?socket_timeout=1`"),
    Absent(
        ("--cms-redis-retry-times",),
        "once with `--cms redis://HOST:PORT?retry_on_timeout=true`; a connection that is lost is made anew in any case",
    ),
    Absent(("--cms-pull-*",), "left out, as changes are pushed"),
    Absent(
        ("--multi-model-support",),
        "nothing to switch on, as a request only ever goes to instances that serve its model",
    ),
    Absent(
        ("--allow-concurrent-scheduling",),
        "left out, as a decision takes less than 0.1 ms and each sees the ones before it",
    ),
    Absent(("--enable-predictor-enhanced-scheduling",), "here it is `--forward-status`"),
    Absent(("--max-num-batched-tokens",), "a flag of `vllm serve`; each engine tells the scheduler its own"),
    Absent(
        ("--num-predictor-warmup-samples",), "left out, as eight steps are enough; `--step-profiles` saves even these"
    ),
    Absent(
        ("--dispatch-prefill-cache-locality-metric",),
        "`--scheduling-policy prefix-cache`, or a policy of your own with that metric first",
    ),
    Absent(("--cache-aware-scheduling-min-tokens",), "left out, as a look-up takes a fraction of a millisecond"),
    Absent(("--kvs-*",), "left out, as engines tell what they have cached, and no store is asked for it"),
    Absent(
        ("--enable-adaptive-pd",),
        "left out, as an instance stays what it is started as; `binpacking_mitigation` and `binpacking_consolidation` "
        "are among the `--rescheduling-policies`, for instances of any type",
    ),
    Absent(
        ("--pd-disagg-protocol", "--separate-pd-scheduling"),
        "left out, as the gateway asks for neutral places only; the scheduler places prefill and decode apart for who "
        "asks its `POST /schedule` with `scheduling_mode` `pd_batch` or `pd_staged`",
    ),
    Absent(("--rescheduling-prefill-load-metric",), "left out, as no policy balances prefill instances"),
    Absent(
        ("--wait-queue-threads", "--wait-queue-interval"),
        "left out, as a request that waits keeps nobody busy; `--max-queue-size` and "
        "`--wait-scheduling-retry-interval` are what there is to set",
    ),
    Absent(
        ("--forward-tokens",),
        "left out, as a scheduler that asks for it is told the names of a prompt's blocks, 8 bytes each, in place of "
        "20 KB for 4,000 tokens",
    ),
    Absent(
        ("--max-model-len", "--tool-call-parser", "--reasoning-parser"),
        "a flag of `vllm serve`, as requests and answers pass the gateway as they are",
    ),
    Absent(
        ("--route-policy", "--route-config", "--fallback-retry-*"),
        "left out, as a proxy before the gateway can choose between this cluster and others; within it, "
        "`--retry-max-count` tries other instances",
    ),
    Absent(
        ("--batch-*",),
        "left out, as a client can send the lines of a file, with a greater `X-Priority` than others have",
    ),
    Absent(
        ("--enable-log-input",),
        "left out, as prompts are to be in no log; `--access-log json` says of each request what became of it",
    ),
    Absent(("--enable-pprof",), "left out, as profilers such as `py-spy` look into a process from outside"),
    Absent(("--extra-args",), "`--config FILE`, or variables such as `LLUMNIX_SCHEDULER_PORT`"),
    Absent(("-v", "--v"), "left out, as the log has one level; it goes to stderr"),
)

FORMER: Final = (
    Absent(("--cms-listen",), "`--cms listen://HOST:PORT`"),
    Absent(("--cms-redis-password-file",), "an option of the URL, `--cms redis://HOST:PORT?password_file=FILE`"),
)
"""Former settings of the scheduler here."""


def instead_of(flag: str) -> str | None:
    """The explanation of a flag of Llumnix, or a former one of ours, with flags unquoted; None for all other flags."""
    for flags, instead in (*ABSENT, *FORMER):
        if any(fnmatchcase(flag, each) for each in flags):
            return re.sub("`(--[^`]+)`", r"\1", instead)
    return None
