# SPDX-License-Identifier: Apache-2.0
"""Names of instances on a command line: by a llumlet's address, or by the id that the CMS knows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from llumlet.contract.client import LlumletClient
from llumlet.process import kinds
from llumlet.process.addresses import Address
from llumlet.process.credentials import Credentials
from llumlet.process.kinds import Kind
from llumlet.process.setting_sources import Reading
from llumsched.cms.look import CmsUnreachable, look
from llumsched.cms.store import LISTEN, name_of, store_faults
from llumsched.commands.arguments import OPTIONS, Output
from llumsched.console import output
from llumsched.console.fan_out import LlumletAnswer, ask_all, report_failures
from llumsched.contract import SCHEDULER_PORT

CMS_VARIABLE: Final = "LLUMNIX_CMS"
CLUSTER_VARIABLE: Final = "LLUMNIX_CLUSTER"

T = TypeVar("T")
INSTANCE: Final = "INSTANCE"
"""Name of the positional argument, used in place of a flag."""

Place = Address | str
"""An instance's address, or its id."""


def _scheduler(text: str) -> Address:
    """HOST, or HOST:PORT. Raises ValueError."""
    is_host = ":" not in text.rpartition("]")[2] if text.startswith("[") else text.count(":") != 1
    host = text.removeprefix("[").removesuffix("]") if is_host else ""
    if is_host and not re.fullmatch(r"[\w.:-]+", host):
        raise ValueError(f"{text!r} is neither HOST nor HOST:PORT")
    return Address(host, SCHEDULER_PORT) if is_host else Address.parse(text)


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """The scheduler's address, from which the cluster's other addresses follow."""

    cluster: Address = OPTIONS.setting(
        Address("127.0.0.1", SCHEDULER_PORT),
        Kind(_scheduler, "HOST[:PORT]"),
        "host and HTTP port of the cluster's scheduler; the CMS is expected at the next port unless --cms names one",
        variable=CLUSTER_VARIABLE,
        common=True,
    )


@dataclass(frozen=True, slots=True)
class Cms:
    cms: str = OPTIONS.setting(
        "",
        kinds.text("HOST:PORT|redis://…"),
        "CMS that knows the instances by id: a scheduler's, or a Redis",
        variable=CMS_VARIABLE,
        common=True,
    )


@dataclass(frozen=True, slots=True)
class Named:
    instances: tuple[str, ...] = OPTIONS.setting(
        (),
        Kind(tuple, INSTANCE, {"nargs": "*"}, repeated=True),
        "instances to ask, by id or HOST:PORT; without any, all of the cluster",
        flag="instances",
    )
    llumlet: tuple[str, ...] = OPTIONS.setting(
        (),
        Kind(tuple, "HOST:PORT[,HOST:PORT…]", repeated=True),
        "addresses of llumlets to ask, which engines log at start (repeatable)",
    )


def cms_of(reading: Reading) -> str:
    """The URL of `--cms`, or ""."""
    url = reading.make(Cms).cms
    if url.startswith(LISTEN):
        reading.faults.append("--cms: a command does not listen; name the CMS as HOST:PORT or redis://HOST:PORT")
    elif url:
        reading.faults += [f"--cms {fault}" for fault in store_faults(url)]
    return url


def cluster_of(reading: Reading) -> tuple[str, Address | None]:
    """The URL of the CMS, and the scheduler's address; None if only a CMS was named.

    The command line overrides variables, also across the two settings.
    """
    said, scheduler, cms = reading.given, reading.make(ClusterAddress).cluster, cms_of(reading)
    is_later = said.get("--cluster") == "--cluster" and said.get("--cms") != "--cms"
    if not cms or is_later:
        return str(Address(scheduler.host, scheduler.port + 1)), scheduler
    return cms, scheduler if "--cluster" in said else None


@dataclass(frozen=True, slots=True)
class Places:
    """Distinct instances; empty means all that the CMS knows. `cms` is its URL."""

    places: Sequence[Place]
    cms: str

    async def ask(
        self, question: Callable[[LlumletClient], Awaitable[T]], credentials: Credentials
    ) -> list[LlumletAnswer[T]]:
        """Asks all instances. The answer has no address if the CMS does not know it."""
        try:
            addresses = await self.resolve(credentials)
        except CmsUnreachable as failure:
            return [LlumletAnswer(None, None, failure)]
        return await ask_all(addresses, question, credentials)

    async def resolve(self, credentials: Credentials) -> list[Address]:
        """The addresses of their llumlets, in order. Raises CmsUnreachable if the CMS cannot be asked or does not know
        an id."""
        if self.places and all(isinstance(each, Address) for each in self.places):
            return [each for each in self.places if isinstance(each, Address)]
        async with look(self.cms, credentials) as view:
            if not self.places:
                return [view[instance_id].llumlet for instance_id in sorted(view)]
            unknown = [each for each in self.places if isinstance(each, str) and each not in view]
            if unknown:
                known = ", ".join(sorted(view)) or "none"
                detail = f"it knows no instance {', '.join(unknown)} (known: {known})"
                raise CmsUnreachable(name_of(self.cms), detail)
            return [view[each].llumlet if isinstance(each, str) else each for each in self.places]


def named(reading: Reading) -> Places:
    given, (cms, _) = reading.make(Named), cluster_of(reading)
    texts = [(INSTANCE, text) for text in given.instances]
    texts += [("--llumlet", text) for text in words(given.llumlet)]
    return places(reading, texts, cms)


def places(reading: Reading, texts: Iterable[tuple[str, str]], cms: str) -> Places:
    """The places named by `texts`: a flag, and an address or id; `--llumlet` takes addresses only."""
    found: dict[Place, None] = {}
    for flag, text in texts:
        try:
            found[Address.parse(text)] = None
        except ValueError as error:
            if text and ":" not in text and flag != "--llumlet":
                found[text] = None
            else:
                reading.faults.append(f"{flag} {error}")
    return Places(tuple(found), cms)


def words(arguments: Iterable[str]) -> list[str]:
    """The values of a repeatable argument with commas."""
    return [text for argument in arguments for text in argument.split(",")]


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A command that asks instances one question, and shows their answers as a table or as one JSON object each."""

    DESCRIPTION: str
    ask: Callable[[LlumletClient], Awaitable[T]]
    document: Callable[[T | None], dict[str, object]]
    """The JSON of an answer; None: there is none."""
    columns: Sequence[str]
    rows: Callable[[str, T], Iterable[Sequence[str]]]
    """Rows of the table for the answer of the llumlet at an address."""
    nothing: str = ""
    """Text to print if no answer has a row."""
    SETTINGS: tuple[type, ...] = (Named, ClusterAddress, Cms, Output)

    def prepare(self, reading: Reading) -> tuple[Places, bool]:
        return named(reading), reading.make(Output).json

    def run(self, prepared: tuple[Places, bool], credentials: Credentials) -> int:
        places, as_json = prepared
        answers = asyncio.run(places.ask(self.ask, credentials))
        if as_json:
            for answer in answers:
                document = {"address": answer.where, "error": answer.error_dict()}
                output.print_json(document | self.document(answer.value))
        else:
            self._print_table(answers)
        return report_failures(answers, quiet=as_json)

    def _print_table(self, answers: Iterable[LlumletAnswer[T]]) -> None:
        answered = [(answer.where, answer.value) for answer in answers if answer.value is not None]
        table = output.table(self.columns)
        for where, value in answered:
            for row in self.rows(where, value):
                table.add_row(*map(output.clean, row))
        if table.row_count:
            output.console().print(table)
        elif answered and self.nothing:
            output.console().print(self.nothing)
