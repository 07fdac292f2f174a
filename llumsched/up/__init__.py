# SPDX-License-Identifier: Apache-2.0
"""`llumnix up`: a whole cluster on this machine.

- `plan`: the command, environment and readiness check of each component.
- `component`: one running component: started, awaited, stopped, its output passed on.
- `cluster`: all components: the order of start and stop, and the meaning of each one's end.
- `reaper`: the parent process of each component, which leaves no process behind.
- `ports`, `screen`, `device`: free ports; prefixed output; the CPUs and GPUs of this machine.
"""
