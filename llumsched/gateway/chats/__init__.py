# SPDX-License-Identifier: Apache-2.0
"""Chats as vLLM hands them to a chat template.

The names of a prompt's blocks are of use only if they are those of the engine, token for token. So each form of a
request is converted here as vLLM's front end converts it. `tests/llumsched/gateway/test_rendering.py` compares the
result with the installed vLLM.
"""
