"""The commands redraft cluster deploy, status and down: models on a running Ray cluster."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Serve models on a running Ray cluster: deploy, status, down. See docs/cluster.md.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)
Address = Annotated[
    str,
    typer.Option(
        "--address", envvar="RAY_ADDRESS", help="HOST:PORT of the cluster's head node; auto finds one on this machine."
    ),
]


@app.command("deploy")
def deploy_config(
    config: Annotated[str, typer.Argument(help="YAML file with the models; see docs/cluster.md.")],
    address: Address = "auto",
) -> None:
    """Deploy the models of a config, or change what is deployed to it."""
    from redraft.cluster import deploy
    from redraft.cluster.cluster_config import read_config

    settings = read_config(config)
    deploy.check_access(settings)
    with deploy.connected_ray(address):
        deploy.deploy(settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    names = ", ".join(model.name for model in settings.models)
    Console(stderr=True, highlight=False).print(f"{names} at http://{host}:{settings.port}", markup=False)


@app.command()
def status(
    address: Address = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show the deployments, and the health of every replica."""
    from redraft.cluster import deploy

    with deploy.connected_ray(address):
        state = deploy.read_state()
    if state is None:
        raise ValueError(f"nothing is deployed at {address}: redraft cluster deploy CONFIG does it")
    if as_json:
        print(json.dumps(state))
        return
    Console(highlight=False).print(tabulate_state(state), markup=False)


def tabulate_state(state: dict[str, Any]) -> Table:
    """Deployments with their replicas, a line for each replica below them."""
    table = Table("deployment", "replica", "status", "requests", box=None, pad_edge=False)
    for name, deployment in state["deployments"].items():
        counts = ", ".join(f"{count} {kind.lower()}" for kind, count in deployment["replicas"].items())
        table.add_row(name, counts, deployment["status"].lower(), "")
        for replica in state["health"]["replicas"]:
            if replica["deployment"] == name:
                table.add_row("", replica["replica"], replica.get("error", replica["status"]), str(replica["active"]))
    return table


@app.command()
def down(address: Address = "auto") -> None:
    """Take everything down that was deployed; running requests finish first."""
    from redraft.cluster import deploy

    with deploy.connected_ray(address):
        if not deploy.take_down():
            raise ValueError(f"nothing is deployed at {address}")
        deploy.shut_down_if_idle()
