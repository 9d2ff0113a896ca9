// One run, built from its events: whole frames put together from changed tokens, committed canvases, the end.
// Knows nothing of the network or of drawing.

export const NOISE = "n"; // states of a token
export const DRAFT = "d";
export const PINNED = "k";
export const VERIFIED = "v"; // by the causal half: it will not change

export class Run {
  constructor(kind, request) {
    this.kind = kind; // write, chat, fill, edit, sudoku or decide
    this.request = request; // {path, body}: with its seed, it reproduces the run
    this.begin = null;
    this.frames = [];
    this.canvases = []; // committed
    this.end = null;
    this.error = null;
    this.events = [];
  }

  static from(saved) {
    const run = new Run(saved.kind, saved.request);
    saved.events.forEach((event) => run.add(event));
    return run;
  }

  // Whether tokens can be pinned or banned and the run resumed from there.
  get isSteerable() {
    return this.begin?.canvas_length > 0;
  }

  // Whether the causal half verifies the text: checked or exact mode. Steering turns that off.
  get isVerified() {
    return ["checked", "exact"].includes(this.begin?.check);
  }

  // Whether the canvases spell the final text: an edit undoes a change that would leave half a character.
  get canvasesSpellText() {
    const text = this.canvases.map((canvas) => canvas.texts.join("")).join("");
    return this.canvases.length > 0 && (this.kind !== "edit" || text === this.end?.text);
  }

  get saved() {
    return { kind: this.kind, request: this.request, events: this.events };
  }

  add(event) {
    this.events.push(event);
    if (event.type === "begin") this.begin = event; // a run that is steered may have another mode
    else if (event.type === "frame") this.frames.push(this.#frame(event));
    else if (event.type === "board") this.frames.push(this.#board(event));
    else if (event.type === "canvas") this.canvases[event.block] = event;
    else if (event.type === "end") this.end = event;
    else if (event.type === "error") this.error = event.error.message;
  }

  // The same run up to a step of a canvas, to be resumed there.
  upTo(block, step, request) {
    const run = new Run(this.kind, request);
    const isEarlier = (event) =>
      event.type === "begin" ||
      (event.type === "frame" && (event.block < block || (event.block === block && event.step <= step))) ||
      (event.type === "canvas" && event.block < block);
    this.events.filter(isEarlier).forEach((event) => run.add(event));
    return run;
  }

  #frame(event) {
    const last = this.frames.at(-1);
    const previous = last && last.block === event.block ? last.cells : [];
    const tokens = previous.map((cell) => cell.token);
    for (const token of event.tokens) tokens[token.i] = token;
    const isSweep = typeof event.verified === "number"; // text behind the cursor is verified, the text ahead is draft
    const cells = tokens.map((token, i) => ({ ...cellOf(token, previous[i], event.step), isAhead: isSweep && token.s === DRAFT }));
    const entropies = cells.filter((cell) => cell.token.s === DRAFT).map((cell) => cell.token.e);
    return { ...event, cells, maxEntropy: entropies.length ? Math.max(...entropies) : 0, end: this.#end(cells, event.block) };
  }

  // The position where the text ends on a canvas: at a stop token, or at max_tokens.
  #end(cells, block) {
    const { eos_token_ids: eos = [], max_tokens: maxTokens = Infinity, canvas_length: length = 0 } = this.begin ?? {};
    const stop = cells.findIndex((cell) => cell.token.s !== NOISE && eos.includes(cell.token.id));
    return Math.min(stop < 0 ? cells.length : stop, maxTokens - block * length);
  }

  #board(event) {
    const last = this.frames.at(-1);
    const same = last && last.attempt === event.attempt;
    const revised = event.board.map((digit, i) => same && last.accepted[i] && last.board[i] !== digit);
    const acceptedCount = event.accepted.filter(Boolean).length;
    return { ...event, block: event.attempt, revised, entropy: event.conflicts.length, acceptedCount };
  }

  // The last frame of a canvas.
  lastFrameOf(block) {
    return this.frames.findLast((frame) => frame.block === block);
  }

  // The cell at a position, step by step.
  history(block, i) {
    return this.frames.filter((frame) => frame.block === block && frame.cells?.[i]).map((frame) => frame.cells[i]);
  }

  // The text at a frame: committed canvases, then the likeliest token at every position.
  textAt(index) {
    if (index >= this.frames.length && this.end) return this.end.text;
    const frame = this.frames[Math.min(index, this.frames.length - 1)];
    if (!frame?.cells) return "";
    const committed = this.canvases.slice(0, frame.block).map((canvas) => canvas?.text ?? "");
    const eos = this.begin?.eos_token_ids ?? [];
    const best = frame.cells.map((cell) => cell.token.c[0]);
    const end = best.findIndex(([id]) => eos.includes(id));
    const room = (this.begin?.max_tokens ?? Infinity) - frame.block * (this.begin?.canvas_length ?? 0);
    return committed.join("") + best.slice(0, Math.min(end < 0 ? best.length : end, room)).map(([, text]) => text).join("");
  }
}

// A token with its history: since which step it stands there, and how often the position was rewritten.
function cellOf(token, previous, step) {
  const hadToken = previous && previous.token.s !== NOISE;
  const isSame = hadToken && token.s !== NOISE && previous.token.id === token.id;
  const rewrites = (previous?.rewrites ?? 0) + (hadToken && !isSame ? 1 : 0);
  return { token, step, age: isSame ? previous.age + 1 : 0, firstStep: isSame ? previous.firstStep : step, rewrites };
}

// The CSS class of a cell. `end` is the position where the text ends.
export function cellClass(cell, i, end) {
  if (cell.token.s === PINNED) return "pinned";
  if (cell.committed) return "committed";
  if (i >= end) return "end";
  if (cell.token.s === VERIFIED) return "verified";
  if (cell.isAhead) return cell.age === 0 ? "changed" : "draft";
  if (cell.token.s === NOISE) return "noise";
  if (cell.age === 0) return "changed";
  return cell.age >= 2 ? "stable" : "draft";
}

export const CELL_LABELS = {
  noise: "noise, not yet accepted",
  changed: "changed in this step",
  draft: "draft",
  stable: "unchanged for two steps or more",
  verified: "verified",
  committed: "committed",
  pinned: "pinned",
  end: "after the end",
};
