# SPDX-License-Identifier: Apache-2.0
"""Moves running requests from hot instances to cold ones, and away from sick ones.

    view ──> snapshot ──> planner ──> moves ──> executor ──> llumlets
                             ^                      |
                             └────── history <──────┘

The planner is pure: a snapshot and what is remembered of earlier moves go in, moves come out. Only the executor talks
to the network, and only `Rescheduler` looks at the clock.
"""
