# SPDX-License-Identifier: Apache-2.0
"""A cluster of fake components in processes of their own.

    python -m tests.llumsched.up.fakes component NAME PORT JOURNAL [--drain S] [--ignore-term] [--never-ready] [--fail]
    python -m tests.llumsched.up.fakes up JOURNAL PORT,PORT,… [NAME:OPTION …]

A component answers every GET with a list of models, has a child, and notes in the journal, a line each, its start
(with its pids), the SIGTERM and its end. `up` runs the supervisor over a scheduler, a gateway and engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODEL = "fake-model"


def note(journal: Path, *words: object) -> None:
    with journal.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


class Handler(BaseHTTPRequestHandler):
    ready = True

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": MODEL}]}).encode()
        self.send_response(200 if self.ready else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the readiness checks are many."""


def component(name: str, port: str, journal: Path, options: list[str]) -> None:
    drain_s = float(options[options.index("--drain") + 1]) if "--drain" in options else 0.0
    Handler.ready = "--never-ready" not in options
    ended = threading.Event()

    def terminated(*_: object) -> None:
        note(journal, name, "term")
        threading.Timer(drain_s, ended.set).start()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--ignore-term" in options else terminated)
    child = subprocess.Popen(["sleep", "600"])
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    note(journal, name, "start", os.getpid(), child.pid)
    print(f"{name} has something to say", flush=True)
    if "--fail" in options:
        while journal.read_text().count(" start ") < 4:  # who is stopped while it starts may miss the signal
            time.sleep(0.02)
        print("(pid 7) OSError: no-such/model is no model\nRuntimeError: failed. See root cause above.", flush=True)
        os._exit(1)
    ended.wait()
    note(journal, name, "end")
    os._exit(0)


def up(journal: Path, ports: list[str], options: list[str]) -> int:
    from llumsched.up.component import ComponentSpec
    from llumsched.up.fleet import ClusterPlan, Fleet
    from llumsched.up.screen import Screen

    def spec(name: str, port: str) -> ComponentSpec:
        own = [word for option in options if option.startswith(f"{name}:") for word in option.split(":")[1].split()]
        command = (sys.executable, "-m", __spec__.name, "component", name, port, str(journal), *own)
        return ComponentSpec(name, ("/nonexistent",) if "--missing" in own else command, url(port), 20.0)

    def url(port: str) -> str:
        return f"http://127.0.0.1:{port}/"

    names = ["scheduler", "gateway", *(f"engine-{i}" for i in range(len(ports) - 2))]
    scheduler, gateway, *engines = map(spec, names, ports)
    plan = ClusterPlan(scheduler, gateway, tuple(engines), url(ports[1]), MODEL, "all of it is ready", drain_s=600.0)
    screen = Screen(sys.stdout, names, colour=False)

    async def run() -> int:
        return await Fleet(plan, screen).run()

    try:
        return asyncio.run(run())
    finally:
        screen.close()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "component":
        component(arguments[0], arguments[1], Path(arguments[2]), arguments[3:])
    else:
        sys.exit(up(Path(arguments[0]), arguments[1].split(","), arguments[2:]))
