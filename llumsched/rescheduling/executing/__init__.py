# SPDX-License-Identifier: Apache-2.0
"""Carries out the moves of a pass, and remembers what became of them for the next one."""
