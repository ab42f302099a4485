"""The start of an island's launcher, and the imports that all launchers and ranks of a rehearsal
share.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping

from .forking import Forked, Template
from .preload import CannotFork, preload
from .processes import end_with_parent

_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"


def start(
    command: list[str], env: Mapping[str, str], template: Template | None, *, apart: bool = False
) -> Forked | subprocess.Popen[bytes]:
    """Start an island's launcher, forked where there is a template. It is told to end when this
    process is gone.

    Args:
        command: `PYTHON -m fsdp_demo.launch WORDS`.
        apart: in a session of its own, without input, and with pipes for its output.
    """
    if template is not None:
        try:
            return template.fork(
                lambda: template.launch(command[3:], template),
                env,
                command,
                pipes=apart,
                session=apart,
                with_parent=True,
            )
        except CannotFork as reason:
            sys.stderr.write(f"fsdp_demo.launch: each rank imports by itself: {reason}\n")
    pipe = subprocess.PIPE if apart else None
    # A session of its own: Ctrl-C in the terminal reaches only this process, which then ends the
    # others in order.
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL if apart else None,
        start_new_session=apart,
        stdout=pipe,
        stderr=pipe,
        preexec_fn=end_with_parent,
    )


def share_imports(
    script: str,
    procs: int,
    launch: Callable[[list[str], Template], int],
    module: str,
    env: Mapping[str, str],
    stop: Callable[[], bool],
) -> tuple[Template | None, list[str]]:
    """Make the imports of launchers and ranks in this process.

    Args:
        procs: ranks of an island.
        launch: `run.main`, for the launchers.
        module: main module of the launcher.
        env: variables of all ranks.
        stop: asked between two imports; True breaks off.

    Returns:
        What to fork them from, None where they must be processes of their own; and lines to show.
    """
    lines: list[str] = []
    try:
        if sys.platform != "linux":
            raise CannotFork(f"forking is for Linux, this is {sys.platform}")
        with _output(lines):
            last = ("torch.distributed.run", _AGENT, module)
            imported = preload(script, env, stop, first=("torch",), last=last)
        made = Template(imported, procs, launch)
    except CannotFork as reason:
        return None, [*lines, f"each rank imports by itself: {reason}"]
    except Exception as error:  # whatever this machine lacks for it, ranks can do without
        why = f"{type(error).__name__}: {error}"
        return None, [*lines, f"each rank imports by itself: {why}"]
    return made, [*lines, f"imports for all ranks took {imported.seconds:.1f} s"]


@contextlib.contextmanager
def _output(lines: list[str]) -> Iterator[None]:
    """What is written to the terminal meanwhile becomes lines."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as file:
        try:
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for fd, old in zip((1, 2), kept, strict=True):
                os.dup2(old, fd)
                os.close(old)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
