# SPDX-License-Identifier: Apache-2.0
"""Live migration of LLM requests between vLLM engines.

Importing this package imports neither vLLM nor torch; see `docs/understand/structure.md` for a map.
"""

__version__ = "0.1.0"
