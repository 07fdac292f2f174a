# SPDX-License-Identifier: Apache-2.0
"""The address that others are told when a socket listens on all of them."""

from __future__ import annotations

import ipaddress


def reachable_host(host: str) -> str:
    """`host`, or an address of this machine if `host` is a wildcard such as 0.0.0.0."""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host
    if not wildcard:
        return host
    from vllm.utils.network_utils import get_ip

    return get_ip()
