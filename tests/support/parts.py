# SPDX-License-Identifier: Apache-2.0
"""Documents of which some parts are generated: each stands between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


def fill(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """`text` with every such part as it should be. Raises KeyError for one that is not among `parts`."""

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n{parts[name]()}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([a-z ]+) -->\n.*?<!-- end \1 -->", part, text, flags=re.DOTALL)
