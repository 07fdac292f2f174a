# SPDX-License-Identifier: Apache-2.0
"""Keep the files of a release that the tests compare series, contract and seams with.

python -m tests.patching.store WHEEL      # or a directory that holds `vllm`
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

from vllm_llumnix.patching.release import Release, open_release
from vllm_llumnix.patching.relied_on import RELIED_ON
from vllm_llumnix.patching.series import load
from vllm_llumnix.seams import ALL


def store(release: Release, data: Path) -> list[Path]:
    """Write them below `data`; the series for this release has to be there already. Raises PatchError."""
    version = release.version.partition("+")[0]
    paths = {"vllm/_version.py", *load(version).files, *(row.path for row in RELIED_ON), *(row.path for row in ALL)}
    written = []
    for path in sorted(paths):
        file = data / f"v{version}" / f"{path}.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(release.text(path).encode(), 9, mtime=0))
        written.append(file)
    return written


if __name__ == "__main__":
    for written in store(open_release(Path(sys.argv[1])), Path(__file__).parent / "data"):
        print(written)
