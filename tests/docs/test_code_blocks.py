"""Code in README.md, docs/*.md and recipes/README.md: python runs, yaml and json are parsed,
commands name what exists.

What is not run says why in the line above its fence: `<!-- not run: REASON -->`. `text` is never
run.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fsdp_demo import cli

from ..support import pages
from ..support.threads import LAZY

RUNNER = Path(pages.__file__).with_name("run_blocks.py")
PARSED = {"yaml": yaml.safe_load, "json": json.loads}
# what a page may need beyond the core
OPTIONAL = ("accelerate", "transformers", "datasets", "deepspeed", "lightning", "matplotlib")
LAUNCHER = tuple("ISLAND_ ACCELERATE_ FSDP_ RANK LOCAL_ WORLD_SIZE MASTER_ DS_ACCELERATOR".split())

ALL = [pytest.param(page, id=pages.name(page)) for page in pages.pages()]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def python_of(page: Path) -> list[pages.Block]:
    """The blocks of a page that are run."""
    return [b for b in pages.blocks(read(page)) if b.language == "python" and b.not_run is None]


# ---- how pages are read ------------------------------------------------------------------------

PAGE = """
<!-- not run: needs a GPU -->
```bash
A=1 fsdp-demo rehearse --islands 2 \\
    --procs 1 -- recipes/pretrain.py --steps 3 | tee log   # a comment
```

* In a list:

    <!-- run first: some/file.py -->
    ```python title="a.py"
    x = 1
    ```

````text
```python
no code
```
````

Take `fsdp-demo presets demo --yaml`, not `fsdp-demo`.
"""


def test_code_blocks_are_found_with_their_marks() -> None:
    """Blocks of a page are found with their languages, lines and marks."""
    bash, python, text = pages.blocks(PAGE)
    assert (bash.language, bash.line, bash.not_run, bash.first) == ("bash", 4, "needs a GPU", None)
    assert (python.language, python.line, python.code) == ("python", 12, "x = 1\n")
    assert python.first == "some/file.py"
    assert (text.language, text.not_run) == ("text", None) and "no code" in text.code
    assert PAGE.splitlines()[bash.line - 1].startswith("A=1")
    assert PAGE.splitlines()[python.line - 1].strip() == "x = 1"


def test_code_blocks_commands_are_found() -> None:
    """Commands are found in blocks and in sentences."""
    first = "A=1 fsdp-demo rehearse --islands 2 --procs 1 -- recipes/pretrain.py --steps 3"
    found = [first, "tee log", "fsdp-demo presets demo --yaml"]
    assert list(pages.commands(PAGE)) == [command.split() for command in found]


def test_code_blocks_wrong_command_is_found() -> None:
    """A command with an unknown name, flag or file is found."""
    for line in RIGHT:
        assert not problems(line.split()), line
    for line in WRONG:
        assert problems(line.split()), line


RIGHT = [
    "fsdp-demo rehearse --islands 2 --procs 1 -- recipes/pretrain.py --steps 3 --no-shard "
    "--set period=20",
    "python -m fsdp_demo.launch --restarts 9 torchrun --nproc-per-node 8 recipes/pretrain.py "
    "--resume auto",
    "bash recipes/quickstart.sh --compare full,demo --batch-size 4",
]
WRONG = [
    "fsdp-demo rehears --procs 1",
    "fsdp-demo store --bnd x",
    "bash recipes/quickstrat.sh",
    "X=recipes/exchange/demo.yml bash a.sh",
    "python recipes/pretrain.py --step-count 3",
    "bash recipes/quickstart.sh --comparison full",
    "python -m fsdp_demo.launch --restart 1 torchrun x.py",
]


# ---- rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ALL)
def test_code_blocks_run_or_say_why_not(page: Path) -> None:
    """Each block is run, parsed or marked with a reason."""
    wrong = []
    for block in pages.blocks(read(page)):
        at = f"{pages.name(page)}:{block.line} ({block.language or 'no language'})"
        if block.not_run == "":
            wrong.append(f"{at}: its mark gives no reason")
        elif block.not_run is None and block.language not in ("python", "text", *PARSED):
            wrong.append(
                f"{at}: is python, text, yaml or json, or has <!-- not run: REASON --> in the line "
                "above"
            )
        if block.first is not None and not (pages.ROOT / block.first).is_file():
            wrong.append(f"{at}: there is no {block.first}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", ALL)
def test_code_blocks_yaml_and_json_are_well_formed(page: Path) -> None:
    """Blocks of yaml and json are well-formed."""
    for block in pages.blocks(read(page)):
        if block.language in PARSED and block.not_run is None:
            assert PARSED[block.language](block.code) is not None, (
                f"{pages.name(page)}:{block.line} is empty"
            )


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """The process that forks for each page: torch and what else is imported takes longer than most
    pages.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER)}
    env |= dict(PYTHONPATH=str(pages.ROOT), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    env |= dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    env |= {"HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    env["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow starts a thread at its import
    imported = [*LAZY, *(name for name in OPTIONAL if importlib.util.find_spec(name))]
    how = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    process = subprocess.Popen([sys.executable, str(RUNNER), *imported], env=env, **how)
    yield process
    os.killpg(process.pid, signal.SIGKILL)  # with a page that hangs
    process.communicate()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page", [pytest.param(p, id=pages.name(p)) for p in pages.pages() if python_of(p)]
)
def test_code_blocks_python_runs(page: Path, tmp_path: Path, runner: subprocess.Popen[str]) -> None:
    """The python of a page runs: all blocks in one namespace, in a process without islands and
    without a network, in an empty folder.
    """
    parts = []
    for block in python_of(page):
        if block.first is not None:
            parts.append((block.first, 1, (pages.ROOT / block.first).read_text(encoding="utf-8")))
        parts.append((pages.name(page), block.line, block.code))
    imported = {
        word
        for _, _, code in parts
        for word in re.findall(r"^\s*(?:from|import) ([\w, ]+)", code, re.MULTILINE)
    }
    needed = [
        name for name in OPTIONAL if any(re.search(rf"\b{name}\b", words) for words in imported)
    ]
    if absent := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(absent)}")
    folder, log = tmp_path / "empty", tmp_path / "log"
    folder.mkdir()
    told = {"blocks": parts, "folder": str(folder), "log": str(log)}
    assert runner.stdin is not None and runner.stdout is not None
    print(json.dumps(told), file=runner.stdin, flush=True)
    status = runner.stdout.readline().strip()
    assert status == "0", f"exit status {status}\n{log.read_text(errors='replace')[-8000:]}"


@pytest.mark.parametrize("page", ALL)
def test_code_blocks_commands_name_what_exists(page: Path) -> None:
    """Commands on a page name programs, flags and files that exist."""
    wrong = [
        f"{' '.join(command)}\n    {problem}"
        for command in pages.commands(read(page))
        for problem in problems(command)
    ]
    assert not wrong, "\n".join(wrong)


# ---- commands ----------------------------------------------------------------------------------


def problems(command: list[str]) -> list[str]:
    """Paths, subcommands and flags of ours in a command that do not exist."""
    found = [
        f"there is no {path}"
        for word in command
        for path in _paths(word)
        if not (pages.ROOT / path).exists()
    ]
    rest = [re.sub(r"^.*/(?=fsdp-demo$)", "", word) for word in command]
    if "fsdp_demo.cli" in rest:
        rest = ["fsdp-demo", *rest[rest.index("fsdp_demo.cli") + 1 :]]
    if "fsdp-demo" in rest:
        ours = rest[rest.index("fsdp-demo") + 1 :]
        cut = ours.index("--") if "--" in ours else len(ours)
        found += _of_cli(ours[:cut])
    if "fsdp_demo.launch" in rest:
        after = rest[rest.index("fsdp_demo.launch") + 1 :]
        launchers = ("torchrun", "accelerate", "deepspeed", "python")
        ours = itertools.takewhile(lambda word: word not in launchers, after)
        found += _unknown("fsdp_demo/launch/__main__.py", list(ours))
    for at, word in enumerate(rest):
        if re.match(r"^(recipes|benchmarks)/.*\.(py|sh)$", word) and (pages.ROOT / word).is_file():
            found += _unknown(word, rest[at + 1 :])
            break
    return found


def _paths(word: str) -> list[str]:
    """Paths of this repository in a word; none where the shell would still change it."""
    if re.search(r"[*{}$<>]", word):
        return []
    return re.findall(r"(?<![\w./-])(?:recipes|benchmarks|docs|tests)/[\w./-]*\w", word)


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def _of_cli(words: list[str]) -> list[str]:
    """Words after `fsdp-demo`."""
    if not words or words[0] in ("--version", "--help", "..."):
        return []
    parser = _subparsers().get(words[0])
    if parser is None:
        return [f"fsdp-demo {words[0]} is no subcommand"]
    flags = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    unknown = flags - set(parser._option_string_actions)
    return [f"fsdp-demo {words[0]} has no {flag}" for flag in sorted(unknown)]


def _unknown(script: str, words: list[str]) -> list[str]:
    """Flags that a script does not know, by its text and that of the recipes whose options it takes
    along.
    """
    text = "\n".join(
        (pages.ROOT / path).read_text(encoding="utf-8")
        for path in (script, *SHARED.get(script, ()))
    ).replace("[-_]", "-")
    flags = [word.partition("=")[0] for word in words if re.match(r"^--\w", word)]
    return [f"{script} has no {flag}" for flag in flags if not _knows(script, text, flag)]


PARTS = ["recipes/pretrain_parts.py", "fsdp_demo/integrations/arguments.py"]

SHARED = {
    "recipes/pretrain.py": [*PARTS],
    "recipes/pretrain_trainer.py": ["recipes/trainer_parts.py", *PARTS],
    "recipes/pretrain_deepspeed.py": ["recipes/deepspeed_parts.py", *PARTS],
    "recipes/check.sh": ["recipes/check.py"],
}


def _knows(script: str, text: str, flag: str) -> bool:
    field = flag[2:].removeprefix("no-").replace("-", "_")
    if re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) or re.search(
        rf"^    {field}:", text, re.MULTILINE
    ):
        return True
    if script != "recipes/pretrain_trainer.py":
        return False
    transformers = pytest.importorskip("transformers")
    return field in transformers.TrainingArguments.__dataclass_fields__
