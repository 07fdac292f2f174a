# SPDX-License-Identifier: Apache-2.0
"""Chats in the form that vLLM hands to a chat template.

The names of a prompt's blocks must equal the engine's, token for token. So each form of a request is converted as
vLLM's front end does it; `tests/llumsched/gateway/test_rendering.py` compares the two.
"""
