# SPDX-License-Identifier: Apache-2.0
"""An instance's side of the cluster metadata store (CMS): it reports there, and asks for other instances."""
