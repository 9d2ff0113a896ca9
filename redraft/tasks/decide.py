"""Decide: the probability of each of some choices as the answer, from one denoising forward over a canvas of noise.

Shapes: C canvas positions, V vocabulary.
"""

import threading
from collections.abc import Sequence

import torch

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.constraints.token_automaton import TokenAutomaton
from redraft.diffusion import rng
from redraft.diffusion.generate import check_inputs
from redraft.engine import Engine, Stopped
from redraft.tasks.generation import constrain_choices


@torch.inference_mode()
def decide(
    engine: Engine,
    ids: Sequence[int],
    automata: Sequence[TokenAutomaton],
    cfg: SamplerConfig,
    seed: int,
    stop: threading.Event | None,
) -> list[float]:
    """The probabilities of the automata's texts after a prompt; they add up to one. Raises Stopped once `stop` is set."""
    model = engine.model
    cfg = cfg.changed(max_new_tokens=cfg.canvas_length, check="off")
    length = cfg.canvas_length
    check_inputs(model, [ids], cfg, [seed], [Constraints()], None)
    noise_1C = rng.draws([seed], 0, model.device).noise(0, length, model.config.vocab_size)
    patterns = constrain_choices(automata, length, model.config.vocab_size, cfg.eos_token_ids)
    with engine.reserve(len(ids), stop=stop) as cache:
        engine.prefill_beside(ids, cache, stop)
        with engine.take_turn(length, stop):
            logits_CV = model.denoise(noise_1C, None, cache)[0].float().cpu()
    del cache  # its memory is the engine's again
    log_totals_C = logits_CV.double().logsumexp(dim=1).numpy()
    log_probs = []
    for constraints in patterns:
        if stop is not None and stop.is_set():
            raise Stopped
        automaton = constraints.canvas_automaton(constraints.initial_state, 0, length, length)
        assert automaton is not None
        log_probs.append(automaton.log_match_probability(logits_CV.numpy(), log_totals_C))
    return torch.tensor(log_probs, dtype=torch.float64).softmax(dim=0).tolist()
