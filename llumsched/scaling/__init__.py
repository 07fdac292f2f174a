# SPDX-License-Identifier: Apache-2.0
"""The desired number of instances of each model and role, and the order in which surplus ones leave. Pure: time is a
parameter, and nothing is started or stopped here.

    columns of the cluster ──▶ load ──▶ scaler ──▶ Advice ──▶ GET /scale, Prometheus, `llumnix up --autoscale`
                                          │
                                       leaving: cheapest first

- `config`: the settings, and the bounds of a group.
- `load`: the load of a model and infer type, as a number of instances that it needs.
- `scaler`: from loads over time to a number that neither oscillates nor lags.
- `leaving`: the instances that are cheapest to remove.
"""
