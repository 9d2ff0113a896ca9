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
  constructor(title, run, prompt = "") {
    this.title = title;
    this.run = run;
    this.clock = element("b", { className: "clock" }, "0.00 s");
    this.prompt = element("span", { className: "prefix" }, prompt);
    this.content = element("div", { className: "lane-text" }, this.prompt);
    this.facts = element("p", { className: "facts" });
    this.place = element("span", { className: "badge good", hidden: true }, "won");
    this.root = element("section", { className: "lane" }, element("h2", {}, title, this.place, this.clock), this.content, this.facts);
    this.events = []; // with their times
    this.shown = 0; // number of events shown
  }

  get seconds() {
    return this.events.at(-1).time / 1000;
  }

  // Shows the events up to a time. Returns whether all are shown.
  tick(now) {
    const last = this.events.at(-1);
    this.clock.textContent = `${(Math.min(now, last.time) / 1000).toFixed(2)} s`;
    while (this.shown < this.events.length && this.events[this.shown].time <= now) this.run.add(this.events[this.shown++].event);
    this.content.replaceChildren(this.prompt, this.run.content);
    if (now < last.time) return false;
    this.facts.textContent = this.run.facts(last.event);
    this.root.classList.add("arrived");
    return true;
  }
}

const factsOf = ({ timings }) => `${timings.predicted_n} tokens, ${timings.diffusion_forwards} forwards, ${timings.diffusion_output_tok_s.toFixed(1)} tokens/s`;

class DiffusionRun extends Run {
  isRight = true; // of texts, the faster one wins

  get content() {
    return this.textAt(this.frames.length - (this.end ? 0 : 1));
  }

  facts(end) {
    return factsOf(end);
  }
}

class AutoregressiveRun {
  content = "";
  isRight = true;

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

  get isRight() {
    return Boolean(this.end?.solved);
  }

  facts(end) {
    return `${end.solved ? "solved" : "not solved"}, ${end.forwards} forwards, ${end.revisions} digits revised`;
  }
}

// Lanes of a text: [lane, path, body] of each.
export function texts(body) {
  const { model, prompt, max_tokens, seed, temperature, check } = body;
  return [
    [new Lane("Diffusion", new DiffusionRun("write", {}), prompt), "/v1/canvas", { ...body, candidates: 1 }],
    [new Lane("Autoregressive", new AutoregressiveRun(), prompt), "/v1/canvas/autoregressive", { model, prompt, max_tokens, seed, temperature, check }],
  ];
}

const sudokuLanes = () => [new Lane("Diffusion", new SudokuRun("sudoku", {})), new Lane("Autoregressive", new SudokuRun("sudoku", {}))];

// Lanes of a puzzle.
export function puzzles(body) {
  const [diffusion, autoregressive] = sudokuLanes();
  return [
    [diffusion, "/v1/canvas/sudoku", body],
    [autoregressive, "/v1/canvas/sudoku", { ...body, autoregressive: true }],
  ];
}

// Marks the winner, the fastest lane that is right, and returns a sentence about it.
function judge(lanes) {
  const right = lanes.filter((lane) => lane.run.isRight);
  if (!right.length) return "Neither solved it.";
  const winner = right.reduce((best, lane) => (lane.seconds < best.seconds ? lane : best));
  const other = lanes.find((lane) => lane !== winner);
  winner.place.hidden = false;
  winner.root.classList.add("won");
  if (!other.run.isRight) return `${winner.title} solved it in ${winner.seconds.toFixed(2)} s; ${other.title.toLowerCase()} did not.`;
  return `${winner.title} was ${(other.seconds / winner.seconds).toFixed(1)} times as fast.`;
}

// Replays lanes whose events are known. `pace` is 1 for the measured pace, 0.5 for half of it.
async function replayLanes(lanes, signal, pace = 1) {
  const began = performance.now();
  await new Promise((done, failed) => {
    const tick = () => {
      if (signal.aborted) return failed(new DOMException("stopped", "AbortError"));
      const now = (performance.now() - began) * pace;
      if (lanes.map((lane) => lane.tick(now)).every(Boolean)) done();
      else requestAnimationFrame(tick);
    };
    tick();
  });
  return judge(lanes);
}

// `request` returns the events of a path and a body; `onBegin` is called when the server has accepted the first of them. Resolves when all
// lanes have ended.
export async function race(root, request, entries, signal, onBegin) {
  const lanes = entries.map(([lane]) => lane);
  const status = element("p", { className: "hint" });
  const measured = (lane, count) => {
    if (lane === lanes[0] && count === 1) {
      root.replaceChildren(status, ...lanes.map((each) => each.root));
      onBegin();
    }
    status.textContent = `Measuring: ${lane.title} … ${count}`;
  };
  for (const [lane, path, body] of entries) lane.events = await recordTimed(request(path, body), (count) => measured(lane, count));
  status.textContent = "Both at the measured pace; each was measured alone:";
  status.textContent = await replayLanes(lanes, signal);
}

// Replays recorded runs of a puzzle. Resolves when both have ended.
export async function recordedRace(root, recorded, signal, pace) {
  const lanes = sudokuLanes();
  lanes.forEach((lane, i) => (lane.events = recorded[i].events.map((event, at) => ({ event, time: recorded[i].times[at] }))));
  const status = element("p", { className: "hint" }, pace < 1 ? `Recorded, played at 1/${Math.round(1 / pace)} of the speed:` : "Recorded, at the measured pace:");
  root.replaceChildren(status, ...lanes.map((lane) => lane.root));
  status.textContent = `Recorded. ${await replayLanes(lanes, signal, pace)}`;
}
