// Shows a run: the canvas token by token, details of one token, meters, and controls to steer the run.
// A saved replay is this player with the run in the same file.

import { CELL_LABELS, NOISE, PINNED, cellClass } from "./run.js";
import { Timeline, element } from "./timeline.js";

export class Player {
  // `onSteer` is called with {block, step, pins, bans} to resume the run from there, `onRefill` with a text whose gaps have
  // lengths. Without them the run is read-only.
  constructor(root, { onSteer = null, onRefill = null, onMove = null } = {}) {
    this.onSteer = onSteer;
    this.onRefill = onRefill;
    this.onMove = onMove;
    this.run = null;
    this.chosen = null; // {block, i}
    this.hovered = null;
    this.pending = []; // pins and bans to apply, and the step at which each was chosen
    this.showsOrder = false;
    this.spans = [];
    this.timeline = new Timeline((index) => this.#onMove(index));
    this.meters = element("div", { className: "meters" });
    this.meters.setAttribute("aria-live", "off");
    this.canvas = element("div", { className: "canvas", tabIndex: 0 });
    this.canvas.setAttribute("role", "group");
    this.canvas.setAttribute("aria-label", "The canvas, token by token: arrow keys choose one");
    this.details = element("section", { className: "details" });
    this.details.setAttribute("aria-label", "The chosen token");
    this.orderButton = element("button", { type: "button", className: "order", title: "The step that decided each token (o)", onclick: () => this.toggleOrder() }, "Order map");
    this.orderButton.setAttribute("aria-pressed", "false");
    this.resumeBar = element("div", { className: "resume", hidden: true });
    this.result = element("div", { className: "result", hidden: true });
    this.timeline.controls.append(this.orderButton);
    this.legend = element("ul", { className: "legend" });
    this.announcement = element("output", { className: "unseen" }); // the chosen token, for screen readers
    this.orderKey = element("p", { className: "key order-key", hidden: true }, element("span", {}, "decided at the first step"), element("i", { className: "gradient" }), element("span", {}, "at the last"));
    const main = element("div", { className: "watch" }, this.announcement, this.result, this.canvas, this.orderKey, this.resumeBar, this.timeline.root);
    const side = element("div", { className: "side" }, this.details, this.meters, this.legend);
    root.replaceChildren(main, side);
    this.#listen();
    this.#showDetails();
  }

  show(run) {
    this.run = run;
    this.chosen = this.hovered = null;
    this.pending = [];
    const isBoard = run.kind === "sudoku";
    const hasNoCanvas = run.kind === "decide"; // nothing is written
    this.details.hidden = this.orderButton.hidden = isBoard || hasNoCanvas;
    this.orderKey.hidden = !this.showsOrder || this.orderButton.hidden;
    this.canvas.hidden = this.timeline.root.hidden = this.legend.hidden = hasNoCanvas;
    this.legend.replaceChildren(...(isBoard ? legendEntries(BOARD_LABELS, "cell", "5") : legendEntries(CELL_LABELS, "t", "word")));
    this.timeline.show(run);
    this.update();
  }

  update() {
    this.timeline.update();
    this.#showMeters();
    this.#showPending();
    this.#showResult();
  }

  toggleOrder() {
    this.showsOrder = !this.showsOrder;
    this.orderKey.hidden = !this.showsOrder;
    this.orderButton.setAttribute("aria-pressed", String(this.showsOrder));
    this.#draw();
  }

  #listen() {
    const tokenOf = (event) => event.target.closest?.("[data-i]");
    this.canvas.addEventListener("pointerover", (event) => this.#hover(tokenOf(event)));
    this.canvas.addEventListener("pointerleave", () => this.#hover(null));
    this.canvas.addEventListener("click", (event) => this.#choose(tokenOf(event)));
    this.canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  #hover(span) {
    if (this.details.querySelector(".replacement") === document.activeElement) return; // the user types there
    this.hovered = span ? positionOf(span) : null;
    this.#showDetails();
  }

  #choose(span) {
    if (!span) return;
    this.chosen = positionOf(span);
    this.hovered = null;
    this.#markTokens();
    this.#showDetails();
    const cell = this.#cell(this.chosen);
    if (cell) this.announcement.textContent = `${visible(cell.token.t)}, ${CELL_LABELS[cellClass(cell, this.chosen.i, Infinity)]}` + (cell.token.p === null ? "" : `, ${(100 * cell.token.p).toFixed(0)} percent`);
  }

  #onKey(event) {
    const by = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 }[event.key];
    if (by) {
      const current = this.spans.findIndex((span) => same(positionOf(span), this.chosen));
      const next = Math.max(0, Math.min(this.spans.length - 1, current < 0 ? 0 : current + by));
      this.#choose(this.spans[next]);
      this.spans[next]?.scrollIntoView({ block: "nearest" });
    } else if (this.chosen && !event.ctrlKey && !event.metaKey && ["p", "b", "r"].includes(event.key)) {
      const cell = this.#cell(this.chosen);
      if (!cell) return; // a canvas that was not redrafted
      if (event.key === "p") this.addPending("pin", this.chosen, cell.token.id, cell.token.t);
      if (event.key === "b") this.addPending("ban", this.chosen, cell.token.id, cell.token.t);
      if (event.key === "r") this.details.querySelector(".replacement")?.focus();
    } else return;
    event.preventDefault();
  }

  #onMove(index) {
    this.#draw();
    if (!this.details.contains(document.activeElement)) this.#showDetails();
    this.onMove?.(index);
  }

  get canSteer() {
    return Boolean(this.onSteer && this.run?.isSteerable);
  }

  get frame() {
    return this.run.frames[this.timeline.index];
  }

  // The cell at a position at the step that is shown; on a committed canvas, with the committed token.
  #cell(place) {
    if (this.frame?.block === place.block) return this.frame.cells?.[place.i];
    const cell = this.run.lastFrameOf(place.block)?.cells?.[place.i];
    const canvas = this.run.canvases[place.block];
    if (!cell || !canvas) return cell;
    const id = canvas.ids[place.i];
    const t = canvas.texts[place.i] ?? cell.token.t;
    const p = canvas.probabilities?.[place.i] ?? cell.token.p;
    const c = canvas.candidates?.[place.i] ?? cell.token.c;
    return { ...cell, committed: true, token: { ...cell.token, id, t, p, c } };
  }

  #draw() {
    if (!this.run) return;
    const frame = this.frame;
    const parts = [];
    this.spans = [];
    this.canvas.classList.toggle("mapped", this.showsOrder);
    if (this.run.frames[0]?.board) return this.canvas.replaceChildren(board(this.run, frame ?? this.run.frames.at(-1), !frame));
    const showsEndOnly = !frame && !this.run.canvasesSpellText; // the final text, as the end event has it
    if (this.run.begin?.prefix && !showsEndOnly) parts.push(element("span", { className: "prefix" }, this.run.begin.prefix));
    const upTo = frame ? frame.block : Infinity;
    if (!showsEndOnly) this.run.canvases.forEach((canvas, block) => block < upTo && parts.push(...this.#committed(canvas)));
    if (frame) frame.cells.forEach((cell, i) => parts.push(this.#token(frame.block, i, cell.token.t, cellClass(cell, i, frame.end) + (i === frame.verified ? " front" : ""), cell)));
    if (showsEndOnly && this.run.end) parts.push(element("span", { className: "final" }, this.run.end.text));
    this.canvas.replaceChildren(...parts);
    this.canvas.classList.toggle("code", CODE.test(this.canvas.textContent));
    this.#markTokens();
  }

  #committed(canvas) {
    const cells = this.run.lastFrameOf(canvas.block)?.cells ?? [];
    return canvas.texts.map((text, i) => this.#token(canvas.block, i, text, cells[i]?.token.s === PINNED ? "pinned" : "committed", cells[i]));
  }

  #token(block, i, text, kind, cell) {
    const span = element("span", { className: `t ${kind}` }, shown(text, kind.split(" ")[0]));
    span.dataset.block = block;
    span.dataset.i = i;
    if (this.showsOrder && cell && kind !== "noise") {
      const share = cell.token.s === PINNED ? 0 : cell.firstStep / Math.max(1, this.run.lastFrameOf(block)?.step ?? 1);
      span.style.setProperty("--when", share.toFixed(3));
    }
    this.spans.push(span);
    return span;
  }

  #markTokens() {
    for (const span of this.spans) {
      const place = positionOf(span);
      span.classList.toggle("chosen", same(place, this.chosen));
      span.classList.toggle("pending", this.pending.some((entry) => same(entry, place)));
    }
  }

  // Details of one token

  #showDetails() {
    const place = this.hovered ?? this.chosen;
    const cell = place && this.run && this.#cell(place);
    this.details.classList.toggle("empty", !cell);
    if (!cell) return this.details.replaceChildren(element("p", { className: "hint" }, this.canSteer ? "Point at a token to see its candidates. Click one to pin, ban or replace it." : "Point at a token to see its candidates."));
    const { token } = cell;
    const history = this.run.history(place.block, place.i);
    const kind = cellClass(cell, place.i, this.frame?.block === place.block ? this.frame.end : Infinity);
    this.details.replaceChildren(
      element("h2", {}, visible(token.t)),
      element("button", { type: "button", className: "close", title: "Close", ariaLabel: "Close", onclick: () => this.closeDetails() }, "×"),
      element("p", { className: "facts" }, `${CELL_LABELS[kind]} · id ${token.id} · position ${place.block * this.#length() + place.i + 1}`),
      element("p", { className: "facts" }, `since step ${cell.firstStep} · rewritten ${cell.rewrites} ${cell.rewrites === 1 ? "time" : "times"}` + (token.e === null ? "" : ` · entropy ${token.e.toFixed(2)} nats`)),
      this.#candidates(place, token),
      historyChart(history, cell.step),
      ...(this.canSteer ? [this.#actions(place, token)] : []),
    );
  }

  closeDetails() {
    this.chosen = this.hovered = null;
    this.#markTokens();
    this.#showDetails();
  }

  #length() {
    return this.run.begin?.canvas_length || this.frame?.cells?.length || 0;
  }

  #candidates(place, token) {
    const rows = token.c.map(([id, text, share]) =>
      bar(share, element("button", { type: "button", title: `Pin ${visible(text)} here`, disabled: !this.canSteer, onclick: () => this.addPending("pin", place, id, text) }, visible(text))),
    );
    return element("ol", { className: "candidates" }, ...rows);
  }

  #actions(place, token) {
    const add = (kind) => () => this.addPending(kind, place, token.id, token.t);
    const replacement = element("input", { className: "replacement", type: "text", placeholder: "another text", ariaLabel: "Replace by" });
    const replace = (event) => {
      event.preventDefault();
      if (replacement.value) this.addPending("pin", place, null, replacement.value);
    };
    return element(
      "form",
      { className: "actions", onsubmit: replace },
      element("button", { type: "button", className: "pin", title: "Keep this token here (p)", onclick: add("pin") }, "Pin"),
      element("button", { type: "button", className: "ban", title: "Never this token here (b)", onclick: add("ban") }, "Ban"),
      replacement,
      element("button", { type: "submit", title: "Pin this text here instead (r)" }, "Replace"),
    );
  }

  // Steering

  // Notes a pin or ban; `resume` applies all of them.
  addPending(kind, place, id, text) {
    if (!this.canSteer) return;
    const shown = this.frame?.block === place.block ? this.frame : this.run.lastFrameOf(place.block);
    const step = this.run.isVerified ? 0 : Math.min(shown.step, shown.max_steps - 1);
    this.chosen = { block: place.block, i: place.i };
    this.pending = this.pending.filter((entry) => !same(entry, place)).concat({ kind, block: place.block, i: place.i, step, id, text });
    this.#showPending();
    this.#markTokens();
  }

  #showPending() {
    this.resumeBar.hidden = !this.pending.length;
    if (!this.pending.length) return;
    const chips = this.pending.map((entry) =>
      element("button", { type: "button", className: `chip ${entry.kind}`, title: "Remove", onclick: () => this.#removePending(entry) }, `${entry.kind} ${visible(entry.text)} ×`),
    );
    const { block, step } = this.#firstPending();
    const go = element("button", { type: "button", className: "go primary", title: "Resume from there (g)", onclick: () => this.resume() }, `Resume from canvas ${block + 1}, step ${step}`);
    const hint = element("small", { className: "hint" }, this.run.isVerified ? UNCHECKED : "The earlier the step, the more can still change: go back before you choose.");
    this.resumeBar.replaceChildren(...chips, go, hint);
  }

  #removePending(entry) {
    this.pending = this.pending.filter((other) => other !== entry);
    this.#showPending();
    this.#markTokens();
  }

  // The pending pin or ban with the earliest step.
  #firstPending() {
    return this.pending.reduce((first, entry) => (entry.block < first.block || (entry.block === first.block && entry.step < first.step) ? entry : first));
  }

  resume() {
    if (!this.pending.length || !this.canSteer) return;
    const { block, step } = this.#firstPending();
    const positioned = (entry) => ({ position: entry.block * this.#length() + entry.i, ...(entry.id === null ? { text: entry.text } : { id: entry.id }) });
    const of = (kind) => this.pending.filter((entry) => entry.kind === kind).map(positioned);
    this.onSteer({ block, step, pins: of("pin"), bans: of("ban") });
  }

  // Meters and the result

  #showMeters() {
    const { end, frames, error } = this.run;
    const chip = (value, unit, title) => element("span", { className: "meter", title }, element("b", {}, value), ` ${unit}`);
    const unit = this.run.begin?.check === "exact" ? "rounds so far" : this.run.isVerified ? "steps and rounds so far" : "steps so far";
    const meters = [];
    if (error) meters.push(element("span", { className: "badge bad" }, error));
    if (!end) meters.push(chip(frames.length, unit, "Denoising steps, and rounds that verify, up to now"));
    else if (this.run.kind === "sudoku") meters.push(...boardMeters(end, chip));
    else if (this.run.kind === "decide") meters.push(chip(1, "forward", "One, whatever the number of answers"), chip((end.timings.diffusion_wall_ms / 1000).toFixed(2), "s", "Wall time"));
    else meters.push(...textMeters(end, this.run.canvases, chip));
    if (end?.memory) meters.push(...memoryMeters(end.memory, chip));
    this.meters.replaceChildren(...meters);
  }

  // Gaps whose lengths were searched for can be steered with the lengths that were found.
  #refillButton() {
    const { lengths, texts } = this.run.end;
    if (!lengths || !this.onRefill) return [];
    const marked = texts.map((text, i) => (i < lengths.length ? `${text}[[ ${Math.max(1, lengths[i])} ]]` : text)).join("");
    return [element("button", { type: "button", className: "refill", title: "All gaps on one canvas, with the lengths that were found: tokens can be pinned and banned", onclick: () => this.onRefill(marked) }, "Steer with these lengths")];
  }

  #showResult() {
    const { end, kind } = this.run;
    this.result.hidden = !end || !["fill", "edit", "decide"].includes(kind);
    if (this.result.hidden) return;
    if (kind === "decide") return this.result.replaceChildren(element("p", { className: "question" }, promptOf(this.run)), element("ol", { className: "candidates" }, ...end.choices.map((choice) => bar(choice.probability, element("span", {}, choice.text)))));
    const copy = element("button", { type: "button", onclick: () => navigator.clipboard.writeText(end.text) }, "Copy");
    this.result.replaceChildren(element("h2", {}, kind === "edit" ? "Changes" : "Filled", copy, ...this.#refillButton()), element("pre", {}, ...(kind === "edit" ? changeParts(this.run) : filledParts(end))));
  }
}

const seedMeter = (seed) => element("span", { className: "meter", title: "Gives the same text again" }, "seed ", element("b", {}, seed));

function memoryMeters(memory, chip) {
  const gibibytes = (bytes) => (bytes / 2 ** 30).toFixed(2);
  const meters = [];
  if (memory.device !== null) meters.push(chip(gibibytes(memory.device), "GiB on the GPU", "GPU memory of the server"));
  if (memory.process !== null) meters.push(chip(gibibytes(memory.process), "GiB", "Main memory of the server"));
  return meters;
}

// A list item with a bar behind it. Of a token that the causal half put there, the share is not known until the end.
function bar(share, content) {
  if (share === null) return element("li", {}, content);
  const background = element("i", { className: "bar" });
  background.style.width = `${(100 * share).toFixed(1)}%`;
  return element("li", {}, background, content, element("b", {}, `${(100 * share).toFixed(1)}%`));
}

function textMeters(end, canvases, chip) {
  const { timings } = end;
  const isVerified = timings.check !== "off";
  const isSettled = timings.diffusion_settled && canvases.every((canvas) => canvas.settled);
  const settled = element("span", { className: isSettled ? "badge good" : "badge warn", title: isSettled ? "Every canvas settled before its last step" : "A canvas still changed at its last step: do not trust the text" }, isSettled ? "settled" : "did not settle");
  const verified = element("span", { className: "badge good", title: timings.check === "exact" ? "Every token is the one that the causal half picks" : "The causal half finds every token likely enough" }, timings.check);
  const drafts = [
    chip(timings.drafted, "drafted", "Drafted tokens that the causal half has verified"),
    chip(timings.accepted, "accepted", "Drafted tokens that it accepted"),
    chip(timings.corrected, "corrected", "Drafted tokens that it replaced"),
  ];
  return [
    chip(timings.diffusion_output_tok_s.toFixed(1), "tokens/s", "Output tokens over wall time, prefill included"),
    chip(timings.predicted_n, "tokens", "Output tokens"),
    chip(timings.diffusion_steps, "steps", "Denoising steps"),
    ...(isVerified ? drafts : []),
    chip(timings.diffusion_forwards, "forwards", "Denoising steps, rounds that verify, and forwards that put committed canvases into the KV cache"),
    chip(timings.tokens_per_forward.toFixed(1), "tokens per forward", "Output tokens over all forwards"),
    chip((timings.diffusion_wall_ms / 1000).toFixed(2), "s", "Wall time"),
    isVerified ? verified : settled,
    seedMeter(timings.seed),
  ];
}

function boardMeters(end, chip) {
  return [
    chip(end.forwards, "forwards", "Over all canvases of this puzzle"),
    chip(end.canvases, end.canvases === 1 ? "canvas" : "canvases", "Tried until the board was correct"),
    chip(end.revisions, "revisions", "Accepted digits that changed later, on the canvas that is shown"),
    chip(end.seconds.toFixed(2), "s", "Wall time"),
    element("span", { className: end.solved ? "badge good" : "badge warn" }, end.solved ? "solved" : "not solved"),
    seedMeter(end.seed),
  ];
}

function changeParts(run) {
  const { text } = run.request.body;
  const parts = [];
  let position = 0;
  for (const change of run.end.changes) {
    parts.push(text.slice(position, change.start), element("del", {}, change.old), element("ins", {}, change.new));
    position = change.end;
  }
  parts.push(text.slice(position));
  return parts;
}

function filledParts(end) {
  if (!end.gaps) return [end.text];
  return end.texts.flatMap((text, i) => (i < end.gaps.length ? [text, element("ins", {}, end.gaps[i])] : [text]));
}

// The tokens at a position and their entropy, step by step. `now` is the step that is shown.
function historyChart(history, now) {
  const topEntropy = Math.max(...history.map((cell) => cell.token.e ?? 0), 0.01);
  const bars = history.map((cell) => {
    const entropy = cell.token.e ?? 0; // a round of checked or exact mode gives none
    const bar = element("i", { title: `step ${cell.step}: ${visible(cell.token.t)}, ${entropy.toFixed(2)} nats`, className: `${cell.token.s === NOISE ? "noise" : "sure"}${cell.step === now ? " now" : ""}` });
    bar.style.height = `${Math.max(4, (100 * entropy) / topEntropy)}%`;
    return bar;
  });
  const words = [];
  for (const cell of history) if (cell.token.s !== NOISE && words.at(-1)?.text !== cell.token.t) words.push({ step: cell.step, text: cell.token.t });
  const tokens = words.slice(-6).map(({ step, text }) => element("li", {}, element("small", {}, `${step} `), visible(text)));
  return element("div", { className: "history" }, element("div", { className: "bars", role: "img", ariaLabel: "Entropy at every step" }, ...bars), element("ul", {}, ...tokens));
}

const CODE = /^( {2,}|\t)\S|^<[a-z!]|[{;]$/m; // a text that reads best in letters of one width
const UNCHECKED = "Steering turns the check off: this canvas is denoised again from its first step, and the causal half does not verify it.";
const BOARD_LABELS = { given: "given", open: "not yet accepted", accepted: "accepted", revised: "revised", conflict: "in conflict with another" };

function legendEntries(labels, name, sample) {
  return Object.entries(labels).map(([kind, label]) => element("li", {}, element("span", { className: `${name} ${kind}` }, kind === "end" ? "eos" : sample), ` ${label}`));
}

// The board at a frame, or at the end.
export function board(run, frame, isEnd) {
  const digits = isEnd && run.end ? run.end.board : frame?.board ?? run.begin.puzzle;
  const conflicts = new Set(isEnd && run.end?.solved ? [] : (frame?.conflicts ?? []));
  const cells = digits.map((digit, i) => {
    const isGiven = run.begin.puzzle[i] > 0;
    const kind = isGiven ? "given" : conflicts.has(i) ? "conflict" : frame?.revised?.[i] && !isEnd ? "revised" : isEnd || frame?.accepted?.[i] ? "accepted" : "open";
    return element("td", { className: `cell ${kind}` }, digit || "");
  });
  const rows = [...Array(9).keys()].map((row) => element("tr", {}, ...cells.slice(9 * row, 9 * row + 9)));
  return element("table", { className: "board", ariaLabel: "The board" }, element("tbody", {}, ...rows));
}

const promptOf = ({ request: { body } }) => body.prompt ?? body.messages.at(-1).content;
const positionOf = (span) => ({ block: +span.dataset.block, i: +span.dataset.i });
const same = (one, other) => Boolean(one && other && one.block === other.block && one.i === other.i);
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";
const shown = (text, kind) => (kind === "end" ? "·" : ["committed", "verified"].includes(kind) ? text : text.replaceAll("\n", "⏎\n"));
