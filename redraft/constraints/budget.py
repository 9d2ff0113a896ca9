"""Budget: the work and the memory that the compilation of one request's pattern may use.

All parts of a request spend from one budget: schema nodes, characters of the regular expression, states of the NFA and of
the DFA, tokens of the vocabulary. The compiler counts before it computes, so a refusal costs nothing.
"""

from redraft.constraints.errors import BudgetError

# A unit is at most about 100 ns of one core and at most 6 bytes. Each part of the compiler says how many units it takes per
# state, edge or token. Measured with the hostile inputs of tests/hostile.py, one after another: those that use the whole
# budget take 36 to 110 ns a unit (0.7 to 2.2 s). No compilation allocated more than 48 MB at its peak, the trie of a
# vocabulary of 262,144 tokens not counted.
MAX_WORK = 20_000_000
MAX_CHARACTERS = 100_000  # Python's parser takes 1 to 4 us and up to 170 bytes a character


class Budget:
    """What is left of one request's work and characters."""

    def __init__(self, work: int = MAX_WORK, characters: int = MAX_CHARACTERS) -> None:
        self.max_work = work
        self.max_characters = characters
        self.work = 0  # spent
        self.characters = 0  # spent

    def spend(self, work: int, what: str) -> None:
        """Counts work that is about to be done; `what` names it in the error message."""
        if self.work + work > self.max_work:
            raise BudgetError(
                f"{what} would exceed the {self.max_work:,} units of work that one request may use: "
                "make it simpler, with fewer repeats and alternatives"
            )
        self.work += work

    def spend_characters(self, characters: int, what: str) -> None:
        """Counts characters of a regular expression that is about to be built or parsed."""
        if self.characters + characters > self.max_characters:
            raise BudgetError(
                f"{what} would exceed the {self.max_characters:,} characters of regular expressions that one request may "
                "use: make it shorter"
            )
        self.characters += characters

    def check_length(self, characters: int, what: str) -> None:
        """Refuses a regular expression of so many characters before it is built."""
        if characters > self.max_characters:
            raise BudgetError(
                f"{what} makes a pattern of {characters:,} characters, at most {self.max_characters:,} are supported: "
                "make it shorter"
            )
