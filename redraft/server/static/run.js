// What happened, from the events of one run: frames put together from what changed in each, pages, the end.
// Knows nothing of the network or of drawing.

export const NOISE = "n", PINNED = "k";

export class Run {
  constructor(kind, asked) {
    this.kind = kind; // write, chat, fill, edit, sudoku or decide
    this.asked = asked; // {path, body}: with its seed, all that is needed to have it again
    this.begin = null;
    this.frames = [];
    this.pages = [];
    this.end = null;
    this.error = null;
    this.events = [];
  }

  static from(saved) {
    const run = new Run(saved.kind, saved.asked);
    saved.events.forEach((event) => run.add(event));
    return run;
  }

  // Whether tokens can be pinned or banned and the run gone on with from there.
  get steerable() {
    return this.begin?.canvas_length > 0;
  }

  // Whether its pages are its text: an edit takes back what would be half a character.
  get spelled() {
    const text = this.pages.map((page) => page.texts.join("")).join("");
    return this.pages.length > 0 && (this.kind !== "edit" || text === this.end?.text);
  }

  get saved() {
    return { kind: this.kind, asked: this.asked, events: this.events };
  }

  add(event) {
    this.events.push(event);
    if (event.type === "begin") this.begin = this.begin ?? event;
    else if (event.type === "frame") this.frames.push(this.#frame(event));
    else if (event.type === "board") this.frames.push(this.#board(event));
    else if (event.type === "page") this.pages[event.block] = event;
    else if (event.type === "end") this.end = event;
    else if (event.type === "error") this.error = event.error.message;
  }

  // The same run up to a step of a page, to be gone on with.
  upTo(block, step, asked) {
    const run = new Run(this.kind, asked);
    const before = (event) =>
      event.type === "begin" ||
      (event.type === "frame" && (event.block < block || (event.block === block && event.step <= step))) ||
      (event.type === "page" && event.block < block);
    this.events.filter(before).forEach((event) => run.add(event));
    return run;
  }

  #frame(event) {
    const last = this.frames.at(-1);
    const before = last && last.block === event.block ? last.cells : [];
    const tokens = before.map((cell) => cell.token);
    for (const token of event.tokens) tokens[token.i] = token;
    const cells = tokens.map((token, i) => grown(token, before[i], event.step));
    const open = cells.filter((cell) => cell.token.s === "d").map((cell) => cell.token.e);
    return { ...event, cells, gate: open.length ? Math.max(...open) : 0, ends: this.#ends(cells, event.block) };
  }

  // Where the text ends on a page: at a stop token, or when it is as long as it may be.
  #ends(cells, block) {
    const { stops = [], max_tokens: most = Infinity, canvas_length: length = 0 } = this.begin ?? {};
    const at = cells.findIndex((cell) => cell.token.s !== NOISE && stops.includes(cell.token.id));
    return Math.min(at < 0 ? cells.length : at, most - block * length);
  }

  #board(event) {
    const last = this.frames.at(-1);
    const same = last && last.attempt === event.attempt;
    const revised = event.board.map((digit, i) => same && last.accepted[i] && last.board[i] !== digit);
    const share = event.accepted.filter(Boolean).length;
    return { ...event, block: event.attempt, revised, entropy: event.clashing.length, accepted_count: share };
  }

  lastOf(block) {
    return this.frames.findLast((frame) => frame.block === block);
  }

  // What stood at a place, step by step.
  history(block, i) {
    return this.frames.filter((frame) => frame.block === block && frame.cells?.[i]).map((frame) => frame.cells[i]);
  }

  // The text as it is believed to be at a frame: committed pages, then the likeliest token everywhere.
  textAt(index) {
    if (index >= this.frames.length && this.end) return this.end.text;
    const frame = this.frames[Math.min(index, this.frames.length - 1)];
    if (!frame?.cells) return "";
    const said = this.pages.slice(0, frame.block).map((page) => page?.text ?? "");
    const stops = this.begin?.stops ?? [];
    const best = frame.cells.map((cell) => cell.token.c[0]);
    const end = best.findIndex(([id]) => stops.includes(id));
    const room = (this.begin?.max_tokens ?? Infinity) - frame.block * (this.begin?.canvas_length ?? 0);
    return said.join("") + best.slice(0, Math.min(end < 0 ? best.length : end, room)).map(([, text]) => text).join("");
  }
}

// A token with its past: since when it stands there, and how often the place was thought better of.
function grown(token, before, step) {
  const stood = before && before.token.s !== NOISE;
  const same = stood && token.s !== NOISE && before.token.id === token.id;
  const rewrites = (before?.rewrites ?? 0) + (stood && !same ? 1 : 0);
  return { token, step, age: same ? before.age + 1 : 0, since: same ? before.since : step, rewrites };
}

// How a cell looks, in words that the style sheet knows.
export function look(cell, i, ends) {
  if (cell.token.s === PINNED) return "pinned";
  if (cell.committed) return "committed";
  if (i >= ends) return "end";
  if (cell.token.s === NOISE) return "noise";
  if (cell.age === 0) return "changed";
  return cell.age >= 2 ? "stable" : "draft";
}

export const LOOKS = {
  noise: "noise, not yet decided",
  changed: "changed in this step",
  draft: "draft",
  stable: "unchanged for two steps or more",
  committed: "committed",
  pinned: "pinned",
  end: "behind the end",
};
