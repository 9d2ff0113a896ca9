// The same weights both ways: all at once, and one after another. Each is measured alone, then both are shown at the pace
// that was measured.

import { board } from "./player.js";
import { Run } from "./run.js";
import { element } from "./timeline.js";

async function measured(stream, seen) {
  const found = [];
  let began = 0; // when it was begun, whatever had to be loaded or waited for before
  for await (const event of stream) {
    if (event.type === "error") throw new Error(event.error.message);
    if (event.type === "begin") began = performance.now();
    found.push({ at: performance.now() - began, event });
    seen(found.length);
  }
  return found;
}

class Lane {
  // `said` takes events, has what they come to drawn, and tells what the last of them says.
  constructor(title, said) {
    this.title = title;
    this.said = said;
    this.clock = element("b", { className: "clock" }, "0.00 s");
    this.drawn = element("div", { className: "lane-text" });
    this.facts = element("p", { className: "facts" });
    this.root = element("section", { className: "lane" }, element("h3", {}, title, this.clock), this.drawn, this.facts);
    this.told = [];
    this.at = 0; // how many of them were shown
  }

  // Shows what had come by then; whether that is all.
  tick(now) {
    const last = this.told.at(-1);
    this.clock.textContent = `${(Math.min(now, last.at) / 1000).toFixed(2)} s`;
    while (this.at < this.told.length && this.told[this.at].at <= now) this.said.add(this.told[this.at++].event);
    this.drawn.replaceChildren(this.said.drawn);
    if (now < last.at) return false;
    this.facts.textContent = this.said.facts(last.event);
    this.root.classList.add("arrived");
    return true;
  }
}

const spent = ({ timings }) => `${timings.predicted_n} tokens, ${timings.diffusion_forwards} passes, ${timings.diffusion_output_tok_s.toFixed(1)} tokens/s`;

class Drafted extends Run {
  get drawn() {
    return this.textAt(this.frames.length - (this.end ? 0 : 1));
  }

  facts(end) {
    return spent(end);
  }
}

class Spoken {
  drawn = "";

  add(event) {
    this.drawn += event.t ?? "";
  }

  facts(end) {
    return spent(end);
  }
}

class Boarded extends Run {
  get drawn() {
    return this.begin ? board(this, this.frames.at(-1), Boolean(this.end)) : "";
  }

  facts(end) {
    return `${end.solved ? "solved" : "not solved"}, ${end.forwards} passes, ${end.revisions} digits thought better of`;
  }
}

// Texts both ways: [lane, path, body] of each.
export function texts(body) {
  const { prompt, max_tokens, seed, temperature } = body;
  return [
    [new Lane("Redrafted, all at once", new Drafted("write", {})), "/v1/canvas", { ...body, candidates: 1 }],
    [new Lane("Left to right", new Spoken()), "/v1/canvas/left-to-right", { prompt, max_tokens, seed, temperature }],
  ];
}

// A puzzle both ways.
export function puzzles(body) {
  return [
    [new Lane("Redrafted, all at once", new Boarded("sudoku", {})), "/v1/canvas/sudoku", body],
    [new Lane("Cell after cell", new Boarded("sudoku", {})), "/v1/canvas/sudoku", { ...body, left_to_right: true }],
  ];
}

// `ask` gives the events of a path and a body; resolves when both have arrived.
export async function race(root, ask, both, signal) {
  const lanes = both.map(([lane]) => lane);
  const said = element("p", { className: "hint" });
  root.replaceChildren(said, ...lanes.map((lane) => lane.root));
  for (const [lane, path, body] of both) lane.told = await measured(ask(path, body), (count) => (said.textContent = `Measuring: ${lane.title} … ${count}`));
  said.textContent = "Both at the pace that was measured, each while nothing else ran:";
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
  const times = lanes[1].told.at(-1).at / lanes[0].told.at(-1).at;
  said.textContent = times >= 1 ? `All at once was ${times.toFixed(1)} times as fast.` : `One after another was ${(1 / times).toFixed(1)} times as fast.`;
}
