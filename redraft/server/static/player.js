// A run to look at: the page as tokens, one of them closely, meters; and steering, where somebody listens.
// A replay is this, with the run in the same file.

import { LOOKS, NOISE, PINNED, look } from "./run.js";
import { Timeline, element } from "./timeline.js";

export class Player {
  // `steer` is called with {block, step, pins, bans} when somebody wants to go on from there, `again` with a text whose holes
  // have lengths; without them nothing can be changed.
  constructor(root, { steer = null, again = null, moved = null } = {}) {
    this.steer = steer;
    this.again = again;
    this.onmoved = moved;
    this.run = null;
    this.chosen = null; // {block, i}
    this.hovered = null;
    this.wishes = []; // what is to be pinned or banned, and where it was seen
    this.order = false;
    this.spans = [];
    this.timeline = new Timeline((index) => this.#moved(index));
    this.meters = element("div", { className: "meters" });
    this.meters.setAttribute("aria-live", "off");
    this.page = element("div", { className: "page", tabIndex: 0 });
    this.page.setAttribute("role", "group");
    this.page.setAttribute("aria-label", "The page, token by token: arrows choose one");
    this.closer = element("aside", { className: "closer" });
    this.closer.setAttribute("aria-label", "The chosen token");
    this.mapped = element("button", { type: "button", className: "order", title: "When was each token decided? (o)", onclick: () => this.toggleOrder() }, "Order map");
    this.mapped.setAttribute("aria-pressed", "false");
    this.going = element("div", { className: "going", hidden: true });
    this.result = element("div", { className: "result", hidden: true });
    this.timeline.controls.append(this.mapped);
    this.legend = element("ul", { className: "legend" });
    this.told = element("output", { className: "unseen" }); // what is chosen, for those who listen
    const main = element("div", { className: "watched" }, this.told, this.meters, this.page, this.going, this.timeline.root, this.legend, this.result);
    this.page.append(element("p", { className: "hint" }, "A page begins as noise and is redrafted all at once until it stands still. Here it can be watched."));
    root.replaceChildren(main, this.closer);
    this.#listen();
    this.#close();
  }

  show(run) {
    this.run = run;
    this.chosen = this.hovered = null;
    this.wishes = [];
    const board = run.kind === "sudoku";
    const still = run.kind === "decide"; // nothing is written: there is no page
    this.closer.hidden = this.mapped.hidden = board || still;
    this.page.hidden = this.timeline.root.hidden = this.legend.hidden = still;
    this.legend.replaceChildren(...(board ? entries(CELLS, "cell", "5") : entries(LOOKS, "t", "word")));
    this.timeline.show(run);
    this.grow();
  }

  grow() {
    this.timeline.grow();
    this.#metered();
    this.#wished();
    this.#ended();
  }

  toggleOrder() {
    this.order = !this.order;
    this.mapped.setAttribute("aria-pressed", String(this.order));
    this.#draw();
  }

  #listen() {
    const at = (event) => event.target.closest?.("[data-i]");
    this.page.addEventListener("pointerover", (event) => this.#hover(at(event)));
    this.page.addEventListener("pointerleave", () => this.#hover(null));
    this.page.addEventListener("click", (event) => this.#choose(at(event)));
    this.page.addEventListener("keydown", (event) => this.#keyed(event));
  }

  #hover(span) {
    if (this.closer.querySelector(".instead") === document.activeElement) return; // somebody types there
    this.hovered = span ? placeOf(span) : null;
    this.#close();
  }

  #choose(span) {
    if (!span) return;
    this.chosen = placeOf(span);
    this.hovered = null;
    this.#marked();
    this.#close();
    const cell = this.#cell(this.chosen);
    if (cell) this.told.textContent = `${visible(cell.token.t)}, ${LOOKS[look(cell, this.chosen.i, Infinity)]}, ${(100 * cell.token.p).toFixed(0)} percent`;
  }

  #keyed(event) {
    const by = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 }[event.key];
    if (by) {
      const now = this.spans.findIndex((span) => same(placeOf(span), this.chosen));
      const next = Math.max(0, Math.min(this.spans.length - 1, now < 0 ? 0 : now + by));
      this.#choose(this.spans[next]);
      this.spans[next]?.scrollIntoView({ block: "nearest" });
    } else if (this.chosen && !event.ctrlKey && !event.metaKey && ["p", "b", "r"].includes(event.key)) {
      const cell = this.#cell(this.chosen);
      if (!cell) return; // a page that nobody doubted
      if (event.key === "p") this.wish("pin", this.chosen, cell.token.id, cell.token.t);
      if (event.key === "b") this.wish("ban", this.chosen, cell.token.id, cell.token.t);
      if (event.key === "r") this.closer.querySelector(".instead")?.focus();
    } else return;
    event.preventDefault();
  }

  #moved(index) {
    this.#draw();
    if (!this.closer.contains(document.activeElement)) this.#close();
    this.onmoved?.(index);
  }

  get steers() {
    return Boolean(this.steer && this.run?.steerable);
  }

  get frame() {
    return this.run.frames[this.timeline.index];
  }

  // The cell at a place at the step that is shown; of a page that is committed, with the token that was.
  #cell(place) {
    if (this.frame?.block === place.block) return this.frame.cells?.[place.i];
    const cell = this.run.lastOf(place.block)?.cells?.[place.i];
    const page = this.run.pages[place.block];
    if (!cell || !page) return cell;
    const [id, t] = [page.ids[place.i], page.texts[place.i] ?? cell.token.t];
    return { ...cell, committed: true, token: { ...cell.token, id, t } };
  }

  #draw() {
    if (!this.run) return;
    const frame = this.frame;
    const parts = [];
    this.spans = [];
    this.page.classList.toggle("mapped", this.order);
    if (this.run.frames[0]?.board) return this.page.replaceChildren(board(this.run, frame ?? this.run.frames.at(-1), !frame));
    const alone = !frame && !this.run.spelled; // an end without pages: what was filled, whole
    if (this.run.begin?.before && !alone) parts.push(element("span", { className: "before" }, this.run.begin.before));
    const upTo = frame ? frame.block : Infinity;
    if (!alone) this.run.pages.forEach((page, block) => block < upTo && parts.push(...this.#committed(page)));
    if (frame) frame.cells.forEach((cell, i) => parts.push(this.#token(frame.block, i, cell.token.t, look(cell, i, frame.ends), cell)));
    if (alone && this.run.end) parts.push(element("span", { className: "said" }, this.run.end.text));
    this.page.replaceChildren(...parts);
    this.#marked();
  }

  #committed(page) {
    const cells = this.run.lastOf(page.block)?.cells ?? [];
    return page.texts.map((text, i) => this.#token(page.block, i, text, cells[i]?.token.s === PINNED ? "pinned" : "committed", cells[i]));
  }

  #token(block, i, text, kind, cell) {
    const span = element("span", { className: `t ${kind}` }, shown(text, kind));
    span.dataset.block = block;
    span.dataset.i = i;
    if (this.order && cell && kind !== "noise") {
      const share = cell.token.s === PINNED ? 0 : cell.since / Math.max(1, this.run.lastOf(block)?.step ?? 1);
      span.style.setProperty("--when", share.toFixed(3));
    }
    this.spans.push(span);
    return span;
  }

  #marked() {
    for (const span of this.spans) {
      const place = placeOf(span);
      span.classList.toggle("chosen", same(place, this.chosen));
      span.classList.toggle("wished", this.wishes.some((wish) => same(wish, place)));
    }
  }

  // One token closely

  #close() {
    const place = this.hovered ?? this.chosen;
    const cell = place && this.run && this.#cell(place);
    if (!cell) return this.closer.replaceChildren(element("p", { className: "hint" }, this.steers ? "Point at a token to see what else it could be. Choose one to pin, ban or replace it." : "Point at a token to see what else it could be."));
    const { token } = cell;
    const history = this.run.history(place.block, place.i);
    const kind = look(cell, place.i, this.frame?.block === place.block ? this.frame.ends : Infinity);
    this.closer.replaceChildren(
      element("h2", {}, visible(token.t)),
      element("p", { className: "facts" }, `${LOOKS[kind]} · id ${token.id} · place ${place.block * this.#length() + place.i + 1}`),
      element("p", { className: "facts" }, `since step ${cell.since} · rewritten ${cell.rewrites} ${cell.rewrites === 1 ? "time" : "times"} · doubt ${token.e.toFixed(2)} nats`),
      this.#candidates(place, token),
      past(history, cell.step),
      ...(this.steers ? [this.#actions(place, token)] : []),
    );
  }

  #length() {
    return this.run.begin?.canvas_length || this.frame?.cells?.length || 0;
  }

  #candidates(place, token) {
    const rows = token.c.map(([id, text, share]) =>
      bar(share, element("button", { type: "button", title: `Pin ${visible(text)} here`, disabled: !this.steers, onclick: () => this.wish("pin", place, id, text) }, visible(text))),
    );
    return element("ol", { className: "candidates" }, ...rows);
  }

  #actions(place, token) {
    const wish = (kind) => () => this.wish(kind, place, token.id, token.t);
    const instead = element("input", { className: "instead", type: "text", placeholder: "another text", ariaLabel: "Replace by" });
    const replace = (event) => {
      event.preventDefault();
      if (instead.value) this.wish("pin", place, null, instead.value);
    };
    return element(
      "form",
      { className: "actions", onsubmit: replace },
      element("button", { type: "button", className: "pin", title: "This token stays (p)", onclick: wish("pin") }, "Pin"),
      element("button", { type: "button", className: "ban", title: "Never this token here (b)", onclick: wish("ban") }, "Ban"),
      instead,
      element("button", { type: "submit", title: "Pin this text here instead (r)" }, "Replace"),
    );
  }

  // Steering

  wish(kind, place, id, text) {
    if (!this.steers) return;
    const shown = this.frame?.block === place.block ? this.frame : this.run.lastOf(place.block);
    const step = Math.min(shown.step, shown.total - 1);
    this.chosen = { block: place.block, i: place.i };
    this.wishes = this.wishes.filter((wish) => !same(wish, place)).concat({ kind, block: place.block, i: place.i, step, id, text });
    this.#wished();
    this.#marked();
  }

  #wished() {
    this.going.hidden = !this.wishes.length;
    if (!this.wishes.length) return;
    const chips = this.wishes.map((wish) =>
      element("button", { type: "button", className: `chip ${wish.kind}`, title: "Take this back", onclick: () => this.#unwish(wish) }, `${wish.kind} ${visible(wish.text)} ×`),
    );
    const { block, step } = this.#from();
    const go = element("button", { type: "button", className: "go primary", title: "Redraft from there (g)", onclick: () => this.goOn() }, `Go on from page ${block + 1}, step ${step}`);
    const hint = element("small", { className: "hint" }, "The earlier the step, the more can still change: scrub back before you choose.");
    this.going.replaceChildren(...chips, go, hint);
  }

  #unwish(wish) {
    this.wishes = this.wishes.filter((other) => other !== wish);
    this.#wished();
    this.#marked();
  }

  // The earliest of the steps at which something was wished for.
  #from() {
    return this.wishes.reduce((first, wish) => (wish.block < first.block || (wish.block === first.block && wish.step < first.step) ? wish : first));
  }

  goOn() {
    if (!this.wishes.length || !this.steers) return;
    const { block, step } = this.#from();
    const place = (wish) => ({ at: wish.block * this.#length() + wish.i, ...(wish.id === null ? { text: wish.text } : { id: wish.id }) });
    const of = (kind) => this.wishes.filter((wish) => wish.kind === kind).map(place);
    this.steer({ block, step, pins: of("pin"), bans: of("ban") });
  }

  // Meters and the result

  #metered() {
    const { end, frames, error } = this.run;
    const chip = (value, unit, title) => element("span", { className: "meter", title }, element("b", {}, value), ` ${unit}`);
    const found = [];
    if (error) found.push(element("span", { className: "badge bad" }, error));
    if (!end) found.push(chip(frames.length, "steps so far", "Passes over pages up to now"));
    else if (this.run.kind === "sudoku") found.push(...boardMeters(end, chip));
    else if (this.run.kind === "decide") found.push(chip(1, "pass", "One, whatever the number of answers"), chip((end.timings.diffusion_wall_ms / 1000).toFixed(2), "s", "Wall time"));
    else found.push(...textMeters(end, this.run.pages, chip));
    if (end?.memory) found.push(...memory(end.memory, chip));
    this.meters.replaceChildren(...found);
  }

  // Holes whose lengths were searched for can be steered once these are known.
  #steerable() {
    const { lengths, texts } = this.run.end;
    if (!lengths || !this.again) return [];
    const marked = texts.map((text, i) => (i < lengths.length ? `${text}[[ ${Math.max(1, lengths[i])} ]]` : text)).join("");
    return [element("button", { type: "button", className: "again", title: "All holes on one page, each as long as it was found to be: its tokens can be pinned and banned", onclick: () => this.again(marked) }, "Steer with these lengths")];
  }

  #ended() {
    const { end, kind } = this.run;
    this.result.hidden = !end || !["fill", "edit", "decide"].includes(kind);
    if (this.result.hidden) return;
    if (kind === "decide") return this.result.replaceChildren(element("h2", {}, "How likely each is"), element("ol", { className: "candidates" }, ...end.choices.map((choice) => bar(choice.probability, element("span", {}, choice.text)))));
    const copy = element("button", { type: "button", onclick: () => navigator.clipboard.writeText(end.text) }, "Copy");
    this.result.replaceChildren(element("h2", {}, kind === "edit" ? "What has changed" : "Filled", copy, ...this.#steerable()), element("pre", {}, ...(kind === "edit" ? changed(this.run) : filled(end))));
  }
}

function memory(told, chip) {
  const gigabytes = (bytes) => (bytes / 2 ** 30).toFixed(2);
  const found = [];
  if (told.device !== null) found.push(chip(gigabytes(told.device), "GiB on the GPU", "What the server holds there now"));
  if (told.process !== null) found.push(chip(gigabytes(told.process), "GiB", "What the server holds in main memory now"));
  return found;
}

// A line with a bar behind it.
function bar(share, what) {
  const drawn = element("i", { className: "bar" });
  drawn.style.width = `${(100 * share).toFixed(1)}%`;
  return element("li", {}, drawn, what, element("b", {}, `${(100 * share).toFixed(1)}%`));
}

function textMeters(end, pages, chip) {
  const told = end.timings;
  const calm = told.diffusion_settled && pages.every((page) => page.settled);
  return [
    chip(told.diffusion_output_tok_s.toFixed(1), "tokens/s", "What you received over wall time, the prompt's reading included"),
    chip(told.predicted_n, "tokens", "What you received"),
    chip(told.diffusion_steps, "steps", "Denoising passes"),
    chip(told.diffusion_forwards, "passes", "Denoising passes and those that read finished pages"),
    chip((told.predicted_n / Math.max(1, told.diffusion_forwards)).toFixed(1), "tokens a pass", "Output tokens over all passes"),
    chip((told.diffusion_wall_ms / 1000).toFixed(2), "s", "Wall time"),
    element("span", { className: calm ? "badge good" : "badge warn", title: calm ? "Every page stood still before its last step" : "A page still moved at its last step: treat the text with doubt" }, calm ? "settled" : "did not settle"),
    chip(told.seed, "seed", "Gives the same again"),
  ];
}

function boardMeters(end, chip) {
  return [
    chip(end.forwards, "passes", "Over all canvases of this puzzle"),
    chip(end.canvases, end.canvases === 1 ? "canvas" : "canvases", "Tried until the rules held"),
    chip(end.revisions, "revisions", "Digits thought better of on the canvas that is shown"),
    chip(end.seconds.toFixed(2), "s", "Wall time"),
    element("span", { className: end.solved ? "badge good" : "badge warn" }, end.solved ? "solved" : "not solved"),
    chip(end.seed, "seed", "Gives the same again"),
  ];
}

function changed(run) {
  const parts = [];
  let at = 0;
  for (const change of run.end.changes) {
    parts.push(run.asked.body.text.slice(at, change.start), element("del", {}, change.old), element("ins", {}, change.new));
    at = change.end;
  }
  parts.push(run.asked.body.text.slice(at));
  return parts;
}

function filled(end) {
  if (!end.holes) return [end.text];
  return end.texts.flatMap((text, i) => (i < end.holes.length ? [text, element("ins", {}, end.holes[i])] : [text]));
}

// What stood at a place, and how much it was doubted, up to the step that is shown.
function past(history, now) {
  const most = Math.max(...history.map((cell) => cell.token.e), 0.01);
  const bars = history.map((cell) => {
    const found = element("i", { title: `step ${cell.step}: ${visible(cell.token.t)}, ${cell.token.e.toFixed(2)} nats`, className: `${cell.token.s === NOISE ? "noise" : "sure"}${cell.step === now ? " now" : ""}` });
    found.style.height = `${Math.max(4, (100 * cell.token.e) / most)}%`;
    return found;
  });
  const words = [];
  for (const cell of history) if (cell.token.s !== NOISE && words.at(-1)?.text !== cell.token.t) words.push({ step: cell.step, text: cell.token.t });
  const stood = words.slice(-6).map(({ step, text }) => element("li", {}, element("small", {}, `${step} `), visible(text)));
  return element("div", { className: "past" }, element("div", { className: "bars", role: "img", ariaLabel: "Doubt at every step" }, ...bars), element("ul", {}, ...stood));
}

const CELLS = { given: "given", open: "not yet decided", sure: "accepted", revised: "thought better of", clash: "contradicts another" };

function entries(looks, name, sample) {
  return Object.entries(looks).map(([kind, said]) => element("li", {}, element("span", { className: `${name} ${kind}` }, kind === "end" ? "eos" : sample), ` ${said}`));
}

export function board(run, frame, ended) {
  const digits = ended && run.end ? run.end.board : frame?.board ?? run.begin.puzzle;
  const clashing = new Set(ended && run.end?.solved ? [] : (frame?.clashing ?? []));
  const cells = digits.map((digit, i) => {
    const given = run.begin.puzzle[i] > 0;
    const kind = given ? "given" : clashing.has(i) ? "clash" : frame?.revised?.[i] && !ended ? "revised" : ended || frame?.accepted?.[i] ? "sure" : "open";
    return element("td", { className: `cell ${kind}` }, digit || "");
  });
  const rows = [...Array(9).keys()].map((row) => element("tr", {}, ...cells.slice(9 * row, 9 * row + 9)));
  return element("table", { className: "board", ariaLabel: "The board" }, element("tbody", {}, ...rows));
}

const placeOf = (span) => ({ block: +span.dataset.block, i: +span.dataset.i });
const same = (one, other) => Boolean(one && other && one.block === other.block && one.i === other.i);
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";
const shown = (text, kind) => (kind === "end" ? "·" : kind === "committed" ? text : text.replaceAll("\n", "⏎\n"));
