// A race of the same weights: diffusion against autoregressive. Each is measured alone, then both are replayed at the
// measured pace.

import { board } from "./player.js";
import { Run } from "./run.js";
import { element } from "./timeline.js";

async function recordTimed(stream, onEvent) {
  const timed = [];
  let began = 0; // when the run began: loading and waiting do not count
  for await (const event of stream) {
    if (event.type === "error") throw new Error(event.error.message);
    if (event.type === "begin") began = performance.now();
    timed.push({ time: performance.now() - began, event });
    onEvent(timed.length);
  }
  return timed;
}

class Lane {
  // `run` takes events; `run.content` is shown, `run.facts(end)` describes the end event.
  constructor(title, run) {
    this.title = title;
    this.run = run;
    this.clock = element("b", { className: "clock" }, "0.00 s");
    this.content = element("div", { className: "lane-text" });
    this.facts = element("p", { className: "facts" });
    this.root = element("section", { className: "lane" }, element("h3", {}, title, this.clock), this.content, this.facts);
    this.events = []; // with their times
    this.shown = 0; // number of events shown
  }

  // Shows the events up to a time. Returns whether all are shown.
  tick(now) {
    const last = this.events.at(-1);
    this.clock.textContent = `${(Math.min(now, last.time) / 1000).toFixed(2)} s`;
    while (this.shown < this.events.length && this.events[this.shown].time <= now) this.run.add(this.events[this.shown++].event);
    this.content.replaceChildren(this.run.content);
    if (now < last.time) return false;
    this.facts.textContent = this.run.facts(last.event);
    this.root.classList.add("arrived");
    return true;
  }
}

const factsOf = ({ timings }) => `${timings.predicted_n} tokens, ${timings.diffusion_forwards} forwards, ${timings.diffusion_output_tok_s.toFixed(1)} tokens/s`;

class DiffusionRun extends Run {
  get content() {
    return this.textAt(this.frames.length - (this.end ? 0 : 1));
  }

  facts(end) {
    return factsOf(end);
  }
}

class AutoregressiveRun {
  content = "";

  add(event) {
    this.content += event.t ?? "";
  }

  facts(end) {
    return factsOf(end);
  }
}

class SudokuRun extends Run {
  get content() {
    return this.begin ? board(this, this.frames.at(-1), Boolean(this.end)) : "";
  }

  facts(end) {
    return `${end.solved ? "solved" : "not solved"}, ${end.forwards} forwards, ${end.revisions} digits revised`;
  }
}

// Lanes of a text: [lane, path, body] of each.
export function texts(body) {
  const { prompt, max_tokens, seed, temperature, check } = body;
  return [
    [new Lane("Diffusion", new DiffusionRun("write", {})), "/v1/canvas", { ...body, candidates: 1 }],
    [new Lane("Autoregressive", new AutoregressiveRun()), "/v1/canvas/autoregressive", { prompt, max_tokens, seed, temperature, check }],
  ];
}

// Lanes of a puzzle.
export function puzzles(body) {
  return [
    [new Lane("Diffusion", new SudokuRun("sudoku", {})), "/v1/canvas/sudoku", body],
    [new Lane("Autoregressive", new SudokuRun("sudoku", {})), "/v1/canvas/sudoku", { ...body, autoregressive: true }],
  ];
}

// `request` returns the events of a path and a body. Resolves when all lanes have ended.
export async function race(root, request, entries, signal) {
  const lanes = entries.map(([lane]) => lane);
  const status = element("p", { className: "hint" });
  root.replaceChildren(status, ...lanes.map((lane) => lane.root));
  for (const [lane, path, body] of entries) lane.events = await recordTimed(request(path, body), (count) => (status.textContent = `Measuring: ${lane.title} … ${count}`));
  status.textContent = "Both at the measured pace; each was measured alone:";
  const began = performance.now();
  await new Promise((done, failed) => {
    const tick = () => {
      if (signal.aborted) return failed(new DOMException("stopped", "AbortError"));
      const now = performance.now() - began;
      if (lanes.map((lane) => lane.tick(now)).every(Boolean)) done();
      else requestAnimationFrame(tick);
    };
    tick();
  });
  const ratio = lanes[1].events.at(-1).time / lanes[0].events.at(-1).time;
  status.textContent = ratio >= 1 ? `Diffusion was ${ratio.toFixed(1)} times as fast.` : `Autoregressive was ${(1 / ratio).toFixed(1)} times as fast.`;
}
