# SPDX-License-Identifier: Apache-2.0
"""`llumnix up`: a whole cluster on this machine.

- `plan`: what is to run: the command, the environment and the readiness check of each component.
- `component`: one running component: started, awaited, stopped, its lines handed on.
- `cluster`: all of them: the order of start and stop, and what the death of each means.
- `reaper`: the process above each component, which leaves nothing behind however we end.
- `ports`, `screen`, `device`: free ports; prefixed lines that hold nobody up; what this machine computes on.
"""
