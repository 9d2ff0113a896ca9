"""Fair share: clients that have requests at the same time get equal parts of the engine's work.

Fair queueing by virtual time: the tokens that went through the model are counted for each client. A client that is ahead of
another client with work to do waits until the other has caught up. One client alone is never held back.
"""

from collections.abc import Collection

MAX_REMEMBERED = 10_000  # clients whose lead is remembered after their requests have ended


class FairShare:
    """Counts the tokens of every client and says whose turn it is."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._clock = 0  # the count of the client that is furthest behind; it never goes back

    def choose(self, clients: Collection[str]) -> set[str]:
        """Returns the clients that have had the least work. Their requests run in the next step.

        A new client starts at the clock. A client that left keeps its lead over the clock: it gains nothing by leaving and
        coming back.
        """
        if not clients:
            return set()
        for client in clients:
            self._tokens[client] = max(self._tokens.get(client, 0), self._clock)
        self._clock = min(self._tokens[client] for client in clients)
        if len(self._tokens) > MAX_REMEMBERED:
            self._tokens = {client: self._tokens[client] for client in clients}
        self._tokens = {c: tokens for c, tokens in self._tokens.items() if c in clients or tokens > self._clock}
        return {client for client in clients if self._tokens[client] == self._clock}

    def charge(self, client: str, tokens: int) -> None:
        """Counts work that was done for a client."""
        self._tokens[client] = self._tokens.get(client, self._clock) + tokens
