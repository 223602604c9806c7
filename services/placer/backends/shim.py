"""The parent of one command of the process backend: a program of its own, which outlives the placer that started it.

``python -I -S shim.py FOLDER LOCK_FD`` with the report pipe as standard output. It imports nothing of ours and little
of the standard library, so that a start costs milliseconds; what it is to do stands in FOLDER/start.json, written by
the process backend. It keeps the inherited lock for its life, hands signals on to the command's process group, keeps
the logs short, kills what the command leaves behind and writes FOLDER/exit.json last.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

Plan = dict[str, Any]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LOGS = ("stdout.log", "stderr.log")
LOG_CHECK_S = 1.0


class StartError(Exception):
    """The command could not be executed; the text says why."""


def main(folder: str, lock: int) -> None:
    """Start the command, report, and stay until it and all that it started has ended."""
    if os.fork():  # the placer reaps the first process at once; init reaps us, whoever lives then
        os._exit(0)
    os.set_inheritable(lock, False)  # ours for life, and not the command's  # noqa: FBT003
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *HANDED_ON})
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    plan = _read("start.json")
    try:
        command = _start(plan)
    except StartError as error:
        _report({"error": str(error)})
        return
    started = {"pid": command, "ticks": _ticks(command), "shim": os.getpid(), "shim_ticks": _ticks(os.getpid())}
    _write("started.json", {**started, "boot_id": _boot_id(), "at_us": time.time_ns() // 1000})
    _report(started)
    status = _supervise(command, plan["log_bytes"])
    _end_the_rest()
    _remove_groups(plan["groups"])
    _write("exit.json", {**_meaning(status), "at_us": time.time_ns() // 1000})


def _start(plan: Plan) -> int:
    """The process id of the command, once it was executed."""
    read_end, write_end = os.pipe()  # both are closed by a successful exec
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(plan, parent, write_end)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as pipe:
        error = pipe.read()
    if error:
        os.waitpid(pid, 0)
        raise StartError(error)
    return pid


def _become(plan: Plan, parent: int, report: int) -> NoReturn:
    """Turn this new process into the command, or say why not."""
    step = "start"
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a shim killed by force takes its command along
        if os.getppid() != parent:
            os._exit(127)
        _redirect()
        step = "join its control groups"
        _join_groups(plan["groups"])
        step = f"pin it to cores {plan['cores']}"
        if plan["cores"]:
            os.sched_setaffinity(0, plan["cores"])
        step = f"enter its working directory {plan['cwd']}"
        os.chdir(plan["cwd"])
        step = "execute it"
        _reset_signals()
        os.execvpe(plan["command"][0], plan["command"], plan["env"])  # noqa: S606 -- no shell is wanted
    except BaseException as error:  # noqa: BLE001 -- the only way out of a forked process is the report
        os.write(report, _why(error, step, plan["command"][0])[:500].encode("utf-8", "backslashreplace"))
        os._exit(127)


def _why(error: BaseException, step: str, command: str) -> str:
    if step == "execute it" and isinstance(error, FileNotFoundError):
        return f"command not found: {command}"
    if step == "execute it" and isinstance(error, PermissionError):
        return f"command not executable: {command}"
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"cannot {step}: {reason}"


def _redirect() -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(LOGS, start=1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)


def _reset_signals() -> None:
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _supervise(command: int, log_bytes: int) -> int:
    """The command's wait status, once it has ended."""
    while True:
        got = signal.sigtimedwait({signal.SIGCHLD, *HANDED_ON}, LOG_CHECK_S)
        if got is None:
            _trim_logs(log_bytes)
        elif got.si_signo != signal.SIGCHLD:
            with suppress(ProcessLookupError):
                os.killpg(command, got.si_signo)
        elif (status := _reap(command)) is not None:
            _trim_logs(log_bytes)
            return status


def _reap(command: int) -> int | None:
    """Reap all that have ended; the command's status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == command:
                found = status
    return found


def _end_the_rest() -> None:
    """Kill and reap what the command left running: as their reaper we are the parent of every orphan."""
    with suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                for child in _children():
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and int(_stat(int(name))[1]) == os.getpid():
                found.append(int(name))
    return found


def _trim_logs(log_bytes: int) -> None:
    """Keep the tail of a log that grew too long beside it, and let the log begin again.

    The command writes to the file itself: a pipe through this process would block it while this one is not scheduled.
    """
    for name in LOGS:
        with suppress(OSError):  # a full disk must not end the command
            if os.stat(name).st_size > log_bytes:
                with open(name, "rb") as log, open(f"{name}.1", "wb") as former:
                    log.seek(-(log_bytes // 2), os.SEEK_END)
                    former.write(log.read(log_bytes // 2))
                os.truncate(name, 0)


def _join_groups(groups: list[str]) -> None:
    for group in groups:
        with open(f"{group}/cgroup.procs", "w", encoding="ascii") as members:
            members.write("0")


def _remove_groups(groups: list[str]) -> None:
    for group in groups:
        with suppress(OSError):  # what cannot be removed now is removed with the folder
            os.rmdir(group)


def _meaning(status: int) -> dict[str, int | None]:
    """Exit code and signal of a wait status; a signal's code is 128 + its number, as shells and engines have it."""
    code = os.waitstatus_to_exitcode(status)
    return {"exit_code": code, "signal": None} if code >= 0 else {"exit_code": 128 - code, "signal": -code}


def _report(content: dict[str, Any]) -> None:
    """Tell the placer, if it still lives, and let go of its pipe."""
    with suppress(OSError):
        os.write(1, json.dumps(content).encode() + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _read(name: str) -> Plan:
    with open(name, "rb") as file:
        content: Plan = json.load(file)
    return content


def _write(name: str, content: dict[str, Any]) -> None:
    """Whole or not at all: readers see no half-written file."""
    with open(f"{name}.new", "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(f"{name}.new", name)


def _stat(pid: int) -> list[bytes]:
    """/proc/PID/stat from its third field on: state, parent, …; the second may contain anything."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: with its id, its identity."""
    return int(_stat(pid)[19])


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
