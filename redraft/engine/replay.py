"""Replay: a run that is repeated up to some point, and interventions that change its constraints on the way.

Random numbers are a pure function of the seed, so a run can be repeated from its request alone: committed canvases are
taken as given, and the steps before an intervention are computed again with the same result. No state is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from redraft.config import SamplerConfig
from redraft.constraints.constraints import ConstraintEdit, Constraints
from redraft.engine.errors import ReplayError


@dataclass(frozen=True)
class Intervention:
    """A constraint edit that takes effect after step `step` of canvas `block`. Step 0 is before the first step."""

    block: int
    step: int
    edit: ConstraintEdit


@dataclass(frozen=True)
class Replay:
    """Canvases that the run had committed already, and the interventions in the order of their steps."""

    canvases: tuple[tuple[int, ...], ...] = ()
    interventions: tuple[Intervention, ...] = ()

    @property
    def is_steered(self) -> bool:
        """Whether the caller decides anything about canvases: gives them, or changes constraints while they are denoised."""
        return bool(self.canvases or self.interventions)

    def plan(self, cfg: SamplerConfig, vocab_size: int, constraints: Constraints) -> "ReplayPlan":
        """Checks this replay against a request and computes the constraints after each intervention, once.

        `constraints` hold before the first intervention.
        """
        self._check_canvases(cfg, vocab_size)
        self.check_interventions(cfg.max_canvases, cfg.max_steps)
        edits = [intervention.edit for intervention in self.interventions]
        versions = tuple(accumulate(edits, lambda before, edit: before.apply_edit(edit), initial=constraints))
        for version in versions[1:]:
            version.validate(vocab_size, cfg.max_new_tokens, cfg.eos_token_ids)
        plan = ReplayPlan(self, versions)
        automaton_state = constraints.initial_state
        for block, canvas in enumerate(self.canvases):
            plan.constraints_at(block, cfg.max_steps).check_canvas(canvas, block * cfg.canvas_length)
            automaton_state = constraints.advance(automaton_state, canvas, cfg.canvas_length)  # refuses what does not match
        return plan

    def _check_canvases(self, cfg: SamplerConfig, vocab_size: int) -> None:
        """Refuses canvases that the request cannot have committed."""
        if len(self.canvases) >= cfg.max_canvases:
            raise ReplayError(
                f"the replay has {len(self.canvases)} committed canvases and the answer has at most {cfg.max_canvases}: "
                "leave at least one canvas to be generated"
            )
        for block, canvas in enumerate(self.canvases):
            if len(canvas) != cfg.canvas_length:
                raise ReplayError(f"canvas {block} has {len(canvas)} tokens, canvas_length is {cfg.canvas_length}")
            if invalid := [token for token in canvas if not 0 <= token < vocab_size]:
                raise ReplayError(f"canvas {block} has the token {invalid[0]}, the vocabulary ends at {vocab_size - 1}")
            if set(canvas) & set(cfg.eos_token_ids):
                raise ReplayError(f"canvas {block} contains a stop token, so the text ended there: nothing follows it")

    def check_interventions(self, max_canvases: int, max_steps: int) -> None:
        """Refuses interventions at canvases or steps that do not exist, and interventions out of order."""
        previous = (-1, 0)
        for intervention in self.interventions:
            block = intervention.block
            step = intervention.step
            if not 0 <= block < max_canvases or not 0 <= step < max_steps:
                raise ReplayError(
                    f"there is no canvas {block}, step {step} to intervene at: the last possible is canvas "
                    f"{max_canvases - 1}, step {max_steps - 1}"
                )
            if (block, step) <= previous:
                raise ReplayError(f"interventions must be in order, but canvas {block}, step {step} comes too late")
            previous = (block, step)


@dataclass(frozen=True)
class ReplayPlan:
    """A checked replay of one request: which canvases are replayed, and which constraints hold at which step."""

    replay: Replay
    versions: Sequence[Constraints]  # of the constraints: before the first intervention, and after each

    @property
    def has_interventions(self) -> bool:
        """Whether the constraints change during the run."""
        return len(self.replay.interventions) > 0

    def has_canvas(self, block: int) -> bool:
        """Whether this canvas is replayed instead of generated."""
        return block < len(self.replay.canvases)

    def canvas(self, block: int) -> tuple[int, ...]:
        """The tokens of a replayed canvas."""
        return self.replay.canvases[block]

    def has_intervention_at(self, block: int, step: int) -> bool:
        """Whether the constraints change after this step."""
        return (block, step) in [(each.block, each.step) for each in self.replay.interventions]

    def constraints_at(self, block: int, step: int) -> Constraints:
        """The constraints that hold after this step of this canvas."""
        past = [each for each in self.replay.interventions if (each.block, each.step) <= (block, step)]
        return self.versions[len(past)]

    def check_reached(self, block: int, step: int, *, is_last: bool) -> None:
        """Called when canvas `block` is done after `step`: refuses interventions that the run can no longer reach.

        `is_last` says that no canvas follows.
        """
        for intervention in self.replay.interventions:
            if intervention.block == block and intervention.step > step:
                raise ReplayError(
                    f"canvas {block} settled at step {step}: it has no step {intervention.step} to intervene at"
                )
            if intervention.block > block and is_last:
                raise ReplayError(
                    f"the text ended on canvas {block}: there is no canvas {intervention.block} to intervene at"
                )
