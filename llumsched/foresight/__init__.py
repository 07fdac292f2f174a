# SPDX-License-Identifier: Apache-2.0
"""Estimates of what instances would report now, for statuses that come late. Opt-in: `--forward-status`.

`outlook` keeps what statuses let expect, `moved_on` moves their numbers on by it, `senders` guesses how many schedulers
send requests. Nothing here is made or called unless the setting is on.
"""
