# SPDX-License-Identifier: Apache-2.0
"""Code generated from `llumlet.proto` by `python -m llumlet.contract.proto.generate`.

Import the messages through `llumlet.contract.types`.
"""
