"""Hostile programs, run for real through the `code` tool under every isolation that this machine gives; and the server's own life."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import sandbox
from sandbox import Limits, run_python
from tools import Code, Context

# What a program sees in its /tmp, apart from this Python itself, when its environment lies below /tmp (then it must stay visible)
PYTHON_BELOW_TMP = [prefix.split("/")[2] for prefix in (sys.prefix, sys.base_prefix) if prefix.startswith("/tmp/")]
LISTING = f"[name for name in os.listdir('/tmp') if name not in {PYTHON_BELOW_TMP}]"

ROOT = Path(__file__).resolve().parent.parent
TIGHT = Limits(cpu_seconds=1, wall_seconds=1, memory_mb=256, processes=16, file_mb=8)
MARGIN = 3.0                                              # seconds: three times the limit


def kernel_allows_namespaces() -> bool:
    """Asks the kernel directly, so that a broken sandbox.py cannot pass for a machine without isolation."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x20000 | 0x20000000 | 0x40000000) != 0)"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


KINDS = ["namespaces"] * kernel_allows_namespaces() + ["bubblewrap"] * bool(shutil.which("bwrap"))
if not KINDS:
    pytest.skip("this kernel or container allows neither namespaces nor bubblewrap", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def secret_in_our_environment():
    os.environ["COA_API_KEY"] = "sk-" + "topsecret"
    sandbox.stop_server()
    yield
    del os.environ["COA_API_KEY"]
    sandbox.stop_server()


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.long] * (kind != KINDS[0])) for kind in KINDS])
def kind(request, monkeypatch):
    monkeypatch.setitem(sandbox.state, "kind", request.param)
    return request.param


def descendants() -> list:
    """Command lines of all processes below this one that run programs (two helper processes of the server are allowed)."""
    parents, lines = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
            lines[int(name)] = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    found, queue = [], [os.getpid()]
    while queue:
        children = parents.get(queue.pop(), [])
        queue += children
        found += [lines.get(child, "") for child in children]
    return found


def assert_nothing_left(seconds=2.0):
    """No process of a call lives on: at most the server's two. The kernel may need a moment to take an exiting one away."""
    deadline = time.monotonic() + seconds
    while True:
        left = [line for line in descendants() if "jail.py" in line or "code.py" in line]
        if len(left) <= 2 and not any("--call" in line for line in left):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


# name: (program, what the observation must contain (any of), what it must not contain)
HOSTILE = {
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ["Time out", "processes"], []),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10_000_000))", ["MEMORY_LIMIT_EXCEEDED"], []),
    "memory bomb in many processes": (
        "import os, time\nfor i in range(12):\n    if os.fork() == 0:\n        x = bytearray(100_000_000)\n        time.sleep(60)\ntime.sleep(60)", ["MEMORY_LIMIT_EXCEEDED"], []),
    "shared memory outside the limits": ("import mmap\nm = mmap.mmap(-1, 1 << 20)\nprint('mapped')", ["Operation not permitted", "PermissionError"], ["mapped"]),
    "endless loop": ("while True: pass", ["Time out"], []),
    "endless sleep": ("import time\ntime.sleep(1000)", ["Time out"], []),
    "print 1 GB": ("while True: print('x' * 10_000)", ["bytes of output"], []),
    "file bomb": ("f = open('/tmp/a', 'wb')\nwhile True: f.write(b'x' * 1_000_000); f.flush()", ["File too large", "No space left"], []),
    "many files": ("for i in range(100_000): open(f'/tmp/{i}', 'w').write('x' * 4096)", ["No space left", "Time out"], []),
    "/etc/shadow": ("print(open('/etc/shadow').read())", ["FileNotFoundError"], ["root:"]),
    "environments of all processes": (
        "import os, glob\nprint(dict(os.environ))\nfor f in glob.glob('/proc/*/environ'):\n    try: print(open(f).read())\n    except OSError as e: print(f, e)",
        ["[EXECUTED]"], ["topsecret"]),
    "home, project and tests": (f"import os\nprint(os.listdir({str(ROOT)!r}))\nprint(open({str(ROOT / 'tests/test_sandbox.py')!r}).read())",
                                ["FileNotFoundError"], ["MARGIN"]),
    "write outside /tmp": (
        "import os\nfor d in ['/', '/usr', '/usr/local/bin', '/etc', '/dev', '/proc/sys/kernel', '/home', '/root', '/var/tmp', os.path.dirname(os.__file__)]:\n"
        "    try: open(d + '/canary-of-test', 'w'); print('WROTE', d)\n    except OSError as e: print(d, type(e).__name__)", ["[EXECUTED]"], ["WROTE"]),
    "socket to loopback": ("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint('CONNECTED')", ["Operation not permitted"], ["CONNECTED"]),
    "socket outside": ("import socket\ns = socket.socket()\ns.settimeout(1)\ns.connect(('1.1.1.1', 80))\nprint('CONNECTED')", ["Operation not permitted"], ["CONNECTED"]),
    "vsock to the hypervisor": ("import socket\nsocket.socket(40, socket.SOCK_STREAM)\nprint('OPENED')", ["Operation not permitted"], ["OPENED"]),
    "name resolution": ("import socket\nsocket.gethostbyname('example.com')\nprint('RESOLVED')", ["gaierror", "Error"], ["RESOLVED"]),
    "kill everything": ("import os, signal\nfor p in range(1, 5000):\n    if p != os.getpid():\n        try: os.kill(p, signal.SIGKILL)\n        except OSError: pass\n"
                        "try: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\nprint('alive')", ["alive"], []),
    "signals to its init": ("import os\nfor p in (1, os.getppid()):\n    for s in range(1, 65):\n        try: os.kill(p, s)\n        except OSError: pass\nprint('alive')", ["alive"], []),
    "kill its own group": ("import os, signal\nos.kill(0, signal.SIGKILL)", ["signal 9"], []),
    "kill its session": ("import os, signal\nfor p in (os.getsid(0), os.getpgid(os.getppid()), os.getppid()):\n    try: os.killpg(p, signal.SIGKILL)\n    except OSError: pass\nprint('alive')",
                         ["alive", "signal 9"], []),
    "daemonise": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        for fd in range(3): os.close(fd)\n        time.sleep(1000)\n    os._exit(0)\n"
                  "print('parent done')", ["parent done"], []),
    "daemon keeps stdout": ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint('parent done')", ["parent done"], []),
    "ignore signals": ("import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass", ["Time out"], []),
    "close stdout": ("import os\nos.close(1)\nos.close(2)\nwhile True: pass", ["Time out"], []),
    "close stdout and end": ("import os\nos.close(1)", ["[EXECUTED]", "[FAILED]"], []),
    "wait for stdin": ("print(input())", ["EOFError"], []),
    "recursion": ("def f(n): return f(n + 1)\nf(0)", ["RecursionError"], []),
    "recursion in C": ("import sys\nsys.setrecursionlimit(10 ** 9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n + 'x')\n"
                       "def f(x):\n    return sorted([x], key=f)\nf(0)", ["signal 11", "MEMORY_LIMIT_EXCEEDED", "Time out"], []),
    "symlinks": ("import os\nos.symlink('/', '/tmp/root')\nos.symlink('/proc/1/root', '/tmp/init')\nfor p in ['/tmp/root/etc/shadow', '/tmp/init/etc/shadow', '/proc/1/root/etc/passwd', "
                 "'/proc/1/cwd', '/proc/1/mem', '/proc/1/fd/0', '/proc/1/environ']:\n    try: open(p).read(); print('READ', p)\n    except OSError as e: print(p, type(e).__name__)",
                 ["[EXECUTED]"], ["READ"]),
    "/proc settings": ("for p in ['/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/vm/drop_caches', '/proc/1/oom_score_adj', '/proc/self/uid_map']:\n"
                       "    try: open(p, 'w').write('0 0 1'); print('WROTE', p)\n    except OSError as e: print(p, type(e).__name__)", ["[EXECUTED]"], ["WROTE"]),
    "namespaces, mounts and tracing": (
        "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nfor name, args in [('unshare', (0x10000000,)), ('mount', (b'x', b'/tmp', b'tmpfs', 0, None)), ('umount2', (b'/proc', 2)), "
        "('ptrace', (16, 1, 0, 0)), ('setns', (0, 0)), ('chroot', (b'/tmp',)), ('syscall', (425, 8, 0)), ('syscall', (56, 0x10000011, 0, 0, 0, 0))]:\n"
        "    r = getattr(c, name)(*args)\n    print(name, 'GOT IT' if r != -1 else 'refused')", ["[EXECUTED]"], ["GOT IT"]),
    "become root": ("import os\nfor f in (os.setuid, os.setgid):\n    try: f(0); print('ROOT')\n    except OSError as e: print(e)\nprint(os.system('su -c id; sudo -n id'))", ["[EXECUTED]"],
                    ["ROOT", "uid=0"]),
    "200 KB of output": ("print('a' * 100_000); print('END')", ["END\n[STDOUT:END]"], []),
    "invalid UTF-8": ("import os\nos.write(1, b'\\xff\\xfe ok \\x00')", ["\ufffd\ufffd ok"], []),
    "lone surrogate": ("print('\\ud800')", ["[EXECUTED]", "[FAILED]"], []),
    "crash": ("import ctypes\nctypes.string_at(0)", ["signal 11"], []),
    "os._exit": ("import os\nos._exit(7)", ["exit status 7"], []),
    "kill itself": ("import os\nos.kill(os.getpid(), 9)", ["signal 9"], []),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_is_bounded_contained_and_explained(name, kind, tmp_path):
    program, expected, forbidden = HOSTILE[name]
    sandbox.isolation()
    run_python("pass")                                    # a server started by this test would count as its time
    server = sandbox.state["server"]
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    started = time.monotonic()
    limits = TIGHT if "Time out" in expected else replace(TIGHT, wall_seconds=2.5)     # those that end by themselves should be seen to
    observation = Code(limits).run(f"```py\n{program.replace('PORT', '9')}\n```", Context())
    seconds = time.monotonic() - started
    assert seconds < MARGIN * TIGHT.wall_seconds, seconds
    assert any(text in observation for text in expected), observation
    assert not any(text in observation for text in forbidden), observation
    assert len(observation) < 4000
    assert canary.read_text() == "untouched"
    assert not [p for d in ("/", "/usr", "/usr/local/bin", "/etc", "/tmp", "/var/tmp") for p in Path(d).glob("canary-of-test")]
    assert_nothing_left()
    assert run_python("print(1)").stdout == "1\n" and sandbox.state["server"] is server                  # and the next call works, in the same server


def test_program_has_no_privilege_no_descriptor_and_no_environment(kind):
    spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]                         # as a trainer may hold: the call's own numbers lie beyond them
    result = run_python("import os\nprint(len(os.listdir('/proc/self/fd')), os.environ.get('HOME'), sorted(os.environ))\n"
                        "print(*[l for l in open('/proc/self/status') if l.split(':')[0] in ('CapEff', 'CapPrm', 'NoNewPrivs', 'Seccomp')])\n"
                        "print(os.getuid(), sorted(filter(str.isdigit, os.listdir('/proc'))), "
                        + LISTING + ")")
    for fd in spare:
        os.close(fd)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 /tmp") and "KEY" not in lines[0]                          # 0, 1, 2 and the listing's own
    text = result.stdout.replace("\t", " ")
    assert "CapEff: 0000000000000000" in text and "CapPrm: 0000000000000000" in text and "NoNewPrivs: 1" in text and "Seccomp: 2" in text
    assert re.fullmatch(r"(65534|6[1-5]\d\d\d) \['1', '2'\] \['code.py'\]", lines[-1]) or os.getuid() != 0


def test_calls_cannot_see_each_others_code_files_or_processes():
    """The server never holds a call's data, so nothing of it can be in the memory that the next fork inherits."""
    word = "marker" + "-of-the-other-call"
    scan = ("import os, re, ctypes\nfound = 0\nfor line in open('/proc/self/maps'):\n    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
            "    if ' r' in line[:40] and b - a < 1 << 26 and '[v' not in line:\n        found += ctypes.string_at(a, b - a).count(('MARKER' + '-OF-THE-OTHER-CALL').lower().encode())\n"
            "print(found, " + LISTING + ", len([p for p in os.listdir('/proc') if p.isdigit()]))")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(run_python, f"import time\nopen('/tmp/{word}', 'w').write('{word}')\nprint('{word}')\ntime.sleep(1.5)", word)
        time.sleep(0.5)
        result = run_python(scan, limits=Limits(memory_mb=2000))
        assert other.result().stdout == word + "\n"
    assert result.stdout == "0 ['code.py'] 2\n", result


def test_output_reaches_one_megabyte_and_no_further():
    result = run_python("import sys\nsys.stdout.write('x' * 999_999)\nsys.stderr.write('y' * 200_000)")
    assert (result.status, len(result.stdout), len(result.stderr)) == ("ok", 999_999, 200_000)
    exact, over = (run_python(f"import sys\nsys.stdout.write('x' * {n})") for n in (1_000_000, 1_000_001))
    assert (exact.status, len(exact.stdout)) == ("ok", 1_000_000) and (over.status, len(over.stdout)) == ("error", 1_000_000)
    flood = run_python("import sys\nsys.stdout.write('x' * 3_000_000)")
    assert flood.status == "error" and len(flood.stdout) == 1_000_000 and "bytes of output" in flood.stderr and flood.seconds < 3


def test_pipe_larger_than_its_buffer_is_read_before_the_wait():
    """Reading after the wait makes every program with more than 64 KB of output a timeout."""
    result = run_python("print('z' * 200_000)")
    assert result.status == "ok" and len(result.stdout) == 200_001 and result.seconds < 3


def test_statuses_and_exit_codes():
    assert (run_python("1/0").status, run_python("1/0").exit_code) == ("error", 1)
    assert run_python("import sys; sys.exit(3)").exit_code == 3
    assert run_python("import sys; sys.exit('why')").stderr == "why\n"
    assert run_python("x = bytearray(10 ** 10)").status == "memory"
    assert run_python("while True: pass", limits=Limits(wall_seconds=0.3)).status == "timeout"
    assert run_python("while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=30)).status == "timeout"
    assert run_python("def f(:").stderr.rstrip().endswith("SyntaxError: invalid syntax")
    assert run_python("nul = '\0'").status == "error"


def test_ordinary_programs_run_as_with_python_itself():
    assert run_python("n = int(input()); import sys; print(n * 2, sys.stdin.read())", "21\nrest").stdout == "42 rest\n"
    assert run_python("import threading, time\nthreading.Thread(target=lambda: (time.sleep(.05), print('late'))).start()\nprint('main')").stdout == "main\nlate\n"
    assert run_python("import atexit\natexit.register(lambda: print('bye'))\nif __name__ == '__main__': print('main')").stdout == "main\nbye\n"
    assert run_python("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))").stdout == "3\n"
    assert run_python("import pickle\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x)").stdout == "1\n"
    assert run_python("import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout)").stdout == "5\n\n"
    assert run_python("import multiprocessing as m\ndef f(x): return x * x\nwith m.Pool(2) as p: print(p.map(f, range(4)))").stdout == "[0, 1, 4, 9]\n"
    assert run_python("print('é', 'Ω')").stdout == "é Ω\n"
    assert run_python("import sys, io\nold = sys.stdout\nprint('kept')\nsys.stdout = io.StringIO()\nprint('hidden')").stdout == "kept\n"
    closed = run_python("import sys\nprint('a')\nsys.stdout.close()")
    assert (closed.status, closed.stdout) == ("ok", "a\n")
    assert '  File "/tmp/code.py", line 2, in f\n    return 1 / 0' in run_python("def f():\n    return 1 / 0\nf()").stderr


def test_works_inside_an_except_block_and_after_failures_of_its_own(monkeypatch):
    try:
        raise ValueError
    except ValueError:
        assert run_python("print(1)").stdout == "1\n"
    monkeypatch.setattr(sandbox, "launch", lambda *_: (_ for _ in ()).throw(OSError("no process")))
    before = len(os.listdir("/proc/self/fd"))
    result = run_python("print(1)")
    assert (result.status, result.stderr) == ("error", "sandbox: no process\nstopped: the sandbox was killed\n")
    assert len(os.listdir("/proc/self/fd")) == before


def test_hash_order_is_the_same_in_every_call():
    assert len({run_python("print(list({'a', 'b', 'c', 'd', 'e'}))").stdout for _ in range(3)}) == 1


def test_concurrent_calls_keep_their_own_results():
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: run_python(f"print({i}, input())", str(i)), range(40)))
    assert [r.stdout for r in results] == [f"{i} {i}\n" for i in range(40)]
    assert_nothing_left()


def test_no_descriptor_and_no_thread_leaks():
    run_python("pass")
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for program in ["pass", "1/0", "while True: print('x' * 9999)", "import os; os.kill(os.getppid(), 9)"] * 3:
        run_python(program, limits=Limits(wall_seconds=0.5))
    assert len(os.listdir("/proc/self/fd")) == before and threading.active_count() == threads


needs_server = pytest.mark.skipif("namespaces" not in KINDS, reason="the server needs namespaces")


@needs_server
def test_dead_server_is_restarted_and_a_call_in_progress_repeated():
    assert run_python("print(1)").stdout == "1\n"
    old = sandbox.state["server"].pid
    os.kill(old, signal.SIGKILL)
    assert run_python("print(2)").stdout == "2\n" and sandbox.state["server"].pid != old
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(run_python, f"import time; time.sleep(1); print({i})") for i in range(4)]
        time.sleep(0.4)
        os.kill(sandbox.state["server"].pid, signal.SIGKILL)
        assert [r.result().stdout for r in running] == ["0\n", "1\n", "2\n", "3\n"]
    assert_nothing_left()


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_the_trainer(stop, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport sandbox, threading\n"
                      "for _ in range(2): threading.Thread(target=sandbox.run_python, args=('import time; time.sleep(100)', '', sandbox.Limits(wall_seconds=100))).start()\n"
                      "sandbox.run_python('pass'); print(sandbox.state['server'].pid if sandbox.state['server'] else 0, flush=True)\nimport time; time.sleep(100)\n")
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    server = int(trainer.stdout.readline())
    time.sleep(0.3)
    processes = [p for p in server_family(server)]
    assert len(processes) >= 2
    trainer.send_signal(stop)
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{p}").exists() for p in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


def server_family(root: int) -> list:
    found = [root]
    for pid in found:
        if Path(f"/proc/{pid}/task").exists():
            found += [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return found


@needs_server
def test_at_most_two_long_lived_helpers():
    for _ in range(5):
        run_python("pass")
    assert_nothing_left()
    deadline = time.monotonic() + 2                       # the last init may still be on its way out
    while len(family := server_family(sandbox.state["server"].pid)) > 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(family) == 2


@needs_server
def test_forked_process_uses_a_server_of_its_own():
    run_python("pass")
    code = sandbox.state["server"].pid
    pid = os.fork()
    if pid == 0:
        good = run_python("print(3)").stdout == "3\n" and sandbox.state["server"].pid != code
        sandbox.stop_server()
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert run_python("print(4)").stdout == "4\n" and sandbox.state["server"].pid == code


AS_NOBODY = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("runuser") or not Path("/usr/bin/python3").exists(),
                               reason="needs root, runuser and a Python that nobody may run")


def as_nobody(*arguments):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))           # tmp_path is closed to others
    folder.chmod(0o755)
    for name in ("sandbox.py", "jail.py"):
        shutil.copy(ROOT / name, folder)
    try:
        return subprocess.run(["runuser", "-u", "nobody", "--", "/usr/bin/python3", *arguments], capture_output=True, text=True, timeout=30, cwd=folder)
    finally:
        shutil.rmtree(folder)


@AS_NOBODY
def test_works_as_an_ordinary_user():
    done = as_nobody("sandbox.py")
    assert done.returncode == 0 and "5050" in done.stdout, done


@AS_NOBODY
def test_program_with_the_user_id_of_its_watcher_cannot_reach_into_it(kind):
    program = ("for name in ('mem', 'maps', 'environ', 'cwd/x', 'root/x'):\n    try:\n        open('/proc/1/' + name, 'rb').read(1)\n"
               "    except OSError as error:\n        print(name, type(error).__name__)\nprint(len(open('/proc/self/environ').read()))")
    done = as_nobody("-c", f"import sandbox\nsandbox.state['kind'] = {kind!r}\nprint(sandbox.run_python({program!r}).stdout)")
    lines = done.stdout.split("\n")
    assert lines[:5] == [f"{name} PermissionError" for name in ("mem", "maps", "environ", "cwd/x", "root/x")] and int(lines[5]) > 0, done


def test_without_isolation_it_refuses_with_the_remedy_unless_allowed(monkeypatch):
    monkeypatch.setitem(sandbox.state, "kind", "none")
    monkeypatch.setitem(sandbox.state, "unsafe", False)
    result = run_python("print(1)")
    assert result.status == "refused" and result.stdout == "" and "Remedy: " in result.stderr and "--unsafe-code" in result.stderr
    assert "Remedy" in Code().run("print(1)", Context())
    sandbox.allow_unsafe()
    assert run_python("print(1)").stdout == "1\n"
    assert run_python("while True: pass", limits=TIGHT).status == "timeout"
    assert run_python("import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nprint('done')", limits=TIGHT).stdout == "done\n"
    assert run_python("import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(1000)\nprint('done')", limits=TIGHT).stdout == "done\n"
    assert_nothing_left()


def test_allow_unsafe_never_weakens_isolation_that_is_there(monkeypatch):
    monkeypatch.setitem(sandbox.state, "unsafe", True)
    monkeypatch.setitem(sandbox.state, "kind", None)
    assert sandbox.isolation() == KINDS[0]


def test_script_names_the_isolation_and_the_exit_code_tells():
    done = subprocess.run([sys.executable, str(ROOT / "sandbox.py")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"isolation: {KINDS[0]}" in done.stdout and "5050" in done.stdout
