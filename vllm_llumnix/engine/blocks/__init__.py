# SPDX-License-Identifier: Apache-2.0
"""KV blocks, batch slots and adapters' places that moves take, hold and give back."""
