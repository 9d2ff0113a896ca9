"""What a server and a cluster both know about addresses and names. Imports nothing of the server."""

import ipaddress

PORT = 8012  # the default of llama.vim
LATEST = ":latest"  # the tag that clients of Ollama add to the name of a model


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
