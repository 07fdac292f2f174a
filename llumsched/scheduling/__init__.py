# SPDX-License-Identifier: Apache-2.0
"""Which instance a request goes to: metrics, filters, selectors, the policies they make up, and the one runner.

Nothing here does I/O or reads a clock: time and randomness are handed in.
"""
