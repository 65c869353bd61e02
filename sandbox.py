"""Running model-written Python safely: `run_python(code, stdin, limits) -> Result`.

Code written by a language model under training is hostile code: RL rewards whatever works, and what works may be reading the grader's files. A
Python-level interpreter is no security boundary (smolagents had several escapes), so the kernel does the isolating, in three layers of processes:

    trainer --(unix socket, file descriptors only)--> server --fork--> init of one call --fork--> the program
    any threads, secrets                              2 processes      own pid + mount namespace   no privilege at all

* The server is entered once: a fresh interpreter with an empty environment in its own user, pid, network, mount, ipc, uts and cgroup namespace, whose
  root is a new read-only tree with the system and this Python and nothing else: no home, no project, no /etc/passwd, no network device.
* Each call is a fork of it (about 3 ms, against 25 ms for a new interpreter): an init with its own pid namespace, /proc and tmpfs on /tmp, which watches the
  wall clock, memory and process count of the whole call and kills everything in it with one signal; and the program, under another user id in a
  user namespace of its own (which counts processes per call), without capabilities, with rlimits, no-new-privileges and a seccomp filter (no sockets,
  mounts, namespaces, tracing, keyrings, io_uring, shared memory outside the limits).
* Code, stdin and output travel in memfds and pipes made by the caller, never through the server: calls cannot see each other's data in its memory.
* If the trainer dies, even by kill -9, the server reads end-of-file and leaves; the death of a namespace's init kills all below it. A dead server is restarted.

Where the kernel or the container refuses namespaces, Debian's `bwrap` does the same with an interpreter a call; where that fails too, `run_python` refuses, and
says what to change, unless `allow_unsafe()` was called. Left out: cgroups (rarely writable inside containers; the init counts instead), GPUs, Landlock, macOS.

    python sandbox.py                # which isolation this machine gives, one program as a test; exit code 1 and the remedy if none
"""
import atexit
import ctypes
import errno
import functools
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """What one call may use. The whole call: wall_seconds, memory_mb (resident), processes, file_mb (all of /tmp). Each process: cpu_seconds, memory_mb
    (address space), open_files. Each of stdout and stderr: output_bytes. AFM: cpu 5 s, wall 7 s, 5,000 MB (its RLIMIT_AS)."""
    cpu_seconds: float = 5.0
    wall_seconds: float = 7.0
    memory_mb: int = 512
    processes: int = 32
    file_mb: int = 64
    open_files: int = 64
    output_bytes: int = 1_000_000


@dataclass(frozen=True)
class Result:
    """status: ok (exit code 0), error, timeout, memory, refused (no isolation on this machine). exit_code: negative = killed by that signal, None = stopped by us."""
    stdout: str
    stderr: str
    status: str
    exit_code: int | None
    seconds: float


# ---------------------------------------------------------------------------------------------------------------------------------------------
# The kernel's interface. Python 3.11 has no os.unshare, so libc is called directly.

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SYS_MOUNT_SETATTR = 442                                   # the same on every architecture; Linux 5.12
TICK = 25                                                 # milliseconds between two looks at a running call's memory and processes
PROGRAM_ID = 1                                            # user id of programs in the server's user namespace, where root could map a second one
libc = ctypes.CDLL(None, use_errno=True)


def kernel(name: str, *arguments) -> int:
    """Calls a libc function; raises OSError naming it when it returns -1."""
    result = getattr(libc, name)(*[a.encode() if isinstance(a, str) else ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments])
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


# Forbidden system calls: name -> (x86-64, aarch64) number, None where the architecture lacks it. Since 424 numbers are common to all.
FORBIDDEN = {
    "socket": (41, 198), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "personality": (135, 92),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "vhangup": (153, 58), "mbind": (237, 235), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "lookup_dcookie": (212, 18), "landlock_create_ruleset": (444, 444), "sethostname": (170, 161), "setdomainname": (171, 162),
}
LAST_KNOWN_CALL = 462                                     # newer calls than this file knows are answered "no such call"


@functools.cache
def seccomp_filter() -> bytes:
    """The filter's machine code: what FORBIDDEN names, new namespaces by clone, and anonymous shared memory (which no limit would count) fail with EPERM."""
    machine = os.uname().machine
    column, arch, clone, mmap = {"x86_64": (0, 0xC000003E, 56, 9), "aarch64": (1, 0xC00000B7, 220, 222)}[machine]
    load, equal, at_least, any_bit, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    kill, refuse, unknown, allow = 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
    numbers = [pair[column] for pair in FORBIDDEN.values() if pair[column] is not None]
    # (operation, jump if true, jump if false, value); jumps skip that many of the following lines; the number is at 0, the architecture at 4, argument n at 16 + 8n
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0),
               (equal, 0, 1, 435), (give, 0, 0, unknown),                             # clone3 hides its flags in memory: libc then uses clone
               (at_least, 0, 1, LAST_KNOWN_CALL + 1), (give, 0, 0, unknown)]          # x32 calls of x86-64 carry bit 30: here too
    for number in numbers:
        program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 6, NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x80), (give, 0, 0, refuse),
                (equal, 0, 4, mmap), (load, 0, 0, 16 + 24), (mask, 0, 0, 0x21), (equal, 0, 1, 0x21), (give, 0, 0, refuse), (give, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def forbid_system_calls():
    """Loads the filter into this process, for ever and for all its children."""
    code = ctypes.create_string_buffer(seccomp_filter())
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(seccomp_filter()) // 8, ctypes.addressof(code)))
    kernel("prctl", PR_SET_SECCOMP, 2, ctypes.addressof(header), 0, 0)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# The program's side: the last process of the chain, which gives everything up and then runs the code.

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "MPLBACKEND": "Agg"}


def give_up_privileges(limits: Limits, kind: str):
    """After this the process has no capability, cannot gain one, and is bound by limits."""
    if kind != "unsafe" and os.geteuid() == 0 and can_become(PROGRAM_ID if kind == "namespaces" else 65534):
        identity = PROGRAM_ID if kind == "namespaces" else 65534
        os.setgroups([])
        os.setresgid(identity, identity, identity)
        os.setresuid(identity, identity, identity)
    if kind == "namespaces":
        kernel("unshare", NEWUSER)                        # RLIMIT_NPROC counts per user and user namespace: so per call
    megabyte = 1 << 20
    cpu = max(1, round(limits.cpu_seconds + 0.499))
    for name, value in [("AS", limits.memory_mb * megabyte), ("CPU", cpu), ("FSIZE", limits.file_mb * megabyte), ("NOFILE", limits.open_files),
                        ("NPROC", limits.processes), ("CORE", 1), ("MEMLOCK", 0), ("MSGQUEUE", 0)]:    # CORE 1, not 0: also stops a core_pattern pipe
        if name == "NPROC" and kind == "unsafe":
            continue                                      # would count every process of this user
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value + (name == "CPU")))
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if kind != "unsafe":
        kernel("capset", ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0)), ctypes.create_string_buffer(24))
        forbid_system_calls()


@functools.cache
def can_become(identity: int) -> bool:
    """Whether this user namespace has a second user id, for programs."""
    with open("/proc/self/uid_map") as f:
        return any(int(first) <= identity < int(first) + int(count) for first, _, count in (line.split() for line in f))


def run_program(code: bytes, folder: str) -> int:
    """Executes code as `__main__` in this process, as `python code.py` would; the exit code."""
    import traceback
    import types
    path = folder + "/code.py"
    with open(path, "wb") as f:
        f.write(code)                                     # tracebacks then show the line
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"], sys.argv, sys.path[0:0] = main, [path], [folder]
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, encoding="utf-8", errors="replace", closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    sys.stderr.reconfigure(line_buffering=True)
    exit_code = 0
    try:
        exec(compile(code, path, "exec"), main.__dict__)
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException as error:                        # the program's own failure, shown as Python shows it
        exit_code = 1
        traceback.print_exception(type(error), error, error.__traceback__.tb_next)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return exit_code & 255


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as f:
        return f.read()


# ---------------------------------------------------------------------------------------------------------------------------------------------
# The init of one call: pid 1 of its namespace, so that nothing of the call outlives it.

def call_init(control: int, files: tuple, limits: Limits, kind: str):
    """Forks the program, watches it, reports {"exit", "stopped"} as JSON on control, and leaves nothing alive. files: code, stdin, stdout, stderr. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder = "/tmp"
    if kind == "namespaces":
        kernel("unshare", NEWNS)
        kernel("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={limits.file_mb}m,nr_inodes=4096,mode=1777")
        kernel("mount", "proc", "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    elif kind == "unsafe":
        import tempfile
        folder = tempfile.mkdtemp(prefix="unsafe-code-")
        kernel("prctl", 36, 1, 0, 0, 0)                   # PR_SET_CHILD_SUBREAPER: orphans come to us, and can be killed
    started, program = time.monotonic(), os.fork()
    if program == 0:
        os.setsid()
        code, stdin, stdout, stderr = files
        source = read_all(code)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        os.closerange(3, 256)
        os.chdir(folder)
        give_up_privileges(limits, kind)
        os._exit(run_program(source, folder))
    for fd in files:
        os.close(fd)
    watch = select.poll()
    watch.register(control, select.POLLIN)
    watch.register(os.pidfd_open(program), select.POLLIN)
    stopped, status, cpu = None, None, 0.0
    while status is None and stopped is None:
        ready = [fd for fd, _ in watch.poll(TICK)]
        if control in ready:
            stopped = "caller"
        elif time.monotonic() - started > limits.wall_seconds:
            stopped = "timeout"
        elif not ready:
            stopped = over_limits(limits)
        status, cpu = reap(program, status, cpu, os.WNOHANG)
    kill_all(program, kind)
    status, cpu = reap(program, status, cpu, 0)
    if kind == "unsafe":
        import shutil
        shutil.rmtree(folder, ignore_errors=True)
    exit_code = os.waitstatus_to_exitcode(status)
    if stopped is None and (exit_code == -signal.SIGXCPU or exit_code == -signal.SIGKILL and cpu > limits.cpu_seconds):
        stopped = "timeout"                               # the kernel's own stop; SIGKILL only for programs that ignore SIGXCPU
    os.write(control, json.dumps({"exit": exit_code, "stopped": stopped}).encode())
    os._exit(0)


def reap(program: int, status, cpu: float, options: int):
    """Collects dead children (orphans come to pid 1): those dead now (WNOHANG), or all (0). The program's wait status and CPU seconds once it is among them."""
    while True:
        try:
            pid, code, usage = os.wait4(-1, options)
        except ChildProcessError:
            return status, cpu
        if pid == 0:
            return status, cpu
        if pid == program:
            status, cpu = code, usage.ru_utime + usage.ru_stime


def over_limits(limits: Limits):
    """Which limit of the whole call is broken now: "memory", "processes" or None. Reads this namespace's /proc: every process there but pid 1 is the call's."""
    if os.getpid() != 1:
        return None
    pages = count = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as f:
                    pages += int(f.read().split()[1])
                count += 1
            except OSError:                               # it ended meanwhile
                continue
    if count > limits.processes:
        return "processes"
    return "memory" if pages * resource.getpagesize() > limits.memory_mb << 20 else None


def kill_all(program: int, kind: str):
    """Kills what is left of the call. As pid 1 one signal reaches everything in the namespace at once, and forks in progress fail; "unsafe" does what it can."""
    try:
        os.kill(-1, signal.SIGKILL) if kind != "unsafe" else os.killpg(program, signal.SIGKILL)
    except ProcessLookupError:
        pass


# ---------------------------------------------------------------------------------------------------------------------------------------------
# The server: entered once, forks an init per request.

def serve(connection: socket.socket):
    """The long-lived helper. Enters the namespaces, builds the read-only root, then forks one init per message (limits as JSON + control and 4 files). Ends at
    end-of-file, which is also what it reads when the caller is killed."""
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")                                   # out of memory: the kernel takes programs first
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    kernel("unshare", NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)
    connection.send(b"unshared")
    connection.recv(64)                                   # the caller has written our user id map: only it may map a second id
    server = os.fork()
    if server:
        connection.close()
        os.waitpid(server, 0)                             # dies with the server, and the server with it (below)
        return
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    here = os.open("/proc/self/ns/pid", os.O_RDONLY)
    build_root()
    socket.sethostname("sandbox")
    for name in "atexit bisect collections datetime decimal fractions functools heapq itertools math random re statistics string traceback types typing".split():
        __import__(name)                                  # what programs import most: already there
    seccomp_filter(), can_become(PROGRAM_ID)
    gc.freeze()                                           # forks then share these pages for longer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)         # inits are reaped by the kernel
    connection.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 4096, 5)
        if not message:
            os._exit(0)                                   # as pid 1: ends every call below
        kernel("unshare", NEWPID)                         # the next child is pid 1 of a new namespace
        if os.fork() == 0:
            connection.close()
            os.close(here)
            call_init(fds[0], tuple(fds[1:]), Limits(**json.loads(message)), "namespaces")
        kernel("setns", here, NEWPID)                     # without this, unshare works only once
        for fd in fds:
            os.close(fd)


DEVICES = ("null", "full", "random", "urandom")          # no /dev/zero: shared mappings of it escape the memory limits
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "shm": "/tmp"}


def system_paths() -> list:
    """What programs may read: the system, this Python, its virtual environment."""
    wanted = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"]
    homes = [p for p in dict.fromkeys([sys.base_prefix, sys.prefix]) if not (p + "/").startswith("/usr/")]
    return wanted + [f"{home}/{part}" for home in homes for part in ("bin", "lib", "lib64", "share", "pyvenv.cfg")]


def build_root():
    """A new root on a tmpfs with read-only bind mounts, then the old one is detached: nothing else is reachable by any path."""
    kernel("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    kernel("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    kernel("pivot_root", "/tmp", "/tmp/old")
    os.chdir("/")
    for path in system_paths():
        if os.path.islink("/old" + path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink("/old" + path), path)
        elif os.path.exists("/old" + path):
            bind("/old" + path, path)
    for device in DEVICES:
        bind("/old/dev/" + device, "/dev/" + device, device=True)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, "/dev/" + name)
    os.mkdir("/proc")
    os.mkdir("/tmp")
    kernel("mount", "/old/proc", "/proc", None, MS_BIND | MS_REC, None)    # a new /proc may be mounted only where a whole one is visible
    kernel("umount2", "/old", 2)                          # 2: MNT_DETACH
    os.rmdir("/old")
    lock("/", 0)


def bind(source: str, target: str, device: bool = False):
    """Mounts source at target, read-only with everything below it."""
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        open(target, "w").close()
    kernel("mount", source, target, None, MS_BIND | MS_REC, None)
    lock(target, 0x8000, device)                          # AT_RECURSIVE


def lock(path: str, flags: int, device: bool = False):
    """mount_setattr: read-only, no setuid, no devices."""
    attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", 1 | 2 | (0 if device else 4), 0, 0, 0))
    kernel("syscall", SYS_MOUNT_SETATTR, ctypes.c_long(-100), path, flags, attributes, 32)


# ---------------------------------------------------------------------------------------------------------------------------------------------
# The caller's side.

SLOTS = 2 * (os.cpu_count() or 1)                        # calls at a time in this process
slots = threading.BoundedSemaphore(SLOTS)
start_lock = threading.Lock()
state = {"kind": None, "reason": "", "server": None, "connection": None, "pid": 0, "unsafe": False}


def connect() -> socket.socket:
    """The connection to the server, which is started if it does not run. OSError with the kernel's reason when namespaces are not to be had."""
    with start_lock:
        if state["pid"] != os.getpid():                   # first call, or this process was forked from one that has a server
            state.update(server=None, connection=None, pid=os.getpid())
            atexit.register(stop_server)
        if state["server"] is not None and state["server"].poll() is None:
            return state["connection"]
        stop_server()
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(ENVIRONMENT, **{k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"})
        process = subprocess.Popen([sys.executable, "-s", "-X", "utf8", os.path.abspath(__file__), "--serve", str(other.fileno())], stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", env=environment, pass_fds=[other.fileno()], start_new_session=True)
        other.close()
        try:
            if mine.recv(64) == b"unshared":
                write_id_maps(process.pid)
                mine.send(b"go")
                if mine.recv(64) == b"ready":
                    state.update(server=process, connection=mine)
                    return mine
        except OSError:
            pass                                          # the server is gone: its last words say why
        mine.close()
        raise OSError(process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2] or "the server did not start")


def write_id_maps(pid: int):
    """Root maps itself and nobody (programs run as nobody), an ordinary user only itself."""
    single = os.geteuid() != 0
    for name, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        if single and name == "gid":
            with open(f"/proc/{pid}/setgroups", "w") as f:
                f.write("deny")
        with open(f"/proc/{pid}/{name}_map", "w") as f:
            f.write(f"0 {own} 1" if single else f"0 {own} 1\n{PROGRAM_ID} 65534 1")


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
    """Starts one call on its five descriptors (control, code, stdin, stdout, stderr); the process to wait for, or None when the server owns it."""
    request = json.dumps(asdict(limits))
    if kind == "namespaces":
        try:
            socket.send_fds(connect(), [request.encode()], fds)
        except OSError:                                   # the server died since the last call, or is dying
            time.sleep(0.1)
            socket.send_fds(connect(), [request.encode()], fds)
        return None
    own = [sys.executable, "-s", "-X", "utf8", os.path.abspath(__file__), "--call", kind, request, *map(str, fds)]
    wrapper = bubblewrap(limits) if kind == "bubblewrap" else []
    return subprocess.Popen(wrapper + own, env=ENVIRONMENT, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            cwd="/", start_new_session=True)


def bubblewrap(limits: Limits) -> list:
    """The bwrap command that gives one call the same surroundings. Root's init keeps what it takes to make the program nobody, and to kill it."""
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--new-session"]
    keep = [word for name in ("SETUID", "SETGID", "KILL") for word in ("--cap-add", "CAP_" + name)]
    command += ["--cap-drop", "ALL", *keep] if os.geteuid() == 0 else ["--unshare-user"]
    for path in system_paths():
        for parent in reversed(path.split("/")[1:-1] and [path.rsplit("/", n)[0] for n in range(1, path.count("/"))]):
            command += ["--perms", "0755", "--dir", parent]                # readable for nobody, wherever this Python lives
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            command += ["--ro-bind", path, path]
    own = os.path.abspath(__file__)
    for device in DEVICES:
        command += ["--dev-bind", "/dev/" + device, "/dev/" + device]
    for name, target in DEVICE_LINKS.items():
        command += ["--symlink", target, "/dev/" + name]
    return command + ["--proc", "/proc", "--size", str(limits.file_mb << 20), "--perms", "1777", "--tmpfs", "/tmp", "--ro-bind", own, own,
                      "--remount-ro", "/", "--hostname", "sandbox", "--chdir", "/tmp", "--"]


def run_python(code: str, stdin: str = "", limits: Limits = Limits()) -> Result:
    """Runs code as a Python program with stdin in the isolation of this machine, and waits for its end. Never raises for what the program does; safe to call from
    many threads (two calls a core at a time, the others wait their turn, which does not count). Bytes of output that are no UTF-8 are replaced."""
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
    exit_code, stopped = (report["exit"], report["stopped"]) if report else (None, "lost")
    notes = {"timeout": f"stopped: longer than {limits.wall_seconds:g} s (CPU {limits.cpu_seconds:g} s)", "memory": f"stopped: more than {limits.memory_mb} MB of memory",
             "processes": f"stopped: more than {limits.processes} processes", "lost": "stopped: the sandbox was killed",
             "caller": f"stopped: more than {limits.output_bytes} bytes of output" if flooded else f"stopped: longer than {limits.wall_seconds:g} s"}
    status = "ok" if exit_code == 0 else "error"
    if stopped:
        status = stopped if stopped in ("timeout", "memory") else "timeout" if stopped == "caller" and not flooded else "error"
        stderr, exit_code = stderr + notes[stopped] + "\n", None
    elif exit_code != 0 and stderr.rstrip().rsplit("\n", 1)[-1].startswith("MemoryError"):
        status = "memory"
    return Result(stdout, stderr, status, exit_code, seconds)


def run_once(kind: str, code: str, stdin: str, limits: Limits):
    """One call: (report of its init or None, stdout, stderr, whether it was stopped for too much output)."""
    inputs = [sealed(code), sealed(stdin)]
    control, theirs = socket.socketpair()
    (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe()
    process = None
    try:
        process = launch(kind, [theirs.fileno(), *inputs, out_write, err_write], limits)
    finally:
        theirs.close()
        for fd in (*inputs, out_write, err_write):
            os.close(fd)
        if sys.exc_info()[0] is not None:
            control.close()
            os.close(out_read)
            os.close(err_read)
    try:
        return pump(control, out_read, err_read, limits)
    finally:
        control.close()
        os.close(out_read)
        os.close(err_read)
        if process is not None:
            process.kill()                                # it has reported, or is stuck
            process.wait()


def sealed(text: str) -> int:
    """A memfd with text that nobody can change any more."""
    import fcntl
    data = text.encode("utf-8", "replace")
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as f:
        f.write(data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def pump(control: socket.socket, out: int, err: int, limits: Limits):
    """Reads until both outputs are closed and the report, which says that no process of the call is left, is there (or will never be). The init keeps the time;
    this side's deadline only catches an init that cannot."""
    data = {out: bytearray(), err: bytearray(), control.fileno(): bytearray()}
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
            if fd == control.fileno():
                data[fd] += chunk
            if not chunk or fd == control.fileno():
                watch.unregister(fd)
                left -= 1
            elif len(data[fd]) < limits.output_bytes:
                data[fd] += chunk
            elif not flooded:
                flooded = True
                control.shutdown(socket.SHUT_WR)          # the init reads end-of-file and kills the call
    texts = [bytes(data[fd][:limits.output_bytes]).decode("utf-8", "replace") for fd in (out, err)]
    report = json.loads(data[control.fileno()]) if data[control.fileno()] else None
    return report, *texts, flooded


def isolation() -> str:
    """What this machine gives, found by trying, once: "namespaces", "bubblewrap", "unsafe" (after allow_unsafe(), only rlimits) or "none"."""
    with find_lock:
        if state["kind"] is None:
            state["kind"] = "none"
            reasons = []
            for kind in ("namespaces", "bubblewrap"):
                try:
                    report, stdout, stderr, _ = run_once(kind, "print(6 * 7)", "", Limits())
                    if report and report["exit"] == 0 and stdout == "42\n":
                        state["kind"] = kind
                        break
                    reasons.append(f"{kind}: {stderr.strip() or report or 'no answer'}")
                except OSError as error:
                    reasons.append(f"{kind}: {error}")
            state["reason"] = "; ".join(reasons)
    return "unsafe" if state["kind"] == "none" and state["unsafe"] else state["kind"]


find_lock = threading.Lock()


def allow_unsafe():
    """Permits running programs with nothing but rlimits where this machine gives no isolation. Never weakens isolation that is there."""
    state["unsafe"] = True


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
        fix = "in Docker start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --cap-add SYS_ADMIN; else sudo apt-get install bubblewrap"
    return f"no isolation for model-written code on this machine ({state['reason']}). Remedy: {fix}. Or accept the risk: --unsafe-code (UNSAFE_CODE=1 bash speedrun.sh)"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(socket.socket(fileno=int(sys.argv[2])))
    elif sys.argv[1:2] == ["--call"]:
        control, *files = map(int, sys.argv[4:])
        call_init(control, tuple(files), Limits(**json.loads(sys.argv[3])), sys.argv[2])
    else:
        if "--unsafe-code" in sys.argv[1:]:
            allow_unsafe()
        result = run_python("print(sum(range(101)))")
        print(f"isolation: {isolation()}; print(sum(range(101))) -> {result.status} {result.stdout.strip()}{result.stderr} in {1000 * result.seconds:.1f} ms")
        stop_server()
        sys.exit(0 if result.status == "ok" else 1)
