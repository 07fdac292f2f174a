# SPDX-License-Identifier: Apache-2.0
"""Flags: every fault is found at once, and nothing is on without `--enable-llumlet`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from vllm_llumnix import config, hooks
from vllm_llumnix.errors import ConfigError, PatchError
from vllm_llumnix.kv.networks import nixl_process
from vllm_llumnix.kv.settings import UNLIMITED, Limit
from vllm_llumnix.wire import unauthenticated as transport_faults

PEERS = ("--llumlet-peers", "127.0.0.1:1")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    hooks.add_cli_args(parser)
    parser.add_argument("--data-parallel-size", type=int, default=1)  # vLLM's own
    return parser.parse_args(flags)


def read(*flags: str, **environ: str) -> config.LlumletConfig | None:
    return config.config_from_args(parse(*flags), environ)


def test_off_by_default() -> None:
    assert read() is None


def test_defaults() -> None:
    on = read("--enable-llumlet")
    assert on is not None
    assert (on.host, on.port, on.transport, on.bandwidth_limit, on.exact) == ("127.0.0.1", 0, "auto", UNLIMITED, False)
    assert on.instance_id


def test_a_move_keeps_little_of_the_cache_from_others() -> None:
    """Unless it is asked to: a longer request goes alone."""
    usual, wide = read("--enable-llumlet"), read("--enable-llumlet", "--llumlet-max-migration-kv-ratio-in", "1")
    assert usual is not None
    assert wide is not None
    assert (usual.max_migration_kv_ratio_in, usual.max_migration_kv_ratio_out) == (0.25, 0.25)
    assert (wide.max_migration_kv_ratio_in, wide.max_migration_kv_ratio_out) == (1, 0.25)


def test_two_instances_get_two_names() -> None:
    one, other = read("--enable-llumlet"), read("--enable-llumlet")
    assert one is not None
    assert other is not None
    assert one.instance_id != other.instance_id


def test_survives_the_way_into_a_child_process() -> None:
    on = read("--enable-llumlet", "--llumlet-port", "4000", "--llumlet-bandwidth-limit", "2G", "--llumlet-exact")
    assert on is not None
    assert config.LlumletConfig.from_json(on.to_json()) == on
    assert (on.bandwidth_limit, on.bandwidth_limit_local) == (Limit(bytes_per_s=2e9), UNLIMITED)


def test_data_parallel_ranks_are_instances_of_their_own() -> None:
    flags = ("--enable-llumlet", "--llumlet-port", "4000", "--llumlet-instance-id", "a")
    alone, four = read(*flags), read(*flags, "--data-parallel-size", "4")
    assert alone is not None
    assert four is not None
    assert alone.for_rank(0) == alone
    assert [(four.for_rank(rank).port, four.for_rank(rank).instance_id) for rank in (0, 2)] == [
        (4000, "a-dp0"),
        (4002, "a-dp2"),
    ]


def test_all_faults_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        read(
            *("--enable-llumlet", "--llumlet-host", "0.0.0.0", "--llumlet-port", "70000"),
            *("--llumlet-instance-id", "a b", "--llumlet-lease-seconds", "0", "--llumlet-max-migrations-in", "-1"),
            *("--llumlet-stall-budget-ms", "-3", "--llumlet-drain-seconds", "-1"),
            *("--llumlet-utility-seconds", "0"),
            *("--llumlet-transport", "mooncake", "--llumlet-mooncake-interface", "nosuch0"),
            LLUMNIX_TYPO="1",
            VLLM_USE_RUST_FRONTEND="1",
        )
    text = "\n".join(refusal.value.faults)
    for word in (
        "host",
        "port",
        "instance-id",
        "lease",
        "migrations-in",
        "budget",
        "nosuch0",
        "drain",
        "utility",
        "TYPO",
        "Rust",
    ):
        assert word in text
    assert len(refusal.value.faults) == 11


def test_kubernetes_service_variables_are_ignored() -> None:
    """Of Services called `llumnix` and `llumnix-scheduler`."""
    links = {
        "LLUMNIX_SERVICE_HOST": "10.96.0.7",
        "LLUMNIX_PORT": "tcp://10.96.0.7:8001",
        "LLUMNIX_SCHEDULER_SERVICE_HOST": "10.96.0.8",
        "LLUMNIX_SCHEDULER_SERVICE_PORT": "8002",
        "LLUMNIX_SCHEDULER_SERVICE_PORT_CMS": "8003",
        "LLUMNIX_SCHEDULER_PORT": "tcp://10.96.0.8:8002",
        "LLUMNIX_SCHEDULER_PORT_8002_TCP": "tcp://10.96.0.8:8002",
        "LLUMNIX_SCHEDULER_PORT_8002_TCP_PROTO": "tcp",
        "LLUMNIX_SCHEDULER_PORT_8002_TCP_PORT": "8002",
        "LLUMNIX_SCHEDULER_PORT_8002_TCP_ADDR": "10.96.0.8",
    }
    assert read("--enable-llumlet", **links) is not None
    with pytest.raises(ConfigError, match="LLUMNIX_IMPORT, LLUMNIX_PORTS"):
        read("--enable-llumlet", **links, LLUMNIX_PORTS="1", LLUMNIX_IMPORT="1")


def test_stores_that_are_told() -> None:
    stores = "127.0.0.1:7100,redis://localhost:6379/0,rediss://cms.example:6380"
    on = read("--enable-llumlet", "--llumlet-cms", stores)
    assert on is not None
    assert on.cms == stores
    with pytest.raises(ConfigError) as refusal:
        read("--enable-llumlet", "--llumlet-cms", "here, http://there:1")
    assert [fault.partition(": ")[0] for fault in refusal.value.faults] == ["--llumlet-cms"] * 2
    for store in ("10.0.0.5:7100", "redis://10.0.0.5"):
        with pytest.raises(ConfigError, match=r"--llumlet-cms: 10\.0\.0\.5 is not a loopback address"):
            read("--enable-llumlet", "--llumlet-cms", store)
        assert read("--enable-llumlet", "--llumlet-cms", store, "--llumlet-insecure") is not None
    sentinels = "redis+sentinel://127.0.0.1:1,10.0.0.5:1,10.0.0.6:1/service"
    with pytest.raises(ConfigError) as refusal:
        read("--enable-llumlet", "--llumlet-cms", f"{sentinels},127.0.0.1:7100")
    assert [fault.split()[1] for fault in refusal.value.faults] == ["10.0.0.5", "10.0.0.6"]
    assert read("--enable-llumlet", "--llumlet-cms", sentinels.replace("redis", "rediss")) is not None


def test_a_unit_is_one_data_parallel_group() -> None:
    def unit(*flags: str, **of_vllm: object) -> str:
        args = parse("--enable-llumlet", *flags)
        vars(args).update(of_vllm)
        on = config.config_from_args(args, {})
        assert on is not None
        assert on.for_rank(1).unit == on.unit
        return on.unit

    ranks = ("--data-parallel-size", "4")
    assert unit() != unit()
    assert unit(*ranks) != unit(*ranks)
    hosts = [
        unit(*ranks, data_parallel_size_local=2, data_parallel_address="10.0.0.5", data_parallel_rpc_port=13345)
        for _ in range(2)
    ]
    assert len(set(hosts)) == 1
    one_each = [unit(*ranks, data_parallel_rank=rank, data_parallel_address="10.0.0.6") for rank in range(4)]
    assert len(set(one_each)) == 1
    assert hosts[0] != one_each[0]


@pytest.mark.parametrize(
    ("flags", "of_vllm", "expected"),
    [
        ((), {"api_server_count": 2}, 0),
        (PEERS, {}, 0),
        (PEERS, {"api_server_count": 1}, 0),
        (PEERS, {"api_server_count": 2}, 30),
        (("--llumlet-cms", "127.0.0.1:1"), {"api_server_count": 2}, 30),
        ((*PEERS, "--llumlet-drain-seconds", "0"), {"api_server_count": 2}, 0),
        ((*PEERS, "--llumlet-drain-seconds", "99.5"), {"api_server_count": 2}, 105),
        (PEERS, {"api_server_count": 2, "shutdown_timeout": 60}, 60),
        (PEERS, {"data_parallel_size": 2}, 30),
        (PEERS, {"data_parallel_size": 2, "data_parallel_external_lb": True}, 0),
        (PEERS, {"data_parallel_size": 2, "data_parallel_size_local": 1}, 0),
    ],
)
def test_several_api_servers_have_time_to_drain(flags: tuple[str, ...], of_vllm: dict[str, Any], expected: int) -> None:
    args = parse("--enable-llumlet", *flags)
    vars(args).update({"shutdown_timeout": 0, **of_vllm})
    assert config.config_from_args(args, {}) is not None
    assert args.shutdown_timeout == expected


def test_served_model_names_are_kept() -> None:
    args = parse("--enable-llumlet")
    args.port, args.served_model_name = 8001, ["big", "bigger"]
    on = config.config_from_args(args, {})
    assert on is not None
    assert (on.api_server_port, on.served_models) == (8001, ("big", "bigger"))


def test_flags_without_the_switch_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--llumlet-port needs --enable-llumlet"):
        read("--llumlet-port", "4000")


@pytest.mark.parametrize(
    ("text", "limit"),
    [("20%", Limit(share=0.2)), ("2.5GB", Limit(bytes_per_s=2.5e9)), ("500m", Limit(bytes_per_s=5e8))],
)
def test_limits(text: str, limit: Limit) -> None:
    on = read("--enable-llumlet", "--llumlet-bandwidth-limit-local", text)
    assert on is not None
    assert on.bandwidth_limit_local == limit
    assert config.LlumletConfig.from_json(on.to_json()) == on


@pytest.mark.parametrize("rate", ["fast", "0", "-1", "5T", "0%", "101%", "%"])
def test_limits_that_are_none(rate: str) -> None:
    with pytest.raises(ConfigError, match=r"--llumlet-bandwidth-limit .* is neither a rate"):
        read("--enable-llumlet", f"--llumlet-bandwidth-limit={rate}")


def test_another_address_is_allowed_when_asked_for() -> None:
    on = read("--enable-llumlet", "--llumlet-host", "10.0.0.5", "--llumlet-insecure")
    assert on is not None
    assert on.host == "10.0.0.5"


def test_processes_with_different_series_do_not_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ready:
        patch_digest = "another"

    hooks.check_ready(Ready())
    monkeypatch.setenv(hooks.CONFIG_VARIABLE, config.LlumletConfig(instance_id="a").to_json())
    with pytest.raises(PatchError, match="another"):
        hooks.check_ready(Ready())


def test_the_bypass_needs_workers_of_their_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed-executor-backend")
    config.add_cli_args(parser)
    on = ["--enable-llumlet", "--llumlet-bypass"]
    for given in ([], ["--distributed-executor-backend", "mp"]):
        args = parser.parse_args([*on, *given])
        assert config.config_from_args(args, {}) is not None
        assert args.distributed_executor_backend == "mp"
    with pytest.raises(ConfigError, match="needs --distributed-executor-backend mp"):
        config.config_from_args(parser.parse_args([*on, "--distributed-executor-backend", "uni"]), {})
    args = parser.parse_args(["--enable-llumlet"])
    config.config_from_args(args, {})
    assert args.distributed_executor_backend is None


def test_mooncake_is_taken_only_where_it_is_isolated() -> None:
    def on(*flags: str) -> config.LlumletConfig:
        found = read("--enable-llumlet", *flags)
        assert found is not None
        return found

    assert on().transports == ("local", "tcp")
    assert on("--llumlet-insecure").transports == ("local", "mooncake", "tcp")
    isolated = on("--llumlet-mooncake-interface", "lo", "--llumlet-mooncake-protocol", "rdma")
    assert isolated.transports == ("local", "mooncake", "tcp")
    settings = isolated.worker_settings().mooncake
    assert settings is not None
    assert (settings.host, settings.protocol, settings.required) == ("127.0.0.1", "rdma", False)
    loopback = on("--llumlet-transport", "mooncake").worker_settings()
    assert (loopback.transports, loopback.mooncake and loopback.mooncake.required) == (("mooncake",), True)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--llumlet-transport", "tcp", "--llumlet-mooncake-interface", "lo"), "needs --llumlet-transport auto"),
        (("--llumlet-transport", "mooncake", "--llumlet-host", "192.0.2.1"), "authenticates nobody"),
        (("--llumlet-mooncake-interface", "nosuch0"), "no network interface 'nosuch0'"),
    ],
)
def test_mooncake_faults(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read("--enable-llumlet", *flags)


def test_mooncake_on_another_network_than_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of an instance that is reached at a loopback address refuse every other."""
    for module in (config, transport_faults):
        monkeypatch.setattr(module, "address_of_interface", lambda _: "192.0.2.1")
    flags = ("--enable-llumlet", "--llumlet-mooncake-interface", "eth1")
    with pytest.raises(ConfigError, match="which peers refuse while --llumlet-host is"):
        read(*flags)
    assert read(*flags, "--llumlet-insecure") is not None
    with pytest.raises(ConfigError) as refusal:
        read(*flags, "--llumlet-host", "192.0.2.1")
    assert [fault.partition(":")[0] for fault in refusal.value.faults] == ["--llumlet-host"]


def test_nixl_is_taken_only_over_devices_that_were_named() -> None:
    def on(*flags: str) -> config.LlumletConfig:
        found = read("--enable-llumlet", *flags)
        assert found is not None
        return found

    assert "nixl" not in on("--llumlet-insecure").transports
    assert on("--llumlet-nixl-devices", "lo").transports == ("local", "nixl", "tcp")
    both = on("--llumlet-nixl-devices", "mlx5_0:1,eth1", "--llumlet-insecure", "--llumlet-max-migrations-in", "7")
    assert both.transports == ("local", "nixl", "mooncake", "tcp")
    settings = both.worker_settings()
    assert settings.nixl is not None
    assert settings.mooncake is not None
    assert (settings.nixl.devices, settings.nixl.required, settings.nixl.max_in) == ("mlx5_0:1,eth1", False, 7)
    alone = on("--llumlet-transport", "nixl", "--llumlet-nixl-devices", "lo").worker_settings()
    assert (alone.transports, alone.nixl and alone.nixl.required) == (("nixl",), True)
    assert on().worker_settings().nixl is None


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--llumlet-transport", "tcp", "--llumlet-nixl-devices", "lo"), "needs --llumlet-transport auto or nixl"),
        (("--llumlet-transport", "nixl"), "authenticates nobody: name the network devices"),
        (("--llumlet-transport", "nixl", "--llumlet-insecure"), "authenticates nobody: name the network devices"),
        (("--llumlet-nixl-devices", "eth1"), "eth1: an instance without TLS and a token speaks to loopback"),
    ],
)
def test_nixl_faults(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read("--enable-llumlet", *flags)


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name it has to be there; of several it is left out, when the worker starts."""
    monkeypatch.setattr(nixl_process, "MODULES", ("no_such_nixl",))
    flags = ("--enable-llumlet", "--llumlet-nixl-devices", "lo")
    with pytest.raises(ConfigError, match=r"pip install vllm-llumnix\[nixl\]"):
        read(*flags, "--llumlet-transport", "nixl")
    assert read(*flags) is not None


def test_flags_in_variables_and_in_vllm_s_own_file(tmp_path: Path) -> None:
    """What is in that file reaches us as a part of the command line: it goes before variables."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    hooks.add_cli_args(parser)
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "enable-llumlet: true\nllumlet-port: 7000\nllumlet_exact: true\nllumlet-bypass: false\n"
        "llumlet-mooncake-gpu-direct: false\nllumlet-bandwidth-limit: 20%\nllumlet-drain-seconds: 40\n"
        "llumlet-peers: 127.0.0.1:1,127.0.0.1:2\n"
    )
    args = parser.parse_args(["--config", str(file), "--llumlet-lease-seconds=9"])
    environ = {
        "LLUMNIX_LLUMLET_PORT": "7001",
        "LLUMNIX_LLUMLET_MAX_MIGRATIONS_IN": "9",
        "LLUMNIX_LLUMLET_BYPASS": "true",
    }
    on = config.config_from_args(args, environ)
    assert on is not None
    assert (on.port, on.exact, on.bypass, on.mooncake_gpu_direct) == (7000, True, False, False)
    assert (on.bandwidth_limit, on.drain_seconds, on.peers) == (Limit(share=0.2), 40, ("127.0.0.1:1", "127.0.0.1:2"))
    assert (on.lease_seconds, on.max_migrations_in) == (9, 9)


def test_variables_alone_switch_nothing_on() -> None:
    assert read(LLUMNIX_LLUMLET_PORT="7001") is None
    with pytest.raises(ConfigError, match="unknown variables LLUMNIX_ENABLE_LLUMLET"):
        read("--enable-llumlet", LLUMNIX_ENABLE_LLUMLET="true")
