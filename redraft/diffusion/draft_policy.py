"""How many tokens exact mode drafts at once, and behind which tokens: chosen by what the last drafts were worth.

A forward has a fixed cost and a cost for each token. More drafts and more canvases give more tokens a forward and cost more.
Two layouts are compared. "all": a canvas stands behind every verified token, so each round has drafts. "alternate": one
round drafts behind the last token, the next one only verifies. Whether a drafter's drafts pay at all is measured
(DraftSpeed). The choice changes an exact answer's speed, never its tokens: a clock chooses in float32 only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# The cost of a token in a forward, relative to the forward's fixed cost. On a GPU a round of a hundred tokens takes hardly
# longer than one of a single token. The CPU's figure: `tiny` takes 40 ms for 1 token and 72 ms for 72 on two cores.
TOKEN_COST = {"cpu": 0.012, "cuda": 0.0}
PRIOR_ACCEPTED = 0.6  # assumed share of accepted drafts before any was verified
PRIOR_WEIGHT = 2.0  # drafts that this assumption counts for
MEMORY = 0.97  # how much of what was counted stays, round by round: texts change
TRIED = 8  # rounds without drafts, and as many with them, before the faster way is chosen
TRIED_AGAIN = 256  # rounds after which both ways are tried again


@dataclass
class DraftSpeed:
    """Whether drafts pay on this machine: tokens a second without them and with them, measured round by round.

    On a CPU a forward of a few tokens may take twice as long as one of a single token, and each draft reads the whole head.
    """

    rows: int = 1  # requests in each of the rounds that are compared
    rounds: list[int] = field(default_factory=lambda: [0, 0])  # since both ways were last tried: without drafts, with them
    tokens: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def record(self, has_drafts: bool, tokens: int, seconds: float, rows: int = 1) -> None:
        """Counts a round of so many requests. With another number of them, both ways are tried anew."""
        if rows != self.rows:
            self.rows = rows
            self.rounds, self.tokens, self.seconds = [0, 0], [0.0, 0.0], [0.0, 0.0]
        self.rounds[has_drafts] += 1
        if sum(self.rounds) == TRIED_AGAIN:
            self.rounds = [0, 0]
        self.tokens[has_drafts] = MEMORY * self.tokens[has_drafts] + tokens
        self.seconds[has_drafts] = MEMORY * self.seconds[has_drafts] + seconds

    @property
    def pays(self) -> bool:
        """Whether the next round drafts."""
        if min(self.rounds) < TRIED:
            return self.rounds[False] >= TRIED
        return self.tokens[True] * self.seconds[False] > self.tokens[False] * self.seconds[True]


@dataclass
class DraftPolicy:
    """Counts accepted drafts by their number behind the verified tokens, and chooses the layout of the next rounds."""

    token_cost: float
    max_length: int
    speed: DraftSpeed | None = None  # None: drafts pay
    may_draft: bool = True
    tried: list[float] = field(init=False)  # by number of the draft: how often all before it were accepted
    accepted: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tried = [PRIOR_WEIGHT] * self.max_length
        self.accepted = [PRIOR_WEIGHT * PRIOR_ACCEPTED] * self.max_length

    def record(self, drafts: int, accepted: int) -> None:
        """Counts the verdict of a round."""
        for number in range(min(drafts, accepted + 1, self.max_length)):
            self.tried[number] = MEMORY * self.tried[number] + 1
            self.accepted[number] = MEMORY * self.accepted[number] + int(number < accepted)

    def choose(self) -> tuple[int, bool]:
        """The number of drafts, and whether canvases stand behind all verified tokens."""
        if not self.may_draft or (self.speed is not None and not self.speed.pays):
            return 0, False
        choices = [(length, is_all) for length in range(1, self.max_length + 1) for is_all in (True, False)]
        return max(choices, key=lambda choice: self._tokens_per_cost(*choice))

    def _tokens_per_cost(self, length: int, is_all: bool) -> float:
        """Expected tokens over cost, for two rounds."""
        expected = sum(self._chances(length))
        if is_all:
            cost = 2 * (1 + self.token_cost * (length + 1) * (length + 2))
            return 2 * (1 + expected) / cost
        cost = 2 + self.token_cost * (1 + (length + 1) + (length + 1))
        return (2 + expected) / cost

    def _chances(self, length: int) -> Sequence[float]:
        """The chance of each draft that it and all before it are accepted."""
        chances = []
        chance = 1.0
        for tried, accepted in zip(self.tried[:length], self.accepted[:length], strict=True):
            chance *= accepted / tried
            chances.append(chance)
        return chances
