# SPDX-License-Identifier: Apache-2.0
"""Checks of the settings of transports whose networks authenticate nobody."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Protocol

from llumlet.process.setting_sources import Reading
from vllm_llumnix.kv.networks.nixl_process import why_not_installed
from vllm_llumnix.wire.addresses import Reach, address_of_interface

_OF_MOONCAKE = (
    "--llumlet-mooncake-protocol",
    "--llumlet-mooncake-devices",
    "--llumlet-mooncake-gpu-direct",
    "--llumlet-mooncake-interface",
)


class NetworkSettings(Protocol):
    """Parts of an instance's configuration that are checked here."""

    @property
    def transport(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def mooncake_interface(self) -> str: ...
    @property
    def nixl_devices(self) -> str: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def authenticated(self) -> bool: ...
    @property
    def reaches(self) -> Reach: ...


def mooncake_faults(config: NetworkSettings, reading: Reading) -> Iterator[str]:
    if config.transport not in ("auto", "mooncake"):
        if given := [reading.given[flag] for flag in _OF_MOONCAKE if flag in reading.given]:
            yield f"{', '.join(given)} needs --llumlet-transport auto or mooncake"
        return
    if config.mooncake_interface:
        try:
            address = address_of_interface(config.mooncake_interface)
        except ValueError as error:
            yield f"--llumlet-mooncake-interface: {error}"
        else:
            if config.reaches.why_not(address) is not None and config.reaches.why_not(config.host) is None:
                yield (
                    f"--llumlet-mooncake-interface {config.mooncake_interface} has the address {address}, which peers "
                    f"refuse while --llumlet-host is {config.host}: give this instance an address on that network with "
                    "TLS and a token (or --llumlet-insecure), or name the interface lo"
                )
    if config.transport == "mooncake":
        if importlib.util.find_spec("mooncake") is None:
            yield "--llumlet-transport mooncake: pip install vllm-llumnix[mooncake]"
        if not (config.insecure or config.mooncake_interface or Reach(anywhere=False).why_not(config.host) is None):
            yield (
                "--llumlet-transport mooncake authenticates nobody: name an isolated network with "
                "--llumlet-mooncake-interface, or add --llumlet-insecure"
            )


def nixl_faults(config: NetworkSettings) -> Iterator[str]:
    if config.transport not in ("auto", "nixl"):
        if config.nixl_devices:
            yield "--llumlet-nixl-devices needs --llumlet-transport auto or nixl"
        return
    if config.nixl_devices not in ("", "lo") and not (config.authenticated or config.insecure):
        yield (
            f"--llumlet-nixl-devices {config.nixl_devices}: an instance without TLS and a token speaks to loopback "
            "addresses only: name the device lo, give it both, or add --llumlet-insecure"
        )
    if config.transport == "nixl":
        if (problem := why_not_installed()) is not None:
            yield f"--llumlet-transport nixl: {problem}"
        if not config.nixl_devices:
            yield (
                "--llumlet-transport nixl authenticates nobody: name the network devices that nobody but the instances "
                "reaches with --llumlet-nixl-devices"
            )
