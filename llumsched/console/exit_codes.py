# SPDX-License-Identifier: Apache-2.0
"""The exit codes of `llumnix`. They are part of its interface, like `--json`."""

from __future__ import annotations

import enum

from llumlet.process.standard_streams import UNWRITTEN


class ExitCode(enum.IntEnum):
    OK = 0
    """Success: `migrate` moved every selected request, at least one; every stream of a `drain` ended by itself."""
    NOT_MOVED = 1
    """A selected request did not move, or a stream was cut at the end of a `drain`."""
    USAGE = 2
    """The command line is wrong, or the scheduler does not know a name in it. Nothing was done."""
    NOTHING_SELECTED = 3
    """The rule of `migrate` selects no request."""
    UNREACHABLE = 4
    """No llumlet answered."""
    REFUSED = 5
    """A llumlet refused the call as a whole."""
    COMPONENT_DIED = 6
    """A component without which `up` cannot serve ended; the others were stopped."""
    UNWRITTEN = UNWRITTEN
    """The output could not be written: the reader of a pipe left, or a disk is full."""
    INTERRUPTED = 130
    """Ctrl-C. Moves that had begun continue."""
