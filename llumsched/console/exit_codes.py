# SPDX-License-Identifier: Apache-2.0
"""What the exit code of `llumnix` means. Part of its interface, like `--json`."""

from __future__ import annotations

import enum

from llumlet.process.standard_streams import UNWRITTEN


class ExitCode(enum.IntEnum):
    OK = 0
    """Done: `migrate` moved every request that it selected, and that was at least one; every stream of a
    `drain` came to its end."""
    NOT_MOVED = 1
    """Some selected request did not move; some stream was cut at the end of a `drain`."""
    USAGE = 2
    """The command line is wrong, or names what the scheduler that it asks does not know. Nothing was done."""
    NOTHING_SELECTED = 3
    """The rule of `migrate` fits no request."""
    UNREACHABLE = 4
    """A llumlet did not answer, or what answered is none."""
    REFUSED = 5
    """A llumlet refused the call as a whole."""
    COMPONENT_DIED = 6
    """A component without which `up` cannot serve ended by itself; the others were stopped."""
    UNWRITTEN = UNWRITTEN
    """The output could not be written: the reader of a pipe left, or a disk is full."""
    INTERRUPTED = 130
    """Ctrl-C. Moves that had begun go on."""
