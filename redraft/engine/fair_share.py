"""Fair share: clients that have requests at the same time get equal parts of the engine's work.

Fair queueing by virtual time: the tokens that went through the model are counted for each client. A client that is ahead of
another client with work to do waits until the other has caught up. One client alone is never held back.
"""

from collections.abc import Collection

MAX_REMEMBERED = 10_000  # clients whose lead is remembered after their requests have ended
MIN_PRUNED = 64


class FairShare:
    """Counts the tokens of every client and says whose turn it is."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._prune_above = MIN_PRUNED
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
        if len(self._tokens) > self._prune_above:  # a count that the clock has passed says nothing any more
            self._tokens = {c: tokens for c, tokens in self._tokens.items() if c in clients or tokens > self._clock}
            if len(self._tokens) > MAX_REMEMBERED:
                self._tokens = {client: self._tokens[client] for client in clients}
            self._prune_above = max(MIN_PRUNED, 2 * len(self._tokens))
        return {client for client in clients if self._tokens[client] == self._clock}

    def charge(self, client: str, tokens: int) -> None:
        """Counts work that was done for a client."""
        self._tokens[client] = max(self._tokens.get(client, 0), self._clock) + tokens
