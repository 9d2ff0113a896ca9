// The stage of one tab: a sentence that says what one sees, and a run, a race or a page that the model wrote.

import { Player } from "./player.js";
import { element } from "./timeline.js";

export const SENTENCES = {
  write: "A canvas of noise becomes text: every position is redrafted at every step, and what is certain stays.",
  chat: "",
  fill: "The text around a gap is pinned; only the gap starts as noise, and it is written with both sides in sight.",
  edit: "The words that the model finds least likely become noise and are written again; everything else stays.",
  sudoku: "All empty cells are guessed at once and revised together, until no two contradict one another.",
  decide: "One forward over a canvas of noise gives the probability of every answer. Nothing is written.",
};

const HTML = /<(!doctype|html|body|div|p|h[1-6]|svg|style|button|ul|ol|table|span|main|section)\b/i;

function markup(text) {
  const fenced = /```(?:html)?\n([\s\S]*?)(?:```|$)/i.exec(text);
  const content = fenced ? fenced[1] : text;
  return HTML.test(content) ? content : "";
}

export class Stage {
  // `handlers` has onSteer and onRefill of the player.
  constructor(mode, handlers = {}) {
    this.mode = mode;
    this.status = { sentence: "", isError: false };
    this.badge = element("b", { className: "recorded", hidden: true }, "Recorded");
    this.sentence = element("p", { className: "sentence" }, this.badge, SENTENCES[mode]);
    this.race = element("div", { className: "race", hidden: true });
    this.playerRoot = element("div", { className: "player", hidden: true });
    this.frame = element("iframe", { sandbox: "", title: "The completion as HTML" });
    this.preview = element("section", { className: "preview", hidden: true }, element("h2", {}, "Preview"), this.frame);
    this.player = new Player(this.playerRoot, { ...handlers, onMove: () => this.showPreview() });
    this.root = element("div", { className: "stage" }, this.sentence, this.race, this.playerRoot, this.preview);
    this.state = "empty";
    this.drawnAt = 0;
  }

  // empty, recorded, running, done or stopped: of what is shown. The style sheet and the tests read it.
  set state(state) {
    this.root.dataset.state = state;
    this.badge.hidden = state !== "recorded";
  }

  get state() {
    return this.root.dataset.state;
  }

  get run() {
    return this.playerRoot.hidden ? null : this.player.run;
  }

  show(run, state) {
    this.race.hidden = true;
    this.race.replaceChildren();
    this.playerRoot.hidden = false;
    this.state = state;
    this.player.show(run);
    this.showPreview();
  }

  // Plays a run from its first step, or shows its end to a user who wants no motion.
  play(run, state) {
    this.show(run, state);
    if (!run.frames.length || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    this.player.timeline.go(0);
    this.player.timeline.start();
  }

  update() {
    this.player.update();
    this.showPreview();
  }

  showRace(state) {
    this.player.timeline.stop();
    this.race.hidden = false;
    this.playerRoot.hidden = this.preview.hidden = true;
    this.state = state;
  }

  showPreview() {
    const { run, timeline } = this.player;
    if (!run || run.kind === "sudoku") return;
    const prefix = run.begin?.prefix && run.kind !== "edit" ? run.begin.prefix : "";
    const isLast = timeline.index >= run.frames.length;
    const html = markup(run.end && isLast && run.kind !== "write" ? run.end.text : prefix + run.textAt(timeline.index));
    this.preview.hidden = !html || this.playerRoot.hidden;
    if (this.preview.hidden || (performance.now() - this.drawnAt < 200 && !run.end)) return;
    this.drawnAt = performance.now();
    if (this.frame.srcdoc !== html) this.frame.srcdoc = html;
  }
}
