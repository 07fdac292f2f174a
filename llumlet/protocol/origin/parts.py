# SPDX-License-Identifier: Apache-2.0
"""The parts of an input that comes bit by bit."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(eq=False, slots=True)
class Input:
    """An input that comes in parts: vLLM's streaming input. Each is answered before the next is looked at, and the end
    of an answer is the end of the stream only if no more input comes.

    What its engine has not answered is kept: the request may have left it, and goes on where the part is sent then.
    """

    count: int = 0
    """Parts that have come, the end of the input not among them."""
    is_over: bool = False
    kept: dict[int, object] = dataclasses.field(default_factory=dict)
    """Parts by number, from the first that is not answered on."""

    def add(self, part: object) -> int:
        """Keeps the next part; returns its number."""
        self.kept[self.count] = part
        self.count += 1
        return self.count - 1

    def end(self) -> int:
        self.is_over = True
        return self.count

    def answered(self, num_ends: int) -> None:
        """So many parts have been."""
        for number in [number for number in self.kept if number < num_ends]:
            del self.kept[number]

    def numbers_from(self, first: int) -> range:
        """Numbers of the parts from `first` on, including the end of the input."""
        return range(first, self.count + self.is_over)
