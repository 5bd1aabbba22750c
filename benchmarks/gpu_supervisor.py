"""Items of work in another process, which is started again behind an item that crashes or hangs."""

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MARK = "@@"  # begins an event; other lines are what libraries print
KILLED = 20.0  # seconds that a driver may take to clean up behind a process

Event = dict[str, Any]

_one_line = threading.Lock()


def send(**event: Any) -> None:
    """From the child to the supervisor, from any thread: one line of JSON on stdout."""
    with _one_line:
        sys.stdout.write(f"{MARK}{json.dumps(event)}\n")
        sys.stdout.flush()


def supervise(
    command: Sequence[str],
    handle: Callable[[Event], None],
    log: Path,
    *,
    deadline: float,
    patience: float = 60.0,
    restarts: int = 8,
) -> str:
    """Runs the command until it says that it is done, and hands on its events.

    The child sends {"doing", "section", "item", "resume", "patience"} before whatever may go wrong. If it
    then dies, or sends nothing for so many seconds, the item gets a failure and the child starts anew with
    `--skip` and the number in "resume".

    Args:
        log: gets everything else that the child prints.
        deadline: of `time.monotonic`, when it is killed whatever it does.
        patience: seconds until it says the first time what it is doing.
        restarts: after so many the rest is given up.

    Returns:
        How it ended, in words.
    """
    skip = 0
    with log.open("w") as log_file:
        for _ in range(restarts + 1):
            seconds = deadline - time.monotonic()
            arguments = [*command, "--skip", str(skip), "--seconds", f"{seconds:.0f}"]
            doing, end, tail = _watch(arguments, handle, log_file, deadline, patience)
            if end in ("done", "time"):
                return "done" if end == "done" else f"out of time at {_name(doing)}"
            if doing is None:
                return f"did not start: {end}: {' | '.join(tail)}"
            if not doing.get("reported"):
                failure = f"{end} while {doing['doing']}: " + " | ".join(tail)
                handle({"section": doing["section"], "item": doing["item"], "result": {"failure": failure}})
            skip = doing["resume"]
    return f"given up after {restarts} restarts at {_name(doing)}"


def _watch(
    command: Sequence[str], handle: Callable[[Event], None], log: Any, deadline: float, patience: float
) -> tuple[Event | None, str, list[str]]:
    """What the child was doing last, how it ended, and the last lines that it printed."""
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
    reader.start()
    doing, tail = None, collections.deque(maxlen=8)
    try:
        while True:
            try:
                line = lines.get(timeout=max(0.0, min(patience, deadline - time.monotonic())))
            except queue.Empty:
                out_of_time = time.monotonic() >= deadline
                return doing, "time" if out_of_time else f"nothing for {patience:.0f} s", list(tail)
            if line is None:
                return doing, f"exit status {child.wait()}", list(tail)
            printed, mark, text = line.partition(MARK)  # a library may have left its line unfinished
            if printed.strip():
                log.write(printed.strip() + "\n")
                tail.append(printed.strip()[:300])
            if not mark:
                continue
            try:
                event = json.loads(text)
            except ValueError:  # a library wrote into the middle of it
                log.write(text)
                continue
            if event.get("done"):
                return doing, "done", []
            if "doing" in event:
                doing, patience = event, event["patience"]
                tail.clear()
            if "result" in event and doing is not None:
                doing = {**doing, "reported": True}
            handle(event)
    finally:
        _kill(child)
        reader.join(KILLED)
        log.flush()


def _read(stream: Any, lines: "queue.Queue[str | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _kill(child: "subprocess.Popen[str]") -> None:
    """With whatever it has started; a process that waits for a GPU does not listen to less."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILLED)


def _name(doing: Event | None) -> str:
    return "the start" if doing is None else f"{doing['section']}, {doing['item']}"
