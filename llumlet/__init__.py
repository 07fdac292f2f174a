# SPDX-License-Identifier: Apache-2.0
"""Everything that engines and schedulers share.

    contract    messages between them: their meaning, validation, server, client, and reports to a CMS
    protocol    how a request changes its owner: pure state machines
    process     the kit of every process: settings, credentials, tasks; it knows no messages

Neither vLLM nor torch is imported here.
"""
