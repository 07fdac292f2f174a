# SPDX-License-Identifier: Apache-2.0
"""The console command `vllm-llumnix`: the patch series, and whether this machine can run the llumlet."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import IntEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llumlet.process.standard_streams import UNWRITTEN, guarded
from vllm_llumnix import __version__, doctor
from vllm_llumnix.doctor import Check, Level
from vllm_llumnix.errors import PatchError
from vllm_llumnix.patching import contract, disk
from vllm_llumnix.patching.contract import Kept
from vllm_llumnix.patching.installed import FileState, Installed, examine, find_vllm
from vllm_llumnix.patching.release import open_release, reader_of
from vllm_llumnix.patching.seam import absent
from vllm_llumnix.patching.series import Patch, Series, available, directory_of, load, root
from vllm_llumnix.seams import ALL

_EPILOG = """exit codes:
  0  done; check, doctor: nothing stands against --enable-llumlet, which needs no optional part
  1  the series does not fit, or a check failed: the output says what to do
  2  the command line is wrong
  7  the output could not be written
"""


class ExitCode(IntEnum):
    """Exit codes of the command."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    UNWRITTEN = UNWRITTEN


_STYLES = {Level.OK: "green", Level.OPTIONAL: "yellow", Level.PROBLEM: "bold red"}


def main(argv: Sequence[str] | None = None) -> int:
    with guarded("vllm-llumnix"):
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], ExitCode] = args.run
    try:
        return run(args)
    except (PatchError, OSError) as error:
        if getattr(args, "json", False):
            _print_json({"problem": str(error)})
        print(f"vllm-llumnix: error: {error}", file=sys.stderr)
        return ExitCode.PROBLEM


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-llumnix",
        description="The patch series against vLLM, and the state of this installation.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    checked = _add(commands, "doctor", "check everything that --enable-llumlet needs", _doctor)
    _adapting(checked)
    checked.add_argument("--model", metavar="DIR", help="directory of a model whose moves are checked")
    checked.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of `vllm serve` for the model")
    patch = commands.add_parser("patch", help="the patch series", description="The patch series against vLLM.")
    verbs = patch.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _adapting(_add(verbs, "check", "compare the installed vLLM with its series and contract", _check, on_vllm=True))
    show = _add(verbs, "show", "list the patches, or print one", _show)
    show.add_argument("name", nargs="?", metavar="PATCH", help="name of a patch, or its number")
    show.add_argument("--for", dest="version", metavar="VERSION", help="version of vLLM (default: the installed one)")
    _add(verbs, "apply", "patch vLLM's files on disk", _apply, on_vllm=True)
    _add(verbs, "revert", "restore vLLM's files on disk", _revert, on_vllm=True)
    export = _add(verbs, "export", "write patched copies of vLLM's files, and one diff", _export, on_vllm=True)
    export.add_argument("target", type=Path, metavar="DIR", help="directory to write to")
    signed = _add(verbs, "contract", "list the functions that differ from the contract", _contract, on_vllm=True)
    signed.add_argument("--write", action="store_true", help="write the present functions into the contract")
    seams = _add(verbs, "seams", "list the attributes of vLLM that are wrapped or set at run time", _seams)
    seams.add_argument(
        "release", type=Path, nargs="?", metavar="WHEEL", help="wheel of vLLM (default: the installed vLLM)"
    )
    return parser


def _adapting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapt", action="store_true", help="check as for instances started with --llumlet-adapt")


def _add(
    commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], ExitCode], on_vllm: bool = False
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    if on_vllm:
        parser.add_argument(
            "--vllm", type=Path, metavar="DIR", help="directory of the package `vllm` (default: the installed one)"
        )
    return parser


# patch


def _check(args: argparse.Namespace) -> ExitCode:
    found = _found(args)
    kept = None
    if found.problem is None and found.series is not None and found.root is not None:
        # The hashes say that the files are right; this says it of the series.
        for path in found.series.files:
            found.patched(path, (found.root / path).read_bytes())
        kept = found.kept()
    if args.json:
        _print_json(_as_json(found, kept))
    else:
        console = _console()
        if found.files:
            console.print(_files_table(found))
        console.print(_verdict(found, kept), soft_wrap=True)
    return ExitCode.PROBLEM if found.problem or (kept and kept.problem) else ExitCode.OK


def _show(args: argparse.Namespace) -> ExitCode:
    series = _series_for(args.version)
    if args.name is None:
        if args.json:
            _print_json(
                {"version": series.version, "digest": series.digest, "patches": [*map(_patch_json, series.patches)]}
            )
        else:
            _console().print(_patches_table(series))
        return ExitCode.OK
    patch = _named(series, args.name)
    if args.json:
        _print_json(_patch_json(patch))
    else:
        sys.stdout.write((root() / f"v{series.version}" / patch.name).read_text())
    return ExitCode.OK


def _apply(args: argparse.Namespace) -> ExitCode:
    found = _found(args)
    return _report(args, disk.apply(found), "patched", f"vLLM {found.version} is patched on disk already")


def _revert(args: argparse.Namespace) -> ExitCode:
    found = _found(args)
    return _report(args, disk.revert(found), "restored", f"vLLM {found.version} is not patched on disk")


def _export(args: argparse.Namespace) -> ExitCode:
    return _report(args, [str(path) for path in disk.export(_found(args), args.target)], "wrote", "")


def _contract(args: argparse.Namespace) -> ExitCode:
    found = _found(args)
    release = found.as_released()
    assert found.series is not None
    assert found.root is not None
    directory = directory_of(found.series.version)
    if args.write:
        written = directory / contract.FILE
        written.write_text(contract.of(release, found.series.version))
        return _report(args, [str(written)], "wrote", "")
    differences = contract.compare(contract.load(directory), found.root, found.series.files)
    if args.json:
        _print_json({"contract": found.series.version, "differences": [asdict(one) for one in differences]})
    else:
        print("\n".join(f"{one}{'; refuses' * one.refuses}" for one in differences) or "nothing differs")
    return ExitCode.PROBLEM if differences else ExitCode.OK


def _seams(args: argparse.Namespace) -> ExitCode:
    if args.release is not None:
        release = open_release(args.release)
        missing = absent(ALL, release.text_or_nothing)
    else:
        found = examine(find_vllm())
        if found.root is None:
            raise PatchError(found.problem or "there is no vLLM")
        missing = absent(ALL, reader_of(found.root))
    if args.json:
        _print_json({"seams": [asdict(row) | {"missing": row in missing} for row in ALL]})
    else:
        table = Table("attribute", "in", "process", "how", "why")
        for row in ALL:
            style = "red" if row in missing else "green"
            table.add_row(Text(row.name, style), row.path, row.process, str(row.kind), row.why)
        _console().print(table)
        print("\n".join(f"missing: {row.name} ({row.path})" for row in missing) or f"all {len(ALL)} are there")
    return ExitCode.PROBLEM if missing else ExitCode.OK


def _report(args: argparse.Namespace, paths: list[str], verb: str, nothing: str) -> ExitCode:
    if args.json:
        _print_json({verb: paths})
    else:
        print("\n".join(f"{verb} {path}" for path in paths) or nothing)
    return ExitCode.OK


def _found(args: argparse.Namespace) -> Installed:
    if args.vllm is not None and not (args.vllm / "__init__.py").is_file():
        raise PatchError(f"{args.vllm} is not the directory of the package vllm")
    return examine(args.vllm or find_vllm(), adapt=getattr(args, "adapt", False))


def _series_for(version: str | None) -> Series:
    if version is None:
        found = examine(find_vllm())
        return found.series if found.series is not None else load(available()[-1])
    return load(version)


def _named(series: Series, name: str) -> Patch:
    for number, patch in enumerate(series.patches, 1):
        if name in (patch.name, patch.name.removesuffix(".patch"), str(number)):
            return patch
    raise PatchError(f"there is no patch {name!r} for vLLM {series.version}: see `vllm-llumnix patch show`")


def _verdict(found: Installed, kept: Kept | None) -> str:
    problem = found.problem or (kept and kept.problem)
    if problem or found.series is None:
        return f"vLLM {found.version or '-'}: not usable with --enable-llumlet. {problem}"
    how = "patched on disk" if found.on_disk else "patched in memory when it is imported"
    if found.adapted:
        how = f"patched, adapted: {', '.join(sorted(found.adapted))}; only with --llumlet-adapt"
    count = f"{len(found.series.patches)} patches in {len(found.files)} files"
    verdict = f"vLLM {found.version}: {count} fit without fuzz, series {found.digest}; {how}"
    return "\n".join([verdict, *(f"warning: {one}" for one in kept.differences)] if kept else [verdict])


def _files_table(found: Installed) -> Table:
    table = Table("file", "on disk", title=str(found.root), title_justify="left")
    for path, state in found.files.items():
        style = "red" if state in (FileState.ALTERED, FileState.MISSING) else "green"
        table.add_row(path, Text(state, style))
    return table


def _patches_table(series: Series) -> Table:
    table = Table(title=f"vLLM {series.version}, series {series.digest}", title_justify="left")
    table.add_column("patch", no_wrap=True)
    table.add_column("what")
    table.add_column("process")
    table.add_column("added lines", justify="right")
    for patch in series.patches:
        table.add_row(patch.name, patch.header["Subject"], patch.header["Process"], str(patch.num_added))
    return table


def _as_json(found: Installed, kept: Kept | None) -> dict[str, Any]:
    return {
        "version": found.version,
        "root": None if found.root is None else str(found.root),
        "digest": found.digest if found.problem is None else None,
        "series": found.series.version if found.series is not None else None,
        "files": found.files,
        "on_disk": found.on_disk,
        "differences": [asdict(one) for one in kept.differences] if kept else [],
        "problem": found.problem or (kept and kept.problem),
    }


def _patch_json(patch: Patch) -> dict[str, Any]:
    files = [change.path for change in patch.diffs]
    return {"name": patch.name, **patch.header, "files": files, "added_lines": patch.num_added}


def _console() -> Console:
    """A console that takes no text for markup: foreign words may hold brackets. Wide where no terminal says how wide,
    so that nothing is broken."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False, emoji=False)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


# doctor


def _doctor(args: argparse.Namespace) -> ExitCode:
    if args.flags and args.model is None:
        print("vllm-llumnix doctor: error: flags are for a model: name one with --model", file=sys.stderr)
        return ExitCode.USAGE
    flags = ("--model", args.model, *args.flags) if args.model is not None else ()
    checks = doctor.examine_all(adapt=args.adapt, flags=flags)
    failed = [check for check in checks if check.level is Level.PROBLEM]
    if args.json:
        _print_json({"ok": not failed, "checks": [asdict(check) | {"level": check.level} for check in checks]})
    else:
        table = Table("check", "", "result", "what to do", show_lines=True)
        for check in checks:
            table.add_row(check.name, Text(check.level, _STYLES[check.level]), check.result, check.problem)
        _console().print(table)
        print(_summary(checks))
    return ExitCode.PROBLEM if failed else ExitCode.OK


def _summary(checks: Sequence[Check]) -> str:
    named = {level: ", ".join(each.name for each in checks if each.level is level) for level in Level}
    if problems := named[Level.PROBLEM]:
        return f"--enable-llumlet needs what is said above for: {problems}."
    without = f"; without what is optional: {named[Level.OPTIONAL]}" if named[Level.OPTIONAL] else ""
    return f"Nothing stands against --enable-llumlet{without}."


if __name__ == "__main__":
    raise SystemExit(main())
