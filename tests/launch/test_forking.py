"""Ranks that are forked after their imports: they differ from fresh processes in nothing but time,
and where they would, they are fresh processes.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo.launch import rehearse, starting
from fsdp_demo.launch.preload import Imported, imports
from fsdp_demo.launch.rehearsal import Rehearsal
from fsdp_demo.launch.rehearse import Supervisor

from .rehearsals import ON_LINUX, rehearsal

pytestmark = ON_LINUX

# What a rank finds around itself. Ports, moments and folders of the run differ from run to run.
WORLD = """
import beside
import gc, json, os, pathlib, random, signal, sys, threading
import numpy, torch

OWN = ("PORT", "RUN_ID", "ENDPOINT", "LAUNCHED", "FORKED", "ERROR_FILE", "STATUS", "ATTEMPT")
env = {name: value for name, value in os.environ.items() if not name.endswith(OWN)}
for name in ("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "_"):
    env.pop(name, None)  # an import that only a forked rank has made sets it
main = sys.modules["__main__"]
world = {
    "argv": sys.argv, "path": sys.path, "file": __file__, "spec": repr(__spec__),
    "main": [main.__dict__ is globals(), __name__, sorted(n for n in vars(main) if n[:2] == "__")],
    "env": env, "cwd": os.getcwd(), "leads a session": os.getsid(0) == os.getpid(),
    "handlers": {n: repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "gc": [gc.isenabled(), gc.get_threshold()],
    "streams": [
        [s.encoding, s.errors, s.line_buffering, s.write_through, type(s.buffer).__name__, s.name]
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "files": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in (0, 1, 2)),
    "open": len(os.listdir("/proc/self/fd")) < 12,
    "torch": torch.get_num_threads(),
}
drawn = [random.random(), float(numpy.random.rand()), torch.rand(1).item(), torch.initial_seed()]
kept = pathlib.Path(sys.argv[1], f"{os.environ['RANK']}.json")
kept.write_text(json.dumps({"world": world, "drawn": drawn, "parent": os.getppid()}))
"""

BESIDE = """
import os, pathlib
with open(pathlib.Path(__file__).with_suffix(".log"), "a") as file:
    file.write("imported\\n")
"""


def worlds(run_id: str, folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """What each of two ranks of an island finds, and the output of the rehearsal."""
    script = folder / "world.py"
    script.write_text(WORLD)
    (folder / "beside.py").write_text(BESIDE)
    words = ["--procs", "2", *options, "--cpu", "--", str(script), str(folder), "--x", "--", "a b"]
    process = rehearsal(run_id, script, "--islands", "1", *words)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], output


def made_by_torch(place: str) -> bool:
    return Path(place).parent == Path(tempfile.gettempdir()) and Path(place).name.startswith("tmp")


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_forked_rank_finds_what_a_fresh_one_finds(
    launcher: str,
    run_id: str,
    tmp_path: Path,
) -> None:
    forked, output = worlds(run_id, tmp_path, "--launcher", launcher)
    assert "[rehearse] imports for all ranks took" in output and "by itself" not in output
    log = tmp_path / "beside.log"
    assert log.read_text().split() == ["imported"], "once for all ranks"
    fresh, output = worlds(run_id, tmp_path, "--launcher", launcher, "--no-fork")
    assert "imports for all" not in output and log.read_text().count("imported") == 3
    for mine, theirs in zip(forked, fresh, strict=True):
        # torch 2.9 imports from a folder that it makes in each process
        mine["world"]["path"] = [p for p in mine["world"]["path"] if not made_by_torch(p)]
        assert mine["world"] == theirs["world"]
    assert forked[0]["parent"] == forked[1]["parent"]
    for a, b in zip(forked[0]["drawn"], forked[1]["drawn"], strict=True):
        assert a != b, "ranks draw numbers of their own"


# Runs every script once forked and once fresh, and prints how they ended and what they wrote.
ENDS = """
import json, os, subprocess, sys, tempfile
from fsdp_demo.launch.forking import Template
from fsdp_demo.launch.preload import preload
from fsdp_demo.launch.spares import Spares

def ended(made, words):
    with tempfile.TemporaryFile("w+") as out:
        kept = [os.dup(1), os.dup(2)]
        for fd in (1, 2):
            os.dup2(out.fileno(), fd)
        try:
            child = made()(words, env=dict(os.environ), start_new_session=True)
            code = child.wait(60)
        finally:
            for fd, old in zip((1, 2), kept):
                os.dup2(old, fd)
        out.seek(0)
        return code, out.read()

found = []
for script in sys.argv[1:]:
    template = Template(preload(script, dict(os.environ), lambda: False), 1, None)
    words = [sys.executable, "-u", script, "word"]
    forked = ended(lambda: Spares(template).popen, words)
    found.append([forked, ended(lambda: subprocess.Popen, words)])
print(json.dumps(found))
"""

SCRIPTS = {
    "returns": ("import sys\nprint('done', sys.argv[1:])", 0),
    "status": ("import sys\nsys.exit(75)", 75),
    "text": ("raise SystemExit('what went wrong')", 1),
    "error": ("def f():\n    raise ValueError('no')\nf()", 1),
    "hook": (
        "import sys\ndef hook(*error):\n    sys.exit(75)\nsys.excepthook = hook\n"
        "raise ValueError('no')",
        75,
    ),
    "cause": ("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e", 1),
    "interrupt": ("raise KeyboardInterrupt", -2),
    "killed": ("import os\nos.kill(os.getpid(), 9)", -9),
    "told": ("import os, time\nos.kill(os.getpid(), 15)\ntime.sleep(60)", -15),
    "syntax": ("import os\nif True print()", 1),
    "missing": ("import nowhere_to_be_found", 1),
    "exits": (
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('no newline', end='')",
        0,
    ),
    "pickles": (
        "import pickle\nclass A:\n    x = 1\n"
        "assert pickle.loads(pickle.dumps(A())).x == 1\nprint(A.__module__)",
        0,
    ),
    "spawns": (
        "import multiprocessing\ndef f(x):\n    return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(f, [1, 2]))",
        0,
    ),
}


def test_a_forked_rank_ends_as_a_fresh_one_ends(tmp_path: Path) -> None:
    names = [name for name in SCRIPTS if name != "syntax"]  # which `preload` refuses
    for name in names:
        (tmp_path / f"a_{name}.py").write_text(SCRIPTS[name][0])
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    words = [sys.executable, str(program), *(str(tmp_path / f"a_{name}.py") for name in names)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, (forked, fresh) in zip(names, json.loads(done.stdout), strict=True):
        assert forked == fresh and forked[0] == SCRIPTS[name][1], name


UNFIT = """
import os, sys
from fsdp_demo.launch.preload import CannotFork, preload
try:
    found = preload(sys.argv[1], dict(os.environ), lambda: False)
    print("other", *found.other({**os.environ, "RANK": "1"}))
except CannotFork as reason:
    print(reason)
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import beside", "other\n"),
        ("import os\nos.environ['A'] = 'b'\nimport beside", "other\n"),
        ("if x print()", "cannot be read"),
        ("import reads_rank", "other RANK\n"),
        ("import has_threads", "have changed the number of threads"),
        ("import has_handler", "have changed the handlers of signals"),
        ("import goes_away", "have changed the working folder"),
        ("import random\nimport seeds", "have seeded or drawn random numbers"),
        ("import fails", "RuntimeError: no"),
        ("import ends", "SystemExit: 3"),
        ("import selectors", "is imported already"),
    ],
)
def test_what_makes_a_process_unfit_to_be_forked(tmp_path: Path, source: str, said: str) -> None:
    for name, text in {
        "beside": "",
        "reads_rank": "import os\nos.environ.get('RANK')",
        "has_threads": "import threading\nthreading.Thread(target=__import__('time').sleep, "
        "args=(9,), daemon=True).start()",
        "has_handler": "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)",
        "seeds": "import random\nrandom.seed(0)",
        "goes_away": "import os\nos.chdir('/')",
        "fails": "raise RuntimeError('no')",
        "ends": "raise SystemExit(3)",
        **({"selectors": ""} if "selectors" in source else {}),
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    script = tmp_path / "script.py"
    script.write_text(source)
    words = [sys.executable, "-c", "import selectors\n" + UNFIT, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert said in done.stdout, done.stdout + done.stderr


LATE = """
import os, sys
from fsdp_demo.launch import preload
preload.LATE = {"first": ("late1",), "named": ("late2",), "json": ("late3",), "absent": ("late4",)}
preload.preload(sys.argv[1], dict(os.environ), lambda: False)
print(*sorted(name for name in sys.modules if name.startswith("late")))
"""


def test_what_packages_import_late_is_imported_where_the_script_has_them(tmp_path: Path) -> None:
    for name in ("first", *(f"late{n}" for n in range(1, 5))):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "named.py").write_text("import first")
    script = tmp_path / "script.py"
    script.write_text("import named")
    words = [sys.executable, "-c", "import json\n" + LATE, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "late1 late2\n", done.stderr


def test_options_of_the_interpreter_are_not_those_of_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    words = [sys.executable, "-W", "ignore", "-c", UNFIT, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "python was started with -W\n", done.stderr


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("'''Doc.'''\nfrom __future__ import annotations\nimport a\nfrom b import c", 2),
        ("import a\nX = 1\nY: int = 2\ndef f(): pass\nclass A: pass\nimport b", 2),
        ("import a\nimport os\nos.environ['X'] = '1'\nimport b", 2),
        ("import a\nX = f()\nimport b", 1),
        ("import a\n@f\ndef g(): pass\nimport b", 1),
        ("import gc\nif __name__ == '__main__':\n    gc.disable()\nimport b", 2),
        ("import gc\nif __name__ == '__main__':\n    f()\nimport b", 1),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nimport b", 2),
        ("import a\nimport sys\nsys.path.insert(0, 'x')\nimport b", 2),
    ],
)
def test_imports_up_to_the_first_statement_that_does_something(source: str, found: int) -> None:
    assert len(list(imports(source))) == found


def test_the_recipe_imports_all_it_needs_at_its_top() -> None:
    source = (Path(__file__).parents[2] / "recipes/pretrain.py").read_text()
    top = [s for s in ast.parse(source).body if isinstance(s, (ast.Import, ast.ImportFrom))]
    assert len(list(imports(source))) == len(top) - 1  # but annotations of the future


def test_variables_that_imports_set_are_those_of_a_rank() -> None:
    changed = {"NEW": (None, "1"), "OLD": ("a", "b"), "GONE": ("x", None)}
    imported = Imported("s.py", [], read={"OMP_NUM_THREADS": "1", "RANK": None}, changed=changed)
    given = {"OLD": "a", "GONE": "x", "OMP_NUM_THREADS": "1"}
    assert imported.environ(given) == {**given, "NEW": "1", "OLD": "b"}
    assert imported.environ({"OLD": "mine"})["OLD"] == "mine"
    assert imported.other(given) == []
    assert imported.other({**given, "OMP_NUM_THREADS": "2"}) == ["OMP_NUM_THREADS"]
    assert imported.other({**given, "RANK": "0", "MKL_NUM_THREADS": "2"}) == [
        "MKL_NUM_THREADS",
        "RANK",
    ]


def test_ranks_that_may_use_a_gpu_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "may_have_gpus", lambda: True)
    out = io.StringIO()
    supervisor = Supervisor(Rehearsal(2, 1, (__file__,), "torchrun", fork=True), out)
    supervisor.share_imports()
    assert supervisor.template is None
    assert "each rank imports by itself: it may use a GPU" in out.getvalue()
    supervisor.selector.close()
    supervisor.folder.rmdir()


def test_a_script_that_is_no_python_file_is_started_as_always(
    run_id: str,
    tmp_path: Path,
) -> None:
    script = tmp_path / "script"
    script.write_text("print('it', 'runs')")
    process = rehearsal(run_id, script, "--procs", "1", "--launcher", "torchrun")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"[rehearse] each rank imports by itself: {script} is not a .py file" in output
    assert output.count("it runs") == 2, output


def test_whatever_hinders_a_fork_the_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a /proc that lacks what is read there."""

    def preload(*args: object, **options: object) -> None:
        raise FileNotFoundError(2, "No such file", "/proc/self/task/1/children")

    monkeypatch.setattr(starting, "preload", preload)
    template, lines = starting.share_imports("x.py", 1, lambda w, t: 0, "m", {}, lambda: False)
    assert template is None and len(lines) == 1
    assert lines[0].startswith("each rank imports by itself: FileNotFoundError: ")
