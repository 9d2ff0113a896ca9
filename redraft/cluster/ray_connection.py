"""Connections to Ray: a cluster of this machine alone, or one that runs already.

Ray reads most of its settings from the environment when it is imported, so they are set before. Nothing is reported to its
makers.
"""

import os
import secrets
import socket
from typing import Any

LOCAL = "local"  # the address that means a cluster of this machine alone
CONNECT_SECONDS = 10.0
MISSING = "replicas need Ray: pip install 'redraft[cluster]'"


def import_ray(address: str) -> Any:
    """Ray, set up for a cluster of this machine alone or for a running one.

    Ray binds the ports of a cluster to all addresses, and to the loopback address where it may not form a cluster of
    several machines. Every port of it then asks for a token, which only the processes of this cluster have.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")  # of its own 5: a busy machine is slower
    if address == LOCAL:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError(MISSING) from None
    return ray


def connect(address: str, **options: Any) -> None:
    """Starts Ray on this machine, without a dashboard, or joins a running cluster. `options` are those of `ray.init`."""
    if address.startswith("ray://"):
        raise ValueError(f"{address} is an address of Ray Client, which cannot stream: give HOST:PORT of the head node")
    ray = import_ray(address)
    if address == LOCAL:
        options = {"include_dashboard": False, **options}
    else:
        check_reachable(address)
    ray.shutdown()  # an earlier connection of this process, whose work failed
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        where = "see Ray's logs" if address == LOCAL else "start this on a machine of the cluster"
        raise ValueError(f"no Ray cluster answers at {address}, {where}: {first_line(error)}") from None


def check_reachable(address: str) -> None:
    """Refuses HOST:PORT where nothing listens: Ray itself would try for minutes."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = first_line(error)
        raise ValueError(f"no Ray cluster answers at {address} ({reason}): give the HOST:PORT of its head") from None


def first_line(error: BaseException) -> str:
    """The first line of a message of Ray, which may have many."""
    return str(error).strip().partition("\n")[0]
