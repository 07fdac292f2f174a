# SPDX-License-Identifier: Apache-2.0
"""A series written again, for another release of vLLM or after one of its patches was edited:

    python -m vllm_llumnix.patching.rebase patches/v0.33.0 DIR/vllm patches/v0.34.0

Each hunk is looked for by its text, which must be in the file exactly once. The new patches have the right line
numbers, and a new BASE the right hashes. If a hunk is missing, or there twice, nothing is written: somebody has to read
that code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching.diff import FileDiff
from vllm_llumnix.patching.installed import version_of
from vllm_llumnix.patching.series import listed, parse_patch, sha256, unified_diff


def rebase(source: Path, package: Path, target: Path) -> None:
    """Write the series in `source` to `target`, for the original files of the package `vllm` in `package`.

    The hashes and line numbers of `source` are not used. Raises PatchError.
    """
    version = version_of(package)
    if version is None:
        raise PatchError(f"{package} does not tell vLLM's version")
    originals: dict[str, str] = {}
    texts: dict[str, str] = {}
    written: dict[str, str] = {}
    faults: list[str] = []
    for name in listed((source / "series").read_text()):
        text = (source / name).read_text()
        parts = [text.partition("\n---\n")[0] + "\n---\n"]
        for change in parse_patch(text, name).diffs:
            if change.path not in texts:
                texts[change.path] = originals[change.path] = (package.parent / change.path).read_bytes().decode()
            before = texts[change.path]
            texts[change.path] = _apply_by_text(change, before, name, faults)
            parts += unified_diff(change.path, before, texts[change.path])
        written[name] = "".join(parts)
    if faults:
        raise PatchError("; ".join(faults))
    base = [f"{sha256(originals[path])}  {sha256(texts[path])}  {path}\n" for path in sorted(texts)]
    target.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (target / name).write_text(text)
    (target / "series").write_text("".join(f"{name}\n" for name in written))
    (target / "BASE").write_text(f"vllm {version}\n" + "".join(base))


def _apply_by_text(change: FileDiff, text: str, name: str, faults: list[str]) -> str:
    text = f"\n{text}"
    for hunk in change.hunks:
        before, after = ("".join(f"\n{line}" for line in lines) + "\n" for lines in (hunk.before, hunk.after))
        count = text.count(before)
        if count != 1:
            faults.append(f"{name}: the hunk at line {hunk.before_start} is {count} times in {change.path}")
            continue
        text = text.replace(before, after)
    return text[1:]


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    source, package, target = map(Path, sys.argv[1:])
    try:
        rebase(source, package, target)
    except (PatchError, OSError) as error:
        print(f"rebase: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
