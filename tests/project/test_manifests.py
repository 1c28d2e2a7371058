"""The recipes in configs/launch: each manifest is valid by its program's own schema, and everything that it and its page name exists."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from shoal import config as configuration
from shoal import guest
from shoal.cli import main as cli
from shoal.core.leader.rules.removal import LEAVE_S
from shoal.launcher.invite_text import INVITE_VARIABLE, without_invite
from shoal.launcher.watching.members import LAST_REPLICA_S
from shoal.transport import addresses

ROOT = Path(__file__).parents[2]
KUBERNETES, SKYPILOT = ROOT / "configs/launch/kubernetes", ROOT / "configs/launch/skypilot"
RUN = KUBERNETES / "run.toml"
RELEASE = "1.34"  # the oldest in which every field is stable
OF_LIBRARIES = {"HOME", "NUMBA_CACHE_DIR"}  # environment of what Shoal uses
SAVE_S = 600.0  # launcher.SAVE_S, whose module imports torch
Document = dict[str, Any]


def documents() -> list[Document]:
    names = [name for name in sorted(KUBERNETES.glob("*.yaml")) if name.name != "kustomization.yaml"]
    return [document for name in names for document in yaml.safe_load_all(name.read_text())]


def pods() -> list[tuple[str, Document]]:
    """Name and specification of the pods that a Job or a Deployment makes."""
    owners = (each for each in documents() if each["kind"] in ("Job", "Deployment"))
    return [(each["metadata"]["name"], each["spec"]["template"]["spec"]) for each in owners]


def named(kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents() if each["kind"] == kind}


def tasks() -> list[Document]:
    return [yaml.safe_load(path.read_text()) for path in sorted(SKYPILOT.glob("*.yaml"))]


def commands() -> Iterator[list[str]]:
    """Every `shoal` command line of the manifests, and of the pages about them."""
    for _, pod in pods():
        (container,) = pod["containers"]
        yield container["args"]
        for probe in ("startupProbe", "livenessProbe"):
            program, *words = container[probe]["exec"]["command"]
            assert program == "shoal"
            yield words
    texts = [task["run"] for task in tasks()]
    for page in ("kubernetes", "skypilot"):
        texts += re.findall(r"```\n(.*?)```", (ROOT / f"docs/launch/{page}.md").read_text(), re.DOTALL)
    for line in itertools.chain.from_iterable(text.replace("\\\n", " ").splitlines() for text in texts):
        for match in re.finditer(r"(?<=[/ ])shoal ((?:run|join|launch|invite|status|watch)\b[^|&;#']*)", f" {line}"):
            yield [word for word in shlex.split(match[1]) if word != "$notice"]


@pytest.mark.parametrize(
    "document", documents(), ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_a_manifest_is_valid_by_the_schema_of_kubernetes(document: Document) -> None:
    kubernetes_validate.validate(document, RELEASE, strict=True)


def test_a_field_that_kubernetes_does_not_have_is_seen() -> None:
    (founder,) = named("Job").values()
    founder["spec"]["template"]["spec"]["terminationGracePeriod"] = 10
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(founder, RELEASE, strict=True)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_a_command_line_is_one_that_shoal_has(words: list[str]) -> None:
    name, *rest = words
    parser = argparse.ArgumentParser(exit_on_error=False)
    cli.command(name).arguments(parser)
    args = parser.parse_intermixed_args(rest)
    settings = without_invite(
        [
            word.replace("$(POD_IP)", "10.0.0.1")
            for word in getattr(args, "settings", None) or getattr(args, "words", [])
        ]
    )
    if name in ("run", "invite"):
        assert (configuration.load(RUN, settings)).run.name == "launched"
    for setting in settings:
        assert setting.partition("=")[0] in guest.ADAPTABLE, setting


def test_there_are_commands_to_look_at() -> None:
    names = [words[0] for words in commands()]
    assert {"run", "join", "launch", "invite", "status"} <= set(names) and len(names) >= 10


def test_the_files_of_the_recipe_are_applied_and_whatever_a_pod_names_is_there() -> None:
    tree = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert sorted(tree["resources"]) == sorted(
        path.name for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml"
    )
    maps = {each["name"]: each["files"] for each in tree["configMapGenerator"]}
    assert all((KUBERNETES / file).exists() for files in maps.values() for file in files)
    images = {each["name"] for each in tree["images"]}
    for name, pod in pods():
        (container,) = pod["containers"]
        assert container["image"] in images
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == set(volumes), name
        for volume in volumes.values():
            assert volume.get("configMap", {"name": "shoal-run"})["name"] in maps
            assert volume.get("persistentVolumeClaim", {"claimName": "shoal-runs"})["claimName"] in named(
                "PersistentVolumeClaim"
            )
    (network,) = named("NetworkPolicy").values()
    for each in (*named("Job").values(), *named("Deployment").values()):
        labels = each["spec"]["template"]["metadata"]["labels"].items()
        assert network["spec"]["podSelector"]["matchLabels"].items() <= labels
        if "selector" in each["spec"]:
            assert each["spec"]["selector"]["matchLabels"].items() <= labels
    (service,) = named("Service").values()
    assert (
        service["spec"]["selector"].items()
        <= named("Job")["shoal-founder"]["spec"]["template"]["metadata"]["labels"].items()
    )
    (budget,) = named("PodDisruptionBudget").values()
    assert budget["spec"]["selector"] == named("Deployment")["shoal-peers"]["spec"]["selector"]


def test_every_port_is_one_that_a_peer_listens_on() -> None:
    network = configuration.load(RUN, ()).network
    ports = addresses.ports(network.transport, network.discovery, network.port)
    for _, pod in pods():
        assert [each["containerPort"] for each in pod["containers"][0]["ports"]] == ports
    (service,) = named("Service").values()
    assert [each["port"] for each in service["spec"]["ports"]] == ports
    (policy,) = named("NetworkPolicy").values()
    for rule in (policy["spec"]["ingress"][0], policy["spec"]["egress"][0]):
        (span,) = rule["ports"]
        assert list(range(span["port"], span["endPort"] + 1)) == ports
    assert all(task["resources"]["ports"] == ports for task in tasks())
    page = (ROOT / "docs/launch/kubernetes.md").read_text()
    assert f"--via {service['metadata']['name']}:{ports[-1]}" in page, "a joiner asks the directory first"


def test_a_pod_has_as_long_as_its_peer_needs_to_leave() -> None:
    grace_s = {name: pod["terminationGracePeriodSeconds"] for name, pod in pods()}
    assert grace_s["shoal-peers"] >= LAST_REPLICA_S + LEAVE_S
    source = (ROOT / "src/shoal/launcher/launcher.py").read_text()
    assert f"SAVE_S = {SAVE_S}" in source and grace_s["shoal-founder"] >= SAVE_S + LEAVE_S


def test_pods_have_no_rights_and_write_to_volumes_only() -> None:
    """The namespace enforces Pod Security's profile `restricted`; the rest is ours."""
    assert named("Namespace")["shoal"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods():
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000, (
            "as in the Dockerfile"
        )
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not pod["automountServiceAccountToken"] and not any("hostPath" in volume for volume in pod["volumes"])
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), name
        assert "nvidia.com/gpu" in container["resources"]["limits"]


def test_environments_are_known_and_the_invite_is_in_no_argument() -> None:
    for _, pod in pods():
        (container,) = pod["containers"]
        for each in container["env"]:
            used = f"$({each['name']})" in " ".join(container["args"])
            assert used or each["name"] in {INVITE_VARIABLE, *OF_LIBRARIES}, each
            if each["name"] == INVITE_VARIABLE:
                assert set(each["valueFrom"]) == {"secretKeyRef"} and not each["valueFrom"]["secretKeyRef"].get(
                    "optional"
                )
        assert "invite" not in " ".join(container["args"]).lower()
    for task in tasks():
        assert INVITE_VARIABLE not in task["run"] and task.get("secrets", {}) in ({}, {INVITE_VARIABLE: None})


def test_a_peer_of_skypilot_heeds_the_notice_of_every_cloud_that_has_one() -> None:
    from shoal.launcher.pools import notice

    (run,) = (task["run"] for task in tasks() if task["resources"]["use_spot"])
    for cloud, known in {"AWS": "aws", "GCP": "gcp", "Azure": "azure", "Lambda": ""}.items():
        script = run.replace("exec ~/shoal/bin/shoal", "echo")
        info = json.dumps({"cluster_name": "a", "cloud": cloud})  # as SkyPilot writes it
        said = subprocess.run(
            ["bash", "-c", script], env={"HOME": "/", "SKYPILOT_CLUSTER_INFO": info}, capture_output=True, text=True
        )
        words = said.stdout.split()
        assert said.returncode == 0 and words[:2] == ["launch", "local"], said.stderr
        assert (f"--notice {known}" in said.stdout) == bool(known) and (
            known or known in notice.CLOUDS or "--notice" not in words
        )


SKY_CHECK = """
import sys, yaml, sky
from sky.utils import common_utils, schemas
for path in sys.argv[1:]:
    with open(path) as file:
        tree = yaml.safe_load(file)
    common_utils.validate_schema(tree, schemas.get_task_schema(), f"{path}: ")
    common_utils.validate_schema(tree["resources"], schemas.get_resources_schema(), f"{path}: ")
    print(sky.Task.from_yaml(path).name)
"""


@pytest.mark.slow
def test_a_task_is_valid_by_skypilot(tmp_path: Path) -> None:
    python = ROOT / "build/skypilot/bin/python"
    if not python.exists() and shutil.which("sky") is None:
        pytest.skip("needs SkyPilot in build/skypilot (tools/launch.sh installs it)")
    files = [str(path) for path in sorted(SKYPILOT.glob("*.yaml"))]
    environment = {"HOME": str(tmp_path), INVITE_VARIABLE: "shoal1x"}
    done = subprocess.run([python, "-c", SKY_CHECK, *files], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-2:] == ["shoal-founder", "shoal-peer"]
    broken = tmp_path / "broken.yaml"
    broken.write_text(Path(files[1]).read_text().replace("use_spot", "spot_only"))
    done = subprocess.run([python, "-c", SKY_CHECK, str(broken)], env=environment, capture_output=True, text=True)
    assert done.returncode and "spot_only" in done.stderr
