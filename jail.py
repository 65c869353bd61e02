"""The inside of the sandbox: what runs between `sandbox.run_python` and a model-written program. sandbox.py starts this file as a
script; it imports nothing of ours.

Three kinds of process, each the parent of the next (the picture is in sandbox.py):

* `serve`, the server: enters its own user, pid, network, mount, ipc, uts and cgroup namespaces once, builds a read-only root with
  the system and this Python in it and nothing else, then forks one init per request. It sees limits and file descriptors, never
  code or output.
* `call_init`, the init of one call: pid 1 of a new pid namespace, with a /tmp and a /proc of the call's own. It watches the wall
  clock, the memory and the number of processes of the whole call, and ends it with one signal that reaches every process in the
  namespace; nothing can outlive it.
* `run_program`, the program: another user id, a user namespace of its own (in which RLIMIT_NPROC counts), no capabilities,
  rlimits, no-new-privileges, and a seccomp filter: no sockets (a network namespace does not stop AF_VSOCK), mounts, namespaces,
  tracing, keyrings, io_uring, or memory that no limit counts.
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
import sys
import threading
import time
from types import SimpleNamespace

# The kernel's interface. Python 3.11 has no os.unshare, so libc is called directly.

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SYS_MOUNT_SETATTR = 442                                   # the same on every architecture; Linux 5.12
TICK = 25                                                 # milliseconds between two looks at a running call's memory and processes
PROGRAM_ID = 1                                            # programs' user id in the server's user namespace, if it has a second one
libc = ctypes.CDLL(None, use_errno=True)


def kernel(name: str, *arguments) -> int:
    """Calls a libc function; raises OSError naming it when it returns -1."""
    converted = [a.encode() if isinstance(a, str) else ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    result = getattr(libc, name)(*converted)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


# Forbidden system calls: name -> (x86-64, aarch64) number, None where the architecture lacks it. Since 424 both number alike.
FORBIDDEN = {
    # sockets, and memory that no limit counts
    "socket": (41, 198), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "mbind": (237, 235), "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    # large attack surfaces of the kernel
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "landlock_create_ruleset": (444, 444), "lookup_dcookie": (212, 18), "personality": (135, 92), "modify_ldt": (154, None),
    # the machine itself
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "iopl": (172, None), "ioperm": (173, None), "vhangup": (153, 58),
}
LAST_KNOWN_CALL = 462                                     # newer calls than this file knows are answered "no such call"


@functools.cache
def seccomp_filter() -> bytes:
    """The filter's machine code: what FORBIDDEN names, new namespaces by clone, and anonymous shared memory (which no limit would
    count) fail with EPERM."""
    machine = os.uname().machine
    column, arch, clone, mmap = {"x86_64": (0, 0xC000003E, 56, 9), "aarch64": (1, 0xC00000B7, 220, 222)}[machine]
    load, equal, at_least, any_bit, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    kill, refuse, unknown, allow = 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
    numbers = [pair[column] for pair in FORBIDDEN.values() if pair[column] is not None]
    # (operation, jump if true, jump if false, value); a jump skips that many lines. In a call's data the number is at 0, the
    # architecture at 4, argument n at 16 + 8n.
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0),
               (equal, 0, 1, 435), (give, 0, 0, unknown),            # clone3 hides its flags in memory: libc then uses clone
               (at_least, 0, 1, LAST_KNOWN_CALL + 1), (give, 0, 0, unknown)]          # x32 calls of x86-64 carry bit 30: here too
    for number in numbers:
        program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    namespaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 6, namespaces), (give, 0, 0, refuse),
                (equal, 0, 4, mmap), (load, 0, 0, 16 + 24), (mask, 0, 0, 0x21), (equal, 0, 1, 0x21),      # MAP_SHARED | MAP_ANONYMOUS
                (give, 0, 0, refuse), (give, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def forbid_system_calls():
    """Loads the filter into this process, for ever and for all its children."""
    code = ctypes.create_string_buffer(seccomp_filter())
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(seccomp_filter()) // 8, ctypes.addressof(code)))
    kernel("prctl", PR_SET_SECCOMP, 2, ctypes.addressof(header), 0, 0)


# --------------------------------------------------------------------------------------------------------------------------------
# The program's side: the last process of the chain, which gives everything up and then runs the code.

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "MPLBACKEND": "Agg",
               "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "MALLOC_ARENA_MAX": "2",
               "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def give_up_privileges(limits, kind: str):
    """After this the process has no capability, cannot gain one, and is bound by limits."""
    # under bubblewrap an unused user of its own per call, since RLIMIT_NPROC counts per user; nobody where there is none
    own = PROGRAM_ID if kind == "namespaces" else 61000 + int.from_bytes(os.urandom(2), "big") % 4096
    identity = own if kind == "namespaces" or can_become(own) else 65534
    if kind != "unsafe" and os.geteuid() == 0 and can_become(identity):
        os.setgroups([])
        os.setresgid(identity, identity, identity)
        os.setresuid(identity, identity, identity)
    if kind == "namespaces":
        kernel("unshare", NEWUSER)                        # RLIMIT_NPROC counts per user and user namespace: so per call
    megabyte = 1 << 20
    cpu = max(1, round(limits.cpu_seconds + 0.499))
    for name, value in [("AS", limits.memory_mb * megabyte), ("CPU", cpu), ("FSIZE", limits.file_mb * megabyte),
                        ("NOFILE", limits.open_files), ("NPROC", limits.processes), ("MEMLOCK", 0), ("MSGQUEUE", 0),
                        ("CORE", 1)]:                     # 1, not 0: that also stops a core_pattern which pipes
        if name == "NPROC" and kind == "unsafe":
            continue                                      # would count every process of this user
        number = getattr(resource, "RLIMIT_" + name)
        highest = resource.getrlimit(number)[1]           # what this machine forbids already stays forbidden
        highest = value + 1 if highest == resource.RLIM_INFINITY else highest
        resource.setrlimit(number, (min(value, highest), min(value + (name == "CPU"), highest)))
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
    sys.modules["__main__"], sys.argv, sys.path[0] = main, [path], folder
    stdin, stdout, stderr = (open(fd, mode, encoding="utf-8", errors="replace", closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    stderr.reconfigure(line_buffering=True)
    sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__ = stdin, stdout, stderr, stdin, stdout, stderr
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
    if not stdout.closed:
        stdout.flush()
    return exit_code & 255


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as f:
        return f.read()


# --------------------------------------------------------------------------------------------------------------------------------
# The init of one call: pid 1 of its namespace, so that nothing of the call outlives it.

def call_init(control: int, files: list, limits, kind: str):
    """Forks the program, watches it, leaves nothing of it alive, and reports {"exit", "stopped"} as JSON on control. files: code,
    stdin, stdout, stderr. Never returns."""
    report = {"exit": None, "stopped": "the sandbox failed"}
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)      # pid 1 gets no signal from below that it does not handle
        folder = prepare(kind, limits)
        kernel("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)      # a program with our user id could else write into us, its watch, by /proc/1/mem
        program = os.fork()
        if program == 0:
            kernel("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
            become_program(files, folder, limits, kind)
        for fd in files:
            os.close(fd)
        report["exit"], report["stopped"] = watch_program(program, control, limits, kind)
        if kind == "unsafe":
            import shutil
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:                              # no memory for a mount or a process, say
        report["stopped"] = f"the sandbox failed: {error}"
    os.write(control, json.dumps(report).encode())
    os._exit(0)


def prepare(kind: str, limits) -> str:
    """Mounts the call's own /tmp and /proc; the folder for the program."""
    os.chdir("/proc")                                     # stays the /proc from before, in which over_limits sees the call
    if kind == "namespaces":
        kernel("unshare", NEWNS)
        below = {path: os.open(path, os.O_PATH) for path in {sys.base_prefix, sys.prefix} if path.startswith("/tmp/")}
        kernel("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={limits.file_mb}m,nr_inodes=4096,mode=1777")
        for path, fd in below.items():                    # this Python lives below /tmp: it stays visible in the new one
            os.makedirs(path)
            kernel("mount", f"self/fd/{fd}", path, None, MS_BIND | MS_REC, None)
            os.close(fd)
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        try:
            kernel("mount", "proc", "/proc", "proc", flags, None)
        except PermissionError:                           # a container that masks parts of /proc permits no new one: then none
            kernel("mount", "tmpfs", "/proc", "tmpfs", flags, "size=4k")
    elif kind == "unsafe":
        import tempfile
        kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)      # orphans come to us, and can be killed
        return tempfile.mkdtemp(prefix="unsafe-code-")
    return "/tmp"


def become_program(files: list, folder: str, limits, kind: str):
    """The fork that turns into the program. Never returns."""
    exit_code = 1
    try:
        os.setpgid(0, 0)                                  # kill(0) must not reach the server
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code, stdin, stdout, stderr = files
        source = read_all(code)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))       # the caller may have had many open: ours keep its numbers
        os.chdir(folder)
        give_up_privileges(limits, kind)
        exit_code = run_program(source, folder)
    except OSError as error:
        os.write(2, f"sandbox: {error}\n".encode())
    finally:
        os._exit(exit_code)


def watch_program(program: int, control: int, limits, kind: str):
    """Waits for the program's end, a limit of the whole call, or a word (end-of-file) from the caller; then kills all that is
    left. (exit code, why it was stopped)"""
    watch, deadline = select.poll(), time.monotonic() + limits.wall_seconds
    watch.register(control, select.POLLIN)
    watch.register(os.pidfd_open(program), select.POLLIN)
    stopped, status, cpu = None, None, 0.0
    while status is None and stopped is None:
        ready = [fd for fd, _ in watch.poll(TICK)]
        if control in ready:
            stopped = "caller"
        elif time.monotonic() > deadline:
            stopped = "timeout"
        elif not ready:
            stopped = over_limits(limits)
        status, cpu = reap(program, status, cpu)
    status, cpu = kill_and_reap(program, status, cpu, kind)
    exit_code = os.waitstatus_to_exitcode(status)
    if stopped is None and (exit_code == -signal.SIGXCPU or exit_code == -signal.SIGKILL and cpu > limits.cpu_seconds):
        stopped = "timeout"                               # the kernel's own stop; SIGKILL only for programs that ignore SIGXCPU
    return exit_code, stopped


def reap(program: int, status, cpu: float):
    """Collects the children that are dead now (orphans come to pid 1). The program's wait status and CPU seconds once it is among them."""
    while True:
        try:
            pid, code, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return status, cpu
        if pid == 0:
            return status, cpu
        if pid == program:
            status, cpu = code, usage.ru_utime + usage.ru_stime


def kill_and_reap(program: int, status, cpu: float, kind: str):
    """Ends all that is left of the call; what reap returns. As pid 1 one signal reaches every process of the namespace, and forks in progress
    fail. Under "unsafe" only children can be found: those of a killed child come to us next."""
    while True:
        try:
            if kind == "unsafe":
                for child in read_words("thread-self/children"):
                    os.kill(int(child), signal.SIGKILL)
            else:
                os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:                        # nothing but zombies, or nothing
            pass
        try:
            pid, code, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return status, cpu
        if pid == program:
            status, cpu = code, usage.ru_utime + usage.ru_stime


def over_limits(limits):
    """Which limit of the whole call is broken now: "memory", "processes" or None. Orphans come to this process, so all of the
    call are its descendants."""
    pages, family = 0, read_words("thread-self/children")
    for process in family:
        try:
            pages += int(read_words(f"{process}/statm")[1])
            for thread in os.listdir(f"{process}/task"):
                family += read_words(f"{process}/task/{thread}/children")
        except OSError:                                   # it ended meanwhile
            continue
    if len(family) > limits.processes:
        return "processes"
    return "memory" if pages * resource.getpagesize() > limits.memory_mb << 20 else None


def read_words(path: str) -> list:
    with open(path) as f:
        return f.read().split()


# --------------------------------------------------------------------------------------------------------------------------------
# The server: entered once, forks an init per request.

def serve(connection: socket.socket):
    """The long-lived helper. Enters the namespaces, builds the read-only root, then forks one init per message (limits as JSON +
    control and 4 files). Ends at end-of-file, which is also what it reads when the caller is killed."""
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")                                   # out of memory: the kernel takes programs first
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    os.umask(0o022)                                       # programs, which are nobody, must be able to read the root built below
    kernel("unshare", NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)
    connection.send(b"unshared")
    if connection.recv(64) != b"go":                      # the caller writes our user id map: only it may map a second id
        sys.exit("the user id map cannot be written")
    server = os.fork()
    if server:
        connection.close()
        os.waitpid(server, 0)                             # dies with the server, and the server with it (below)
        return
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    here = os.open("/proc/self/ns/pid", os.O_RDONLY)
    build_root()
    socket.sethostname("sandbox")
    for name in ("bisect collections datetime decimal fractions heapq itertools math random re statistics string traceback types "
                 "typing").split():
        __import__(name)                                  # what programs import most: already there
    seccomp_filter(), can_become(PROGRAM_ID)
    gc.freeze()                                           # forks then share these pages for longer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)         # inits are reaped by the kernel
    connection.send(b"ready")
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 4096, 5)
        if not message:
            os._exit(0)                                   # as pid 1: ends every call below
        try:
            kernel("unshare", NEWPID)                     # the next child is pid 1 of a new namespace
            if os.fork() == 0:
                connection.close()
                os.close(here)
                call_init(fds[0], fds[1:], SimpleNamespace(**json.loads(message)), "namespaces")
        except OSError as error:                          # too many processes just now: this call fails, the next may not
            os.write(fds[0], json.dumps({"exit": None, "stopped": f"the sandbox failed: {error}"}).encode())
        kernel("setns", here, NEWPID)                     # without this, unshare works only once
        for fd in fds:
            os.close(fd)


DEVICES = ("null", "full", "random", "urandom")          # no /dev/zero: shared mappings of it escape the memory limits
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
                "shm": "/tmp"}


def system_paths() -> list:
    """What programs may read: the system, this Python, its virtual environment."""
    homes = [home for home in dict.fromkeys(["/usr", "/usr/local", sys.base_prefix, sys.prefix])]
    parts = ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share", "pyvenv.cfg")
    wanted = [f"{home}/{part}" for home in homes for part in parts]
    return wanted + ["/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"]


def build_root():
    """A new root on a tmpfs with read-only bind mounts, then the old one is detached: nothing else is reachable by any path."""
    kernel("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    real = {path: os.path.realpath(path) for path in system_paths()}         # a link above a path would lead nowhere in the new root
    kernel("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    kernel("pivot_root", "/tmp", "/tmp/old")
    os.chdir("/")
    for path, source in real.items():
        if os.path.islink("/old" + path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink("/old" + path), path)
        elif os.path.exists("/old" + source):
            bind("/old" + source, path)
    for device in DEVICES:
        bind("/old/dev/" + device, "/dev/" + device, device=True)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, "/dev/" + name)
    os.mkdir("/proc")
    os.makedirs("/tmp", exist_ok=True)                    # it is there when this Python's environment lies below it
    kernel("mount", "/old/proc", "/proc", None, MS_BIND | MS_REC, None)      # a new one may be mounted only where one is visible
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


if __name__ == "__main__":
    # ----------------------------------------------------------------------------------------------------------------------------
    # started by sandbox.py: the server, or (under bubblewrap, or nothing) one call
    if len(sys.argv) < 3:
        sys.exit("jail.py is started by sandbox.py; `python sandbox.py` shows what it gives")
    if sys.argv[1] == "--serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        control, *files = map(int, sys.argv[4:])
        call_init(control, files, SimpleNamespace(**json.loads(sys.argv[3])), sys.argv[2])
