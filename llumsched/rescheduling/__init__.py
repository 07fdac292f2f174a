# SPDX-License-Identifier: Apache-2.0
"""Moves running requests from hot instances to cold ones, and away from failed ones.

    view ──> snapshot ──> planner ──> moves ──> executor ──> llumlets
                             ^                      |
                             └────── history <──────┘

The planner is pure: from a snapshot and the history of moves it makes new moves. Only the executor uses the network,
and only `Rescheduler` reads the clock.
"""
