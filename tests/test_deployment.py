"""The files in deploy/ are what docs/deployment.md says, name what there is, and systemd takes its unit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.source_tree import ROOT
from triolet.cli import main

DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
MANIFEST = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")


FLAGS = {flag for option in main.commands["serve"].params for flag in option.opts}
VARIABLES = {f"TRIOLET_{flag.removeprefix('--').replace('-', '_').upper()}" for flag in FLAGS}


def test_the_unit_is_the_one_on_the_page() -> None:
    comment, _, unit = (DEPLOY / "triolet.service").read_text(encoding="utf-8").partition("\n")
    assert comment.startswith("#")
    assert f"```ini\n{unit}```" in PAGE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "triolet.service").read_text(encoding="utf-8")
    unit = tmp_path / "triolet.service"
    # A program that is there: systemd looks for it.
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text), encoding="utf-8")
    ran = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, [line for line in ran.stderr.splitlines() if "triolet.service" in line]) == (
        0,
        [],
    )


@pytest.mark.parametrize("text", [DOCKERFILE, (DEPLOY / "triolet.service").read_text(encoding="utf-8")])
def test_flags_and_variables_are_those_of_the_server(text: str) -> None:
    assert set(re.findall(r"(?<=[ \"])--(?:host|port|model|snapshot)\b", text)) <= FLAGS
    assert set(re.findall(r"TRIOLET_[A-Z_]+", text)) <= VARIABLES


def test_the_image_is_made_of_files_that_there_are() -> None:
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    sources = [name for names in copied for name in names if "--from=build" not in names]
    assert len(sources) >= 9
    assert [name for name in sources if not (ROOT / name).exists()] == []
    # Where the package consists of links, what they lead to is in the image, too.
    links = {path.resolve().relative_to(ROOT).parts[0] for path in (ROOT / "src/triolet").iterdir()}
    assert links <= set(sources)


# Programs of the image that would change this machine: it is looked whether they are there.
ONLY_LOOKED_FOR = ("apt-get", "useradd", "install")
SHIMS = {
    # What the image installs is installed here: pip says so, or that a version, a hash or a file is wrong.
    "pip": 'exec "$PYTHON" -m pip --disable-pip-version-check "$1" --dry-run --no-index "${@:2}"',
    # The compiled kernels of the wheel are tests/test_packaging.py's.
    "python": 'exec env TRIOLET_PURE_WHEEL=1 "$PYTHON" "$@" --no-isolation',
    **{name: f"test -x {shutil.which(name)}" for name in ONLY_LOOKED_FOR},
}


@pytest.mark.slow
def test_the_lines_of_the_dockerfile_run(tmp_path: Path) -> None:
    """Both stages, line by line, in a folder that stands for the root of the image."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in SHIMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "TORCH_INDEX": "https://example.invalid",
    }
    folder, ran = tmp_path, 0
    for line in re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "WORKDIR":
            folder = tmp_path / rest.lstrip("/")
            folder.mkdir()
        elif instruction == "COPY":
            copy_into(tmp_path, folder, rest.split())
        elif instruction == "RUN":
            rooted = re.sub(r"(?<![\w./-])/(tmp|wheels|data|models)\b", rf"{tmp_path}/\1", rest)
            ended = subprocess.run(
                ["sh", "-euc", rooted],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, (rest, ended.stdout, ended.stderr)
            ran += 1
    assert ran == len(re.findall("^RUN ", DOCKERFILE, re.MULTILINE)) == 4
    assert list((tmp_path / "tmp").iterdir()) == [], "the image keeps what only its making needs"
    [wheel] = (tmp_path / "wheels").glob("triolet-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"triolet/actors/__init__.py", "triolet/kernels/cpu/decoder.cpp"} <= set(archive.namelist())


def copy_into(image: Path, folder: Path, words: list[str]) -> None:
    """Copy as COPY does: from the source, or from the other stage, which has the same root here."""
    source = image if "--from=build" in words else ROOT
    *names, target = [word for word in words if not word.startswith("--")]
    into = image / target.lstrip("/") if target.startswith("/") else folder / target
    for name in names:
        path = source / name.lstrip("/")
        here = into / path.name if target.endswith("/") else into
        here.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, here, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, here)


def test_what_compose_mounts_is_there_and_its_variables_are_the_servers() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    build = services["triolet"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    mounts = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    files = [DEPLOY / mount for mount in mounts if mount.startswith(".")]
    assert (len(files), [path for path in files if not path.exists()]) == (5, [])
    assert set(services["triolet"]["environment"]) <= VARIABLES


def test_prometheus_asks_the_server_of_compose_and_has_the_alerts_of_the_page() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["triolet:8000"]}]
    [group] = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    told = dict(re.findall(r"^\| `(.+?)` \| (.+?) \|$", PAGE, re.MULTILINE))
    assert {rule["expr"]: rule["annotations"]["summary"] for rule in group["rules"]} == told


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        if command.startswith("make "):
            assert re.search(rf"(?m)^{command.split()[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"))
        if command.startswith(".ci"):
            assert (ROOT / command).exists()


def test_the_routers_of_the_kubernetes_manifest_name_every_engine_and_options_that_there_are() -> None:
    parts = list(yaml.safe_load_all(MANIFEST))
    engines = next(part for part in parts if part["kind"] == "StatefulSet")
    routers = next(part for part in parts if part["kind"] == "Deployment")
    name, service = engines["metadata"]["name"], engines["spec"]["serviceName"]
    assert service in [part["metadata"]["name"] for part in parts if part["kind"] == "Service"]
    [engine] = engines["spec"]["template"]["spec"]["containers"]
    [router] = routers["spec"]["template"]["spec"]["containers"]
    urls = [argument for argument in router["args"] if argument.startswith("http")]
    assert urls == [f"http://{name}-{number}.{service}:8000" for number in range(engines["spec"]["replicas"])]
    # Keys of clients are for the engines; the router's own opens their list of models.
    assert {"secretRef": {"name": "triolet"}} in engine["envFrom"]
    [variable] = router["env"]
    assert variable["name"] == "TRIOLET_API_KEY"
    [secret] = [variable["valueFrom"]["secretKeyRef"]]
    made = next(line for line in MANIFEST.splitlines() if "create secret" in line)
    assert f"create secret generic {secret['name']} " in made
    assert f"--from-literal={secret['key']}=" in made
    for container in (engine, router):
        command, *arguments = container["args"]
        known = {flag for option in main.commands[command].params for flag in option.opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= known


def pods_in(text: str) -> list[dict[str, Any]]:
    """The pods of a manifest."""
    parts = [part["spec"] for part in yaml.safe_load_all(text)]
    return [spec["template"]["spec"] for spec in parts if "template" in spec]


WORKERS = re.search(
    r"```yaml\n(apiVersion.+?)```", (ROOT / "docs" / "scale.md").read_text(encoding="utf-8"), re.DOTALL
)
assert WORKERS is not None


@pytest.mark.parametrize(("text", "num_pods"), [(MANIFEST, 2), (WORKERS[1], 1)], ids=["engines", "workers"])
def test_no_service_sets_a_variable_that_a_pod_takes_for_its_own(text: str, num_pods: int) -> None:
    pods = pods_in(text)
    assert [pod["enableServiceLinks"] for pod in pods] == [False] * num_pods
    # Neither does one in pods that someone else writes.
    services = re.findall(r"(?m)^kind: Service\nmetadata:\n  name: (.+)$", text)
    services += re.findall(r'"--connect", "(.+?):', text)
    assert services
    assert not {f"{name.upper().replace('-', '_')}_PORT" for name in services} & VARIABLES


@pytest.mark.parametrize("text", [MANIFEST, WORKERS[1]], ids=["engines", "workers"])
def test_a_pod_with_a_gpu_has_the_image_that_has_torch_with_cuda(text: str) -> None:
    containers = [container for pod in pods_in(text) for container in pod["containers"]]
    [image] = {each["image"] for each in containers if "nvidia.com/gpu" in str(each.get("resources"))}
    build = next(line for line in MANIFEST.splitlines() if line.endswith(f" -t {image} ."))
    index = re.search(r"--build-arg TORCH_INDEX=(\S+)", build)
    assert index is not None
    assert f"--build-arg TORCH_INDEX={index[1]}" in DOCKERFILE.replace("\n# ", " ")


def test_the_weights_that_an_engine_has_fetched_are_in_a_volume_of_its_own() -> None:
    engines = next(part for part in yaml.safe_load_all(MANIFEST) if part["kind"] == "StatefulSet")["spec"]
    pod = engines["template"]["spec"]
    [mount] = pod["containers"][0]["volumeMounts"]
    assert f"HF_HOME={mount['mountPath']} " in DOCKERFILE
    assert mount["name"] in [claim["metadata"]["name"] for claim in engines["volumeClaimTemplates"]]
    assert f"useradd --uid {pod['securityContext']['fsGroup']} " in DOCKERFILE
