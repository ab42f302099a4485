"""recipes/skypilot and recipes/dstack: the files by the parsers of SkyPilot and dstack, where these
are installed, and their commands as processes of this machine. No cloud was asked.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.played import ROOT, SMALL, Played

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

SKYPILOT, DSTACK = ROOT / "recipes" / "skypilot" / "islands.yaml", ROOT / "recipes" / "dstack"
TOKEN = "a secret of this test"
STUB = """#!PYTHON
import json, os, sys
if sys.argv[1] == "run":  # no address at the first question
    data = {"internal_ip": "ADDRESS"} if os.path.exists("asked") else None
    open("asked", "w")
    print(json.dumps({"jobs": [{"job_submissions": [{"job_provisioning_data": data}]}]}))
else:
    said = {name: value for name, value in os.environ.items() if name.startswith("ISLAND_")}
    print(json.dumps([sys.argv[1:], said]), file=open("applied", "a"))
"""


def test_skypilot_file_is_a_job_group_of_two_regions():
    """SkyPilot reads the file as a job group whose islands are in two regions, with the token of
    the command line; an option that it does not know is refused.
    """
    pytest.importorskip("sky", reason="SkyPilot is not installed")
    from sky.utils import dag_utils

    def load(text):
        return dag_utils.load_job_group_from_yaml_str(text, None, [("ISLAND_TOKEN", TOKEN)])

    group = load(SKYPILOT.read_text())
    assert group.is_job_group() and group.inter_connection is False
    assert group.primary_tasks == ["island0", "island1"]
    assert all(task.secrets["ISLAND_TOKEN"] for task in group.tasks)
    islands = [resource for task in group.tasks[1:] for resource in task.resources]
    assert len({resource.region for resource in islands}) == 2
    assert all(r.job_recovery["recover_on_exit_codes"] == [75] for r in islands)
    with pytest.raises(ValueError, match="use_spots"):
        load(SKYPILOT.read_text().replace("use_spot:", "use_spots:"))


@pytest.mark.parametrize("name", ["store", "island"])
def test_dstack_file_is_a_task(name):
    """The parser of dstack reads each file as a task; a name that it does not know is refused."""
    # its folder here is a package of that name, too, where `recipes` is on the path
    pytest.importorskip("dstack._internal", reason="dstack is not installed")
    from dstack._internal.core.errors import ConfigurationError
    from dstack._internal.core.models.configurations import parse_apply_configuration

    found = yaml.safe_load((DSTACK / f"{name}.dstack.yml").read_text())
    task = parse_apply_configuration(dict(found))
    assert task.type == "task" and "ISLAND_TOKEN" in task.env.root
    with pytest.raises(ConfigurationError, match="comands"):
        parse_apply_configuration(found | {"comands": []})


@pytest.fixture
def machines(tmp_path):
    """Machines of a cloud, where `hostname` and `dstack` are small scripts."""
    made = Played(tmp_path, "outputs/islands")
    stub = STUB.replace("PYTHON", sys.executable).replace("ADDRESS", made.address(0))
    hostname = f"#!/bin/sh\necho {made.address(0)} 10.0.0.9\n"
    for name, text in {"hostname": hostname, "dstack": stub}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with made:
        yield made


def train(machines, tasks):
    """The commands of a store and two islands, each with its variables, to the end."""
    small = {"MODEL": "tiny", "STEPS": "4", "OPTIONS": SMALL}
    for text, env in tasks:
        assert "store" in text or small.keys() <= env.keys()
        machines.spawn(["bash", "-c", text], {n: str(v) for n, v in (env | small).items()})
    assert machines.statuses(*machines.running[1:]) == [0, 0], machines.log()
    machines.agree(4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_skypilot_tasks_find_the_store_and_train(machines, tmp_path):
    """The tasks of the job group find the store by the bucket, and train as islands that agree;
    the islands differ in name, place and rank only.
    """
    header, store, *islands = yaml.safe_load_all(SKYPILOT.read_text())
    assert [island.pop("name") for island in islands] == header["primary_tasks"]
    assert len({island["resources"].pop("infra") for island in islands}) == 2
    envs = [{}, *(dict(island["envs"]) for island in islands)]
    assert [island["envs"].pop("ISLAND_RANK") for island in islands] == [0, 1]
    assert islands[0] == islands[1]
    (tmp_path / "rendezvous").mkdir()
    more = {"SKYPILOT_MANAGED_JOB_ID": 7, "ISLAND_TOKEN": TOKEN}
    texts = [t["run"].replace("/rendezvous", f"{tmp_path}/rendezvous") for t in (store, *islands)]
    train(machines, [(text, env | more) for text, env in zip(texts, envs, strict=True)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dstack_runs_train_in_two_regions(machines, tmp_path):
    """One command starts a run for the store and one for each region, which get its address and one
    token, and train as islands that agree. Without regions it starts nothing.
    """

    def script(**regions):
        how = dict(cwd=tmp_path, env=machines.env | regions, timeout=60)
        return subprocess.run(["bash", str(DSTACK / "islands.sh")], **how).returncode

    assert script() == 2 and not (tmp_path / "applied").exists()
    assert script(REGIONS="here there") == 0
    tasks, told = [], []
    for line in (tmp_path / "applied").read_text().splitlines():
        words, shell = json.loads(line)
        options = dict(zip(words[3::2], words[4::2], strict=True))
        told.append((options["--name"], options["--region"]))
        file = yaml.safe_load(Path(options["--file"]).read_text())
        pairs = (entry.partition("=") for entry in file["env"])
        env = {name: value if given else shell[name] for name, given, value in pairs}
        tasks.append((" && ".join(file["commands"]), env))
    regions = ("islands-store", "here"), ("islands-island0", "here"), ("islands-island1", "there")
    assert tuple(told) == regions
    train(machines, tasks)
