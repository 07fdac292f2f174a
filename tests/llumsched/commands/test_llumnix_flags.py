# SPDX-License-Identifier: Apache-2.0
"""Command lines of Llumnix: each of its flags is a setting here, or there is something to be said of it."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest

from llumlet.process.credentials import CredentialFiles
from llumlet.process.redis_client import connect
from llumlet.process.settings import all_entries
from llumsched.cli import prepare
from llumsched.commands import COMMANDS, load
from llumsched.console.llumnix_flags import ABSENT, instead_of
from tests.support.llumnix_flags import ROOT, render, table
from vllm_llumnix.config import LlumletConfig

OF_LLUMNIX = {
    "--": "port host multi-model-support colocated-rescheduling-mode standalone-rescheduling-mode enable-log-input "
    "enable-pprof extra-args llm-backend-discovery scheduler-discovery llm-backend-endpoints scheduler-endpoints "
    "enable-full-mode-scheduling scheduling-policy requests-report-duration pd-disagg-protocol separate-pd-scheduling "
    "enable-instance-status-local-account request-local-account-staleness-seconds allow-concurrent-scheduling "
    "max-num-batched-tokens num-predictor-warmup-samples enable-predictor-enhanced-scheduling enable-adaptive-pd "
    "ttft-profiling-data-path tpot-profiling-data-path ttft-slo tpot-slo ttft-slo-dispatch-threshold "
    "tpot-slo-dispatch-threshold tpot-migrate-out-ceil-threshold tpot-migrate-out-floor-threshold failover-domain "
    "instance-staleness-seconds enable-rescheduling max-queue-size wait-queue-threads wait-queue-interval "
    "service-token wait-scheduling-timeout wait-scheduling-retry-interval forward-tokens tokenizer-name tokenizer-path "
    "chat-template max-model-len tool-call-parser reasoning-parser route-policy route-config retry-max-count "
    "enable-cache-aware-scheduling cache-aware-scheduling-min-tokens v",
    "--discovery-": "redis-host redis-port redis-username redis-password redis-socket-timeout redis-retry-times "
    "redis-status-ttl-ms redis-refresh-interval-ms etcd-endpoints etcd-username etcd-password etcd-dial-timeout "
    "etcd-lease-ttl etcd-refresh-interval-sec",
    "--cms-": "redis-host redis-port redis-username redis-password redis-timeout redis-retry-times "
    "pull-status-interval-ms pull-metadata-interval-ms",
    "--kvs-": "backend metadata-service-config-path hash-algo chunk-size enable-save-unfull-chunk iris-meta-prefix "
    "vllm-block-prefix retry-interval-ms retry-times metadata-service-down-duration-s "
    "metadata-service-redis-cluster-hosts metadata-service-redis-cluster-password "
    "metadata-service-http-server-host metadata-service-http-server-port",
    "--dispatch-": "top-k neutral-load-metric neutral-load-threshold prefill-load-metric prefill-load-threshold "
    "decode-load-metric decode-load-threshold prefill-cache-locality-metric",
    "--rescheduling-": "policies interval-ms decode-load-metric decode-load-threshold prefill-load-metric "
    "neutral-load-metric neutral-load-threshold req-select-order req-select-rule req-select-value "
    "load-balance-threshold load-balance-scope",
    "--llumlet-grpc-": "connection-pool-size timeout-seconds",
    "--fallback-retry-": "queue-enabled queue-size worker-size max-count init-delay-ms max-delay-ms",
    "--batch-": "oss-path oss-endpoint redis-addrs redis-username redis-password redis-retry-times parallel "
    "lines-per-shard request-timeout request-retry-times",
    "-": "v",
}
"""All flags of its scheduler and gateway, by their beginnings."""
FLAGS = sorted(beginning + rest for beginning, rests in OF_LLUMNIX.items() for rest in rests.split())
SERVERS = ("scheduler", "gateway", "rescheduler")


def settings_of(*commands: str) -> set[str]:
    entries = [entry for each in commands for entry in all_entries(load(each).SETTINGS)]
    return {f"--{name}" for entry in entries for name in entry.setting.names}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_a_setting_or_something_is_said_of_it(flag: str) -> None:
    assert (flag in settings_of(*SERVERS)) != (instead_of(flag) is not None)


def test_nothing_is_said_of_flags_that_llumnix_has_not() -> None:
    patterns = [pattern for flags, _ in ABSENT for pattern in flags]
    assert [each for each in patterns if not any(fnmatchcase(flag, each) for flag in FLAGS)] == []


def test_replacements_of_llumnix_flags_exist() -> None:
    named = {flag for _, instead in ABSENT for flag in re.findall(r"--[a-z-]+", instead)}
    llumlet = {entry.setting.flag for entry in all_entries((LlumletConfig, CredentialFiles))}
    assert named - settings_of(*COMMANDS) - llumlet - {"--config"} == set()


def test_the_table_of_the_documentation_is_current() -> None:
    text = (ROOT / "docs/reference/defaults.md").read_text()
    assert table() in text
    assert render(text) == text, "run `make docs`"


def test_the_urls_that_are_named_do_what_is_said_of_them() -> None:
    usual = connect("redis://h").connection_pool.make_connection()
    assert (usual.socket_timeout, usual.retry.get_retries()) == (2.0, 0)
    given = connect("redis://h?socket_timeout=1&retry_on_timeout=true").connection_pool.make_connection()
    assert (given.socket_timeout, given.retry.get_retries()) == (1.0, 1)


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("scheduler", ["--enable-predictor-enhanced-scheduling"],
         ["unknown argument '--enable-predictor-enhanced-scheduling': here it is --forward-status"]),
        ("scheduler", ["--num-predictor-warmup-samples", "9", "--cms-pull-status-interval-ms=50"],
         ["unknown argument '--num-predictor-warmup-samples': left out, as eight steps are enough; "
          "--step-profiles saves even these",
          "unknown argument '--cms-pull-status-interval-ms': left out, as changes are pushed"]),
        ("scheduler", ["--cms-redis-timeout=2", "stray"],
         ["unknown argument '--cms-redis-timeout': an option of the URL, --cms redis://HOST:PORT?socket_timeout=1",
          "unknown argument 'stray'"]),
        ("scheduler", ["--cms-listen", "127.0.0.1:1", "--cms-redis-password-file=x"],
         ["unknown argument '--cms-listen': --cms listen://HOST:PORT",
          "unknown argument '--cms-redis-password-file': an option of the URL, "
          "--cms redis://HOST:PORT?password_file=FILE"]),
        ("scheduler", ["--requests-report-duration", "1s", "-v", "4"],
         ["unknown argument '--requests-report-duration': it is for `llumnix gateway`",
          "unknown argument '-v': left out, as the log has one level; it goes to stderr"]),
        ("gateway", ["--scheduler-endpoints=a:1", "--extra-args", "max-queue-size=9", "--cms-redis-host=h"],
         ["unknown argument '--extra-args': --config FILE, or variables such as `LLUMNIX_SCHEDULER_PORT`",
          "unknown argument '--cms-redis-host': parts of the URL, --cms redis://USERNAME@HOST:PORT"]),
        ("rescheduler", ["--cms=127.0.0.1:1", "--dispatch-top-k=2", "--max-queue-size", "9"],
         ["unknown argument '--dispatch-top-k': it is for `llumnix scheduler`",
          "unknown argument '--max-queue-size': it is for `llumnix gateway`"]),
        ("scheduler", ["--bogus=1", "--more", "2"],
         ["unknown argument '--bogus=1'", "unknown argument '--more'"]),
        ("explain", ["--kvs-backend", "v6d", "--max-queue-size=1"],
         ["unknown argument '--kvs-backend'", "unknown argument '--max-queue-size=1'"]),
    ],
)  # fmt: skip
def test_llumnix_command_line_gets_hints(command: str, words: list[str], said: list[str]) -> None:
    assert prepare(command, [command, *words], {}).faults == said
