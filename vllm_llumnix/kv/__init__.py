# SPDX-License-Identifier: Apache-2.0
"""The data plane: where the bytes of KV blocks lie, and the movers that pull them."""
