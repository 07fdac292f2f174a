# SPDX-License-Identifier: Apache-2.0
"""The address of an engine's API server: `HOST:PORT`, or a URL, which may have a path before vLLM's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from llumlet.process.addresses import Address

_URL: Final = re.compile(r"(?:(https?)://)?([^/?#]+)((?:/[\w.~!$&'()*+,;=:@%-]+)*)/?", re.ASCII)
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    address: Address
    is_tls: bool = False
    base: str = ""
    """A path before vLLM's own, without a slash at its end; may be ""."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The endpoint in a text. Raises ValueError that names the fault."""
        match = _URL.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is neither HOST:PORT nor http(s)://HOST:PORT/PATH")
        scheme, where, base = match.groups()
        if scheme and not re.search(r":\d+$", where):
            where = f"{where}:{_PORTS[scheme]}"
        return cls(Address.parse(where), scheme == "https", base)

    def url(self, path: str) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.address}{self.base}{path}"
