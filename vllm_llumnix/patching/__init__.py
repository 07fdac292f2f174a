# SPDX-License-Identifier: Apache-2.0
"""The patch series against vLLM, and how it gets in.

    diff.py      unified diffs: parsed, and applied without fuzz or offset
    series.py    one series, `patches/v<version>/{BASE,series,*.patch}`, and its digest
    installed.py the installed vLLM compared with its series
    importer.py  the series applied in memory while vLLM's modules are imported; loader.py, state.py: its parts
    disk.py      the series applied to, and taken from, files on disk
    rebase.py    a series written again for another release
    docs.py      `docs/patches.md` from the headers of the patches

A series is made for one release of vLLM and for exactly these bytes: `BASE` holds a hash of each file before and after
it. Anything else is left as it is, and `--enable-llumlet` says so.
"""
