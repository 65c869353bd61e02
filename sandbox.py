"""Running model-written Python safely: `run_python(code, stdin, limits) -> Result`.

Code written by a language model under training is hostile code: RL rewards whatever works, and what works may be reading the
grader's files. A Python-level interpreter is no security boundary (smolagents had several escapes), so the kernel does the
isolating, in layers of processes (jail.py):

    trainer --(unix socket, file descriptors only)--> server --fork--> init of one call --fork--> the program
    any threads, secrets                              2 processes      own pid namespace, /tmp        no privilege

* The server is entered once: a fresh interpreter with an empty environment, in namespaces of its own, over a read-only root
  without home, project or network.
* Each call is a fork of it (a quarter of the time of a new process without any isolation), and everything of a call dies
  with its init.
* Code, stdin and output travel in memfds and pipes made here, never through the server: no call can find another's data in the
  memory that it inherits.
* If the trainer dies, even by kill -9, the server reads end-of-file and leaves, and the kernel kills all below it. A dead server
  is restarted.

Where the kernel or the container refuses namespaces to Python, Debian's `bwrap` does the same with an interpreter a call; where
that fails too, `run_python` refuses and says what to change, unless `allow_unsafe()` was called. Left out: cgroups (rarely
writable inside containers; the init counts instead), Landlock, GPUs, macOS.

    python sandbox.py                # which isolation this machine gives, shown on one program; exit code 1 and the remedy if none
"""
import argparse
import atexit
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import jail


@dataclass(frozen=True)
class Limits:
    """What one call may use. The whole call: wall_seconds, memory_mb (resident), processes, file_mb (all of /tmp). Each process:
    cpu_seconds, memory_mb (address space), open_files. Each of stdout and stderr: output_bytes. AFM: cpu 5 s, wall 7 s, 5,000 MB
    (its RLIMIT_AS)."""
    cpu_seconds: float = 5.0
    wall_seconds: float = 7.0
    memory_mb: int = 512
    processes: int = 32
    file_mb: int = 64
    open_files: int = 64
    output_bytes: int = 1_000_000


@dataclass(frozen=True)
class Result:
    """status: ok (exit code 0), error, timeout, memory, refused (no isolation on this machine). exit_code: negative = killed by
    that signal, None = stopped by us."""
    stdout: str
    stderr: str
    status: str
    exit_code: int | None
    seconds: float


JAIL = [sys.executable, "-s", "-X", "utf8", os.path.abspath(jail.__file__)]
SLOTS = 2 * (os.cpu_count() or 1)                        # calls at a time in this process
slots = threading.BoundedSemaphore(SLOTS)
start_lock, find_lock = threading.Lock(), threading.Lock()
state = {"kind": None, "reason": "", "server": None, "connection": None, "pid": 0, "unsafe": False}


def connect() -> socket.socket:
    """The connection to the server, which is started if it does not run. OSError with the kernel's reason when namespaces are not
    to be had."""
    with start_lock:
        if state["pid"] != os.getpid():                   # first call, or this process was forked from one that has a server
            state.update(server=None, connection=None, pid=os.getpid())
            atexit.register(stop_server)
        if state["server"] is not None and state["server"].poll() is None:
            return state["connection"]
        stop_server()
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = start([*JAIL, "--serve", str(other.fileno())], [other.fileno()], stderr=subprocess.PIPE)
        other.close()
        mine.settimeout(30)
        try:
            if mine.recv(64) == b"unshared":
                write_id_maps(process.pid)
                mine.send(b"go")
                if mine.recv(64) == b"ready":
                    state.update(server=process, connection=mine)
                    return mine
            reason = "the server did not start"
        except OSError as error:
            reason = str(error)
        mine.close()
        last_words = process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(last_words or reason)


def write_id_maps(pid: int):
    """Root maps itself and nobody (programs run as nobody); an ordinary user, and root without the right to, only itself."""
    def write(name, text):
        with open(f"/proc/{pid}/{name}", "w") as f:
            f.write(text)
    try:
        for name in ("uid_map", "gid_map"):
            write(name, f"0 0 1\n{jail.PROGRAM_ID} 65534 1")
    except PermissionError:
        write("setgroups", "deny")
        write("uid_map", f"0 {os.geteuid()} 1")
        write("gid_map", f"0 {os.getegid()} 1")


def stop_server():
    """Ends this process's server and with it every call in progress."""
    if state["server"] is None or state["pid"] != os.getpid():
        return
    try:
        state["connection"].shutdown(socket.SHUT_RDWR)    # not only close: a forked child may hold a copy
    except OSError:                                       # the server was dead already
        pass
    state["connection"].close()
    state["server"].wait()
    state["server"].stderr.close()
    state.update(server=None, connection=None)


def launch(kind: str, fds: list, limits: Limits):
    """Starts one call on its five descriptors (control, code, stdin, stdout, stderr); the process to wait for, or None when the
    server owns it."""
    request = json.dumps(asdict(limits))
    if kind == "namespaces":
        try:
            socket.send_fds(connect(), [request.encode()], fds)
        except OSError:                                   # the server died since the last call, or is dying
            time.sleep(0.1)
            socket.send_fds(connect(), [request.encode()], fds)
        return None
    command = (bubblewrap(limits) if kind == "bubblewrap" else []) + [*JAIL, "--call", kind, request, *map(str, fds)]
    return start(command, fds, stderr=subprocess.DEVNULL)


def start(command: list, fds: list, stderr) -> subprocess.Popen:
    """A process that inherits nothing but these descriptors: no environment, no terminal, no folder."""
    return subprocess.Popen(command, env=jail.ENVIRONMENT, pass_fds=fds, cwd="/", start_new_session=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)


def bubblewrap(limits: Limits) -> list:
    """The bwrap command that gives one call the same surroundings. Root's init keeps what it takes to make the program nobody,
    and to kill it."""
    command = ("bwrap --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent --as-pid-1 "
               "--new-session").split()
    keep = [word for name in ("SETUID", "SETGID", "KILL") for word in ("--cap-add", "CAP_" + name)]
    command += ["--cap-drop", "ALL", *keep] if os.geteuid() == 0 else ["--unshare-user"]
    command += ["--size", str(limits.file_mb << 20), "--perms", "1777", "--tmpfs", "/tmp"]         # first: this Python may live below it
    for path in jail.system_paths():
        for parent in reversed(path.split("/")[1:-1] and [path.rsplit("/", n)[0] for n in range(1, path.count("/"))]):
            if parent == "/tmp":
                continue
            command += ["--perms", "0755", "--dir", parent]                # readable for nobody, wherever this Python lives
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    for device in jail.DEVICES:
        command += ["--dev-bind", "/dev/" + device, "/dev/" + device]
    for name, target in jail.DEVICE_LINKS.items():
        command += ["--symlink", target, "/dev/" + name]
    command += ["--proc", "/proc"]
    return command + ["--ro-bind", JAIL[-1], JAIL[-1], "--remount-ro", "/", "--hostname", "sandbox", "--chdir", "/tmp", "--"]


def run_python(code: str, stdin: str = "", limits: Limits = Limits()) -> Result:
    """Runs code as a Python program with stdin in the isolation of this machine, and waits for its end. Never raises for what the
    program does; safe to call from many threads (two calls a core at a time, the others wait their turn, which does not count).
    Bytes of output that are no UTF-8 are replaced."""
    kind = isolation()
    if kind == "none":
        return Result("", remedy(), "refused", None, 0.0)
    with slots:
        started = time.monotonic()
        try:
            report, stdout, stderr, flooded = run_once(kind, code, stdin, limits)
            if report is None and not flooded:            # the server was killed: programs have no effects, so once more
                report, stdout, stderr, flooded = run_once(kind, code, stdin, limits)
        except OSError as error:                          # no process or descriptor to be had
            report, stdout, stderr, flooded = None, "", f"sandbox: {error}\n", False
        seconds = time.monotonic() - started
    exit_code, stopped = (report["exit"], report["stopped"]) if report else (None, "the sandbox was killed")
    if stopped in (None, "caller") and flooded:
        stopped = "output"
    elif stopped == "caller":
        stopped = "timeout"
    status = "ok" if exit_code == 0 else "error"
    if stopped:
        notes = {"timeout": f"longer than {limits.wall_seconds:g} s (CPU {limits.cpu_seconds:g} s)",
                 "memory": f"more than {limits.memory_mb} MB of memory",
                 "processes": f"more than {limits.processes} processes",
                 "output": f"more than {limits.output_bytes} bytes of output"}
        stderr, exit_code = f"{stderr}stopped: {notes.get(stopped, stopped)}\n", None
        status = stopped if stopped in ("timeout", "memory") else "error"
    elif exit_code != 0 and stderr.rstrip().rsplit("\n", 1)[-1].startswith("MemoryError"):
        status = "memory"
    return Result(stdout, stderr, status, exit_code, seconds)


def run_once(kind: str, code: str, stdin: str, limits: Limits):
    """One call: (report of its init or None, stdout, stderr, whether it was stopped for too much output)."""
    with ExitStack() as stack:
        control, theirs = (stack.enter_context(end) for end in socket.socketpair())
        inputs = [stack.enter_context(sealed(text)) for text in (code, stdin)]
        (out, out_end), (err, err_end) = ((stack.enter_context(open(fd, mode, buffering=0)) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
                                          for _ in range(2))
        given = [theirs, *inputs, out_end, err_end]
        process = launch(kind, [end.fileno() for end in given], limits)
        for end in given:
            end.close()
        try:
            return pump(control, out, err, limits)
        finally:
            if process is not None:
                process.kill()                            # it has reported, or is stuck
                process.wait()


def sealed(text: str):
    """A memory file with text that nobody can change any more."""
    file = open(os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0)
    file.write(text.encode("utf-8", "replace"))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    file.seek(0)
    return file


def pump(control: socket.socket, out, err, limits: Limits):
    """Reads until both outputs are closed and the report, which says that no process of the call is left, is there (or will never
    be). The init keeps the time; this side's deadline only catches an init that cannot."""
    out, err, report = out.fileno(), err.fileno(), control.fileno()
    data = {out: bytearray(), err: bytearray(), report: bytearray()}
    watch = select.poll()
    for fd in data:
        watch.register(fd, select.POLLIN)
    deadline, flooded, left = time.monotonic() + limits.wall_seconds + 2.0, False, len(data)
    while left:
        if time.monotonic() > deadline:
            control.shutdown(socket.SHUT_WR)
            if time.monotonic() > deadline + 5.0:
                break
        for fd, _ in watch.poll(1000):
            chunk = os.read(fd, 65536)
            if len(data[fd]) <= limits.output_bytes:
                data[fd] += chunk
            if not chunk or fd == report:
                watch.unregister(fd)
                left -= 1
            elif len(data[fd]) > limits.output_bytes and not flooded:
                flooded = True
                control.shutdown(socket.SHUT_WR)          # the init reads end-of-file and kills the call
    texts = [bytes(data[fd][:limits.output_bytes]).decode("utf-8", "replace") for fd in (out, err)]
    return json.loads(data[report]) if data[report] else None, *texts, flooded


def isolation() -> str:
    """What this machine gives, found by trying, once: "namespaces", "bubblewrap", "unsafe" (after allow_unsafe(), only rlimits)
    or "none"."""
    with find_lock:
        if state["kind"] is None:
            state["kind"] = "none"
            reasons = [] if sys.platform.startswith("linux") else ["not Linux"]
            for kind in ("namespaces", "bubblewrap") if sys.platform.startswith("linux") else ():
                try:                                      # csv: a module that is not loaded yet must be found
                    report, stdout, stderr, _ = run_once(kind, "import csv\nprint(6 * 7)", "", Limits())
                    if report and report["exit"] == 0 and stdout == "42\n":
                        state["kind"] = kind
                        break
                    reasons.append(f"{kind}: {stderr.strip() or report or 'no answer'}")
                except OSError as error:
                    reasons.append(f"{kind}: {error}")
            state["reason"] = "; ".join(reasons)
    return "unsafe" if state["kind"] == "none" and state["unsafe"] else state["kind"]


def allow_unsafe():
    """Permits running programs with nothing but rlimits where this machine gives no isolation. Never weakens isolation that is
    there. Without effect where it is not Linux: not even the limits work."""
    state["unsafe"] = sys.platform.startswith("linux")


def remedy() -> str:
    """Why there is no isolation, and the exact command against it."""
    def setting(path):
        try:
            with open("/proc/sys/" + path) as f:
                return f.read().strip()
        except OSError:
            return None
    if not sys.platform.startswith("linux"):
        fix = "run it on Linux (a virtual machine, or a container)"
    elif setting("user/max_user_namespaces") == "0":
        fix = "sudo sysctl -w user.max_user_namespaces=15000"
    elif setting("kernel/unprivileged_userns_clone") == "0":
        fix = "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    elif setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        fix = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    else:
        fix = ("in Docker start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined; "
               "elsewhere sudo apt-get install bubblewrap")
    or_else = " Or accept the risk: --unsafe-code (UNSAFE_CODE=1 bash speedrun.sh)" if sys.platform.startswith("linux") else ""
    return f"no isolation for model-written code on this machine ({state['reason']}). Remedy: {fix}.{or_else}"


if __name__ == "__main__":
    # ----------------------------------------------------------------------------------------------------------------------------
    # which isolation is in force, shown on one program
    parser = argparse.ArgumentParser(description="Say which isolation this machine gives to model-written code, shown on one program.")
    parser.add_argument("--unsafe-code", action="store_true", help="run it even where there is none")
    if parser.parse_args().unsafe_code:
        allow_unsafe()
    result = run_python("print(sum(range(101)))")
    print(f"isolation: {isolation()}; print(sum(range(101))) -> {result.status} {result.stdout.strip()}{result.stderr} "
          f"in {1000 * result.seconds:.1f} ms")
    stop_server()
    sys.exit(0 if result.status == "ok" else 1)
