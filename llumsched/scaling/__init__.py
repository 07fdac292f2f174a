# SPDX-License-Identifier: Apache-2.0
"""How many instances each model and role should have, and who goes first if there are too many. Pure: time is a
parameter, and nobody is started or stopped here.

    columns of the cluster ──▶ load ──▶ scaler ──▶ Advice ──▶ GET /scale, Prometheus, `llumnix up --autoscale`
                                          │
                                       leaving: cheapest first

- `config`: what can be set, and the bounds of a group.
- `load`: what instances of one model and infer type hold, as a number of instances that it needs.
- `scaler`: from that over time to a number of replicas that neither flutters nor comes too late.
- `leaving`: whom a scale-in costs the least.
"""
