# SPDX-License-Identifier: Apache-2.0
"""The patch series against vLLM, and how it gets in.

    diff.py       unified diffs: parsed, and applied without fuzz or offset, or by their text
    series.py     one series, `patches/v<version>/{BASE,series,*.patch,CONTRACT}`, and its digest
    relied_on.py  the functions of vLLM that the engine side counts on
    release.py    the files of one release: of a wheel, or a directory
    contract.py   the hashes of these functions in one release
    installed.py  the installed vLLM compared with every series
    importer.py   the series applied in memory while vLLM's modules are imported; loader.py: its part
    state.py      whether that was so in this process
    disk.py       the series applied to, and taken from, files on disk

A series is made for exactly these bytes: `BASE` holds a hash of each file before and after it. It serves every vLLM
that has them, whatever its version. Anything else is left as it is, unless `--llumlet-adapt` was given and it fits word
for word, and `--enable-llumlet` says so.
"""
