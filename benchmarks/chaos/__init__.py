# SPDX-License-Identifier: Apache-2.0
"""What is lost when everything around the engines fails, again and again? See `__main__`."""
