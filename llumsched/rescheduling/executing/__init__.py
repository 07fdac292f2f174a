# SPDX-License-Identifier: Apache-2.0
"""Executes the moves of a pass, and remembers their outcome for the next one."""
