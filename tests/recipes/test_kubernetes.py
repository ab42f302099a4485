"""recipes/kubernetes: its files by the schemas of the CRDs, and the commands of its pods as processes
with the variables that the files set. The test plays the cluster: fields of pods, claims, restarts.
No API server was asked, and rules in CEL (`x-kubernetes-validations`) are not run.
"""  # noqa: E501

import copy
import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.support.played import ROOT, SMALL, Played

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

FILES = ROOT / "recipes" / "kubernetes"
CRDS = Path(os.environ.get("FSDP_DEMO_CRDS", ROOT.parent / "shared" / "data" / "crds"))
COMPLETION = "batch.kubernetes.io/job-completion-index"


def closed(schema):
    """The schema, which refuses fields that it does not name, as an API server does."""
    if not isinstance(schema, dict):
        return schema
    more = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return more | {name: closed(part) for name, part in schema.items()}


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


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_kubernetes_file_fits_its_schemas(name):
    """JobSet, TrainingRuntime and TrainJob fit the schemas of their CRDs, pods included; a wrong
    field, value or action does not.
    """
    jsonschema = pytest.importorskip("jsonschema")

    def wrong_in(text):
        documents = [(d, schemas()[d["apiVersion"], d["kind"]]) for d in yaml.safe_load_all(text)]
        found = [jsonschema.Draft202012Validator(s).iter_errors(d) for d, s in documents]
        return [f"{list(e.absolute_path)}: {e.message}" for errors in found for e in errors]

    text = (FILES / name).read_text()
    assert wrong_in(text) == []
    for right, wrong, said in [
        ("action: RestartJob}", "action: RestartIsland}", "'RestartIsland' is not one of"),
        ("terminationGracePeriodSeconds: 300", "gracePeriod: 300", "'gracePeriod' was unexpected"),
        ("maxRestarts: 20", "maxRestarts: many", "'many' is not of type 'integer'"),
        ("{fieldPath: status.podIP}", "{path: status.podIP}", "'fieldPath' is a required property"),
    ]:
        assert right in text and any(said in line for line in wrong_in(text.replace(right, wrong)))


def job_set(name):
    """The jobs of a file by name, and the spec of its JobSet: that of a TrainJob as Kubeflow Trainer
    makes it of the runtime.
    """  # noqa: E501
    found = {d["kind"]: d["spec"] for d in yaml.safe_load_all((FILES / name).read_text())}
    spec = found["JobSet"] if "JobSet" in found else found["TrainingRuntime"]["template"]["spec"]
    jobs = {job["name"]: copy.deepcopy(job) for job in spec["replicatedJobs"]}
    if "TrainJob" in found:
        template, trainer = jobs["node"]["template"], found["TrainJob"]["trainer"]
        assert template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
        (container,) = template["spec"]["template"]["spec"]["containers"]
        assert container["name"] == "node"  # the trainer knows no other
        path = {"fieldPath": f"metadata.annotations['{COMPLETION}']"}
        rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": path}}
        sets = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"]}
        sets = [{"name": f"PET_{n}", "value": v} for n, v in sets.items()]
        container["env"] += [*trainer["env"], *sets, rank]
    return jobs, spec


def after(jobs, spec, name, status):
    """What happens when a pod of this job ends so: its Job's own rules, then those of the set."""
    job = jobs[name]["template"]["spec"]
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
    jobs, spec = job_set(file)
    assert [after(jobs, spec, name, status) for status in (75, 1, 137)] == [again] * 3
    assert [after(jobs, spec, name, status) for status in (78, 2)] == ["FailJobSet"] * 2
    assert spec["successPolicy"]["targetReplicatedJobs"] == [name]
    pod = jobs[name]["template"]["spec"]["template"]["spec"]
    env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    stop, kill = int(env["ISLAND_STOP"]), int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert stop < kill < pod["terminationGracePeriodSeconds"] and pod["restartPolicy"] == "Never"


class Pods(Played):
    """Pods of a file's JobSet; claims are folders. values: in place of those in the file."""

    def __init__(self, file, folder, **values):
        super().__init__(folder, "checkpoints/islands")
        (self.jobs, self.spec), self.values = job_set(file), {"MODEL": "tiny", "OPTIONS": SMALL}
        self.values |= values
        self.pod("store")

    def fields(self, name, index, attempt):
        """What the cluster writes into a pod; no name service: the coordinator is an address."""
        assert self.spec["coordinator"] == {"replicatedJob": "store"}
        said = {"jobset-name": "islands", "job-index": index, "job-restart-attempt": attempt}
        said |= {"coordinator": self.address(0), "replicatedjob-name": name}
        said |= {"replicatedjob-replicas": self.jobs[name].get("replicas", 1)}
        said = {f"jobset.sigs.k8s.io/{n}": v for n, v in said.items()}
        said |= {COMPLETION: index if name == "node" else 0}
        said |= {"batch.kubernetes.io/job-index-failure-count": attempt}
        address = self.address(0 if name == "store" else index + 1)
        annotations = {f"metadata.annotations['{n}']": str(v) for n, v in said.items()}
        return annotations | {"status.podIP": address}

    def pod(self, name, index=0, attempt=0, **values):
        """A pod; index: of its Job, or of its node in the one Job of a TrainJob."""
        (container,) = self.jobs[name]["template"]["spec"]["template"]["spec"]["containers"]
        fields = self.fields(name, index, attempt)
        env = {"JOB_COMPLETION_INDEX": fields[f"metadata.annotations['{COMPLETION}']"]}
        for entry in container["env"]:
            source = entry.get("valueFrom", {})
            assert source.get("secretKeyRef") in (None, {"name": "islands", "key": "token"})
            field = source.get("fieldRef", {}).get("fieldPath")
            env[entry["name"]] = fields[field] if field else entry.get("value", "secret of the set")
        values = self.values | values if name != "store" else {}
        assert values.keys() <= env.keys()
        env = {n: str(v) for n, v in (env | values).items()}
        words = container["command"]
        for claim in container["volumeMounts"]:
            here, path = self.folder / claim["name"], claim["mountPath"] + "/"
            here.mkdir(exist_ok=True)
            words = [word.replace(path, f"{here}/") for word in words]
            env = {n: v.replace(path, f"{here}/") for n, v in env.items()}
        return self.spawn(words, env)

    def reached(self, step):
        """Wait until island 1 has logged this step; its last one."""
        found, last = self.output / "island1" / "metrics.jsonl", 0
        until = time.monotonic() + 500
        while last < step:
            assert time.monotonic() < until, self.log()
            lines = found.read_text().rpartition("\n")[0].splitlines() if found.exists() else []
            last = json.loads(lines[-1])["step"] if lines else 0
            time.sleep(0.2)
        return last


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_jobset_pods_lose_one_stop_and_resume(tmp_path):
    """Two islands of the JobSet train; a killed one comes back as the set starts it again, and
    joins; SIGTERM ends both with 75; started again they go on to the end, and agree.
    """
    with Pods("jobset.yaml", tmp_path, PROCS=1, STEPS=1_000_000) as pods:
        first, second = pods.pod("island", 0), pods.pod("island", 1)
        pods.reached(2)
        pods.kill(second)
        last = pods.reached(2)
        second = pods.pod("island", 1, attempt=1)
        pods.reached(last + 2)
        for pod in (first, second):
            pod.send_signal(signal.SIGTERM)
        assert pods.statuses(first, second) == [75, 75], pods.log()
        steps = pods.reached(2) + 40
        again = [pods.pod("island", i, attempt=i + 1, STEPS=steps) for i in range(2)]
        assert pods.statuses(*again) == [0, 0], pods.log()
    pods.agree(steps)
    for said in ("epoch 2: island 1 (island1) joins", "resumed from checkpoint of step "):
        assert said in pods.log()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trainjob_nodes_train_as_islands(tmp_path):
    """The nodes of the TrainJob train as islands that agree."""
    with Pods("trainjob.yaml", tmp_path, PET_NPROC_PER_NODE=1, STEPS=4) as pods:
        assert pods.statuses(*(pods.pod("node", i) for i in range(2))) == [0, 0], pods.log()
    pods.agree(4)
