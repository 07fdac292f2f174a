# SPDX-License-Identifier: Apache-2.0
"""Ways to read the KV memory of another worker. `base.Transport` is the contract."""
