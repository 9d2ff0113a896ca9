"""What a server and a cluster both know about addresses and names. Imports nothing of the server."""

import ipaddress
from collections.abc import Collection, Mapping

from redraft.config import ConfigError, show_value

PORT = 8012  # the default of llama.vim
LATEST = ":latest"  # the tag that clients of Ollama add to the name of a model
ANY = "*"  # the alias of names that are neither a model nor another alias


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolve_name(name: str, models: Collection[str], aliases: Mapping[str, str]) -> str | None:
    """The model that a client names, or None if there is none. Clients of Ollama may add a tag."""
    for untagged in dict.fromkeys((name, name.removesuffix(LATEST))):
        if untagged in models:
            return untagged
        if untagged in aliases:
            return aliases[untagged]
    return aliases.get(ANY)


def check_aliases(aliases: Mapping[str, str], models: Collection[str]) -> None:
    """Refuses an alias of a model that is not there, and one that is itself the name of a model."""
    for alias, model in aliases.items():
        if alias in models:
            raise ConfigError(f"the alias {show_value(alias)} is the name of a model already: choose another one")
        if model not in models:
            mistake = f"the alias {show_value(alias)} is for {show_value(model)}, a model that is not served"
            raise ConfigError(f"{mistake}: choose one of {', '.join(models)}")
