"""recipes/kubernetes: its files by the schemas of the CRDs, and the commands of its pods as processes
of this machine, with the variables that the files give them. The test plays the cluster: fields of
pods, claims, restarts. No API server was asked, and rules in CEL (`x-kubernetes-validations`) are
not run.
"""

import copy
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
FILES = ROOT / "recipes" / "kubernetes"
CRDS = Path(os.environ.get("FSDP_DEMO_CRDS", ROOT.parent / "shared" / "data" / "crds"))
SMALL = "--sequence-length 32 --batch-size 1 --eval-batches 1 --eval-every 0 --log-every 2 "
SMALL += "--set schedule.sync_every=2"


def documents(name):
    return {found["kind"]: found for found in yaml.safe_load_all((FILES / name).read_text())}


def job_set(name):
    """The JobSet of a file; of a TrainJob the one that Kubeflow Trainer makes of its runtime."""
    found = documents(name)
    if name == "jobset.yaml":
        return found["JobSet"]["spec"]
    spec, trainer = found["TrainingRuntime"]["spec"], found["TrainJob"]["spec"]["trainer"]
    made = copy.deepcopy(spec["template"]["spec"])
    node = job_of(made, "node")["template"]
    assert node["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = node["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"  # the one name that the trainer knows
    sets = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"]}
    container["env"] += [*trainer["env"], *({"name": f"PET_{n}", "value": v} for n, v in sets.items())]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}
    container["env"].append(rank)
    return made


def job_of(spec, name):
    return next(job for job in spec["replicatedJobs"] if job["name"] == name)


# -- the files by their schemas ------------------------------------------------------------------


def closed(schema):
    """The schema, which refuses fields that it does not name, as an API server does."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


@functools.cache
def schemas():
    """The schemas of the CRDs, by version and kind."""
    if not CRDS.is_dir():
        pytest.skip(f"no folder {CRDS} with the CRDs: FSDP_DEMO_CRDS names it")
    found = {}
    for path in CRDS.glob("*.yaml"):
        crd = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
        for version in crd["versions"]:
            name = f"{crd['group']}/{version['name']}", crd["names"]["kind"]
            found[name] = closed(version["schema"]["openAPIV3Schema"])
    return found


def wrong_in(text):
    """What the schemas find in the documents of a file."""
    jsonschema = pytest.importorskip("jsonschema")
    found = []
    for document in yaml.safe_load_all(text):
        schema = schemas()[document["apiVersion"], document["kind"]]
        for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
            found.append(f"{'.'.join(map(str, error.absolute_path))}: {error.message}")
    return found


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_kubernetes_file_fits_its_schemas(name):
    """JobSet, TrainingRuntime and TrainJob fit the schemas of their CRDs, pods included; a wrong
    field, value or action does not.
    """
    text = (FILES / name).read_text()
    assert wrong_in(text) == []
    for right, wrong, said in [
        ("action: RestartJob}", "action: RestartIsland}", "'RestartIsland' is not one of"),
        ("terminationGracePeriodSeconds: 300", "terminationGracePeriod: 300", "was unexpected"),
        ("maxRestarts: 20", "maxRestarts: many", "'many' is not of type 'integer'"),
        ("{fieldPath: status.podIP}", "{path: status.podIP}", "'fieldPath' is a required property"),
    ]:
        assert right in text and any(said in line for line in wrong_in(text.replace(right, wrong)))


# -- what starts again ---------------------------------------------------------------------------


def after(spec, name, status):
    """What happens when a pod of this job ends so: its Job's own rules, then those of the set."""
    job = job_of(spec, name)["template"]["spec"]
    rules = [rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"]]
    refused = any(rule["operator"] == "In" and status in rule["values"] for rule in rules)
    if not refused and job.get("backoffLimitPerIndex"):
        return "RestartPod"
    reason = "PodFailurePolicy" if refused else "BackoffLimitExceeded"
    for rule in spec["failurePolicy"]["rules"]:
        reasons, targets = rule.get("onJobFailureReasons"), rule.get("targetReplicatedJobs")
        if reason in (reasons or [reason]) and name in (targets or [name]):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(("file", "name", "again"), [
    ("jobset.yaml", "island", "RestartJob"), ("trainjob.yaml", "node", "RestartPod"),
])  # fmt: skip
def test_kubernetes_status_decides_what_restarts(file, name, again):
    """Statuses 75 and 1 and a kill start the island alone again; 78 and 2 fail the whole set. The
    notice of a pod outlasts torch's, and that the one of the island.
    """
    spec = job_set(file)
    assert [after(spec, name, status) for status in (75, 1, 137)] == [again] * 3
    assert [after(spec, name, status) for status in (78, 2)] == ["FailJobSet"] * 2
    assert spec["successPolicy"]["targetReplicatedJobs"] == [name]
    pod = job_of(spec, name)["template"]["spec"]["template"]["spec"]
    env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    stop, kill = int(env["ISLAND_STOP"]), int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert stop < kill < pod["terminationGracePeriodSeconds"] and pod["restartPolicy"] == "Never"


# -- the pods as processes -----------------------------------------------------------------------


class Pods:
    """Pods of a JobSet as processes, each with a loopback address of its own, and claims as folders.

    Args:
        values: in place of those that the files give.
    """

    def __init__(self, spec, folder, **values):
        self.spec, self.folder, self.values, self.running = spec, folder, values, []
        number = os.getpid()
        self._net = f"127.{64 + number % 64}.{number // 64 % 256}"

    def start(self, name, index=0, attempt=0, **values):
        """A pod; index: of its Job, or of its node in the one Job of a TrainJob."""
        job = job_of(self.spec, name)
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        address = f"{self._net}.{len(self.running) + 2}" if name != "store" else f"{self._net}.1"
        fields = self._fields(job, index, attempt) | {"status.podIP": address}
        given = {e["name"]: self._value(e, fields) for e in container["env"]}
        changed = {k: str(v) for k, v in (self.values | values).items() if name != "store"}
        assert changed.keys() <= given.keys()
        env = {n: v for n, v in os.environ.items() if not n.startswith(("ISLAND_", "PET_"))}
        env |= dict(PATH=f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", PYTHONPATH=str(ROOT))
        # pods share this machine and have no GPU
        env |= dict(PET_MASTER_PORT=str(20000 + index), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
        env |= given | changed
        words = [re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], w) for w in container["command"]]
        for claim in container["volumeMounts"]:
            (self.folder / claim["name"]).mkdir(exist_ok=True)
            path, here = claim["mountPath"], str(self.folder / claim["name"])
            words = [word.replace(path, here) for word in words]
            env = {n: v.replace(path, here) if n in given else v for n, v in env.items()}
        with open(self.folder / "log", "a") as log:
            how = dict(stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
            self.running.append(subprocess.Popen(words, env=env, **how))
        return self.running[-1]

    def _fields(self, job, index, attempt):
        """Annotations as JobSet and Job write them. No name service: an address is the coordinator's."""
        assert self.spec["coordinator"] == {"replicatedJob": "store"}
        of_set = {"jobset-name": "islands", "coordinator": f"{self._net}.1", "job-index": index}
        of_set |= {"replicatedjob-name": job["name"], "job-restart-attempt": attempt}
        of_set |= {"replicatedjob-replicas": job.get("replicas", 1)}
        of_job = {"job-completion-index": index, "job-index-failure-count": attempt}
        names = {f"jobset.sigs.k8s.io/{n}": v for n, v in of_set.items()}
        names |= {f"batch.kubernetes.io/{n}": v for n, v in of_job.items()}
        return {f"metadata.annotations['{name}']": str(value) for name, value in names.items()}

    def _value(self, entry, fields):
        source = entry.get("valueFrom")
        if source is None:
            return str(entry["value"])
        if "fieldRef" in source:
            return fields[source["fieldRef"]["fieldPath"]]
        assert source == {"secretKeyRef": {"name": "islands", "key": "token"}}
        return "a secret of the cluster"

    def log(self):
        return (self.folder / "log").read_text()

    def kill(self, pod):
        """All processes of a pod at once, as when its node is gone."""
        import psutil

        tree = [psutil.Process(pod.pid)] if pod.poll() is None else []
        for process in [*tree, *(c for p in tree for c in p.children(recursive=True))]:
            process.kill()
        pod.wait(60)

    def reached(self, step, island=1):
        """Wait until the island has logged this step; its last one."""
        found = self.folder / "checkpoints" / "islands" / f"island{island}" / "metrics.jsonl"
        last, until = 0, time.monotonic() + 400
        while last < step:
            assert time.monotonic() < until and not any(p.poll() for p in self.running[-2:]), self.log()
            lines = found.read_text().rpartition("\n")[0].splitlines() if found.exists() else []
            last = json.loads(lines[-1])["step"] if lines else 0
            time.sleep(0.2)
        return last

    def ended(self, *pods):
        """Their statuses."""
        try:
            return [pod.wait(400) for pod in pods]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log()) from None

    def agree(self, steps):
        for island in range(2):
            path = self.folder / "checkpoints" / "islands" / f"island{island}" / "summary.json"
            found, facts = json.loads(path.read_text()), {"islands": 2, "steps": steps}
            assert (facts | {"digests_equal": True}).items() <= found.items()


@pytest.fixture
def pods(tmp_path):
    """Starts the store of a file's JobSet; all pods end with the test."""
    sets = []

    def make(file, **values):
        values = dict(MODEL="tiny", OPTIONS=SMALL) | values
        sets.append(Pods(job_set(file), tmp_path, **values))
        sets[-1].start("store")
        return sets[-1]

    yield make
    for made in sets:
        for pod in made.running:
            made.kill(pod)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_jobset_pods_lose_one_stop_and_resume(pods):
    """Two islands of the JobSet train; a killed one comes back as the set starts it again, and
    joins; SIGTERM ends both with 75; started again they go on to the end, and agree.
    """
    islands = pods("jobset.yaml", PROCS=1, STEPS=1_000_000)
    first, second = islands.start("island", 0), islands.start("island", 1)
    last = islands.reached(2)
    islands.kill(second)
    second = islands.start("island", 1, attempt=1)
    last = islands.reached(last + 20)
    for pod in (first, second):
        pod.send_signal(signal.SIGTERM)
    assert islands.ended(first, second) == [75, 75], islands.log()
    steps = islands.reached(last) + 40
    again = [islands.start("island", i, attempt=i + 1, STEPS=steps) for i in range(2)]
    assert islands.ended(*again) == [0, 0], islands.log()
    islands.agree(steps)
    assert "--from kubernetes: island 1 of 2, run islands, start 2" in islands.log()
    assert "resumed from checkpoint" in islands.log()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainjob_nodes_train_as_islands(pods):
    """The nodes of the TrainJob train as islands that agree."""
    islands = pods("trainjob.yaml", PET_NPROC_PER_NODE=1, STEPS=4)
    nodes = [islands.start("node", i) for i in range(2)]
    assert islands.ended(*nodes) == [0, 0], islands.log()
    islands.agree(4)
