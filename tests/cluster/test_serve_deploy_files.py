"""The files for a Ray cluster in deploy/: our settings, Ray's schema, KubeRay's schema."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from redraft.cluster.cluster_config import config_from, read_config

ROOT = Path(__file__).parent.parent.parent
SCHEMA = json.loads((ROOT / "tests" / "golden" / "rayservice_schema.json").read_text(encoding="utf-8"))
CHECK = """
import json, sys
from ray.serve.schema import ServeDeploySchema
from redraft.cluster.deploy import build_app
for config in json.load(sys.stdin):
    ServeDeploySchema.model_validate(config)
    application = build_app(config["applications"][0]["args"])
    print(application._bound_deployment.name)
"""


def manifest():
    return yaml.safe_load((ROOT / "deploy" / "rayservice.yaml").read_text(encoding="utf-8"))


def serve_configs():
    """The configs of Ray Serve: the file's, and the manifest's."""
    return [
        yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text(encoding="utf-8")),
        yaml.safe_load(manifest()["spec"]["serveConfigV2"]),
    ]


def test_settings_of_the_files_are_ours():
    config = read_config(ROOT / "deploy" / "cluster.yaml")
    applications = [content["applications"][0] for content in serve_configs()]
    assert config_from(applications[0]["args"]) == config  # the address is the default one
    for application in applications:
        assert application["import_path"] == "redraft.cluster.deploy:build_app"
        config_from(application["args"])


def test_the_manifest_follows_the_published_schema():
    jsonschema.validate(manifest(), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus", 0),
        ("spec.rayClusterConfig.workerGroup", []),
        ("spec.serveConfigV2", {}),
        ("spec.rayClusterConfig.authOptions.mode", "none"),
    ],
)
def test_the_schema_refuses_a_wrong_manifest(path, value):
    content = manifest()
    *parents, last = path.split(".")
    node = content
    for name in parents:
        node = node[name]
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, SCHEMA)


def test_pods_of_the_manifest_have_the_key_and_report_nothing():
    cluster = manifest()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        variables = {row["name"]: row for row in container["env"]}
        assert variables["REDRAFT_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "redraft", "key": "key"}
        assert variables["RAY_USAGE_STATS_ENABLED"]["value"] == "0"


def test_rays_own_schema_accepts_the_files_and_the_application_is_built():
    configs = json.dumps(serve_configs())
    run = subprocess.run([sys.executable, "-c", CHECK], input=configs, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-2:] == ["front", "front"]
