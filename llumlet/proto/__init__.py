# SPDX-License-Identifier: Apache-2.0
"""Generated code of `llumlet.proto` (`python -m llumlet.proto.generate` writes it); import it through `llumlet.types`."""
