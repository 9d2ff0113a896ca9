// The steps of a run as a line: a scrubber, what was accepted and how much was doubted, where pages begin and settle.

const SPEED = 8; // steps a second

export function element(name, properties = {}, ...children) {
  const found = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else if (key in found && key !== "list") found[key] = value;
    else found.setAttribute(key, value);
  }
  found.append(...children);
  return found;
}

function drawn(name, properties) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(properties)) found.setAttribute(key, value);
  return found;
}

// A small triangle at the top: the page stood still here, before its last step.
const settledMark = (x) => `${x - 0.9},0 ${x + 0.9},0 ${x},7`;

export class Timeline {
  // `moved` is called with the index of the frame to show; behind the last is the end.
  constructor(moved) {
    this.moved = moved;
    this.run = null;
    this.index = 0;
    this.following = true;
    this.timer = null;
    this.range = element("input", { type: "range", min: 0, max: 0, value: 0, className: "scrub", oninput: () => this.go(+this.range.value) });
    this.range.setAttribute("aria-label", "Step");
    this.svg = drawn("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "spark", role: "img" });
    this.svg.addEventListener("pointerdown", (event) => this.#clicked(event));
    this.play = element("button", { type: "button", className: "play", title: "Play or pause (space)", onclick: () => this.toggle() }, "▶");
    this.play.setAttribute("aria-label", "Play or pause");
    const speeds = [0.25, 0.5, 1, 2, 4].map((speed) => element("option", { value: speed, selected: speed === 1 }, `${speed}×`));
    this.speed = element("select", { onchange: () => this.timer && this.start() }, ...speeds);
    this.speed.setAttribute("aria-label", "Speed");
    this.label = element("output", { className: "where" });
    const step = (by, sign, title) => element("button", { type: "button", title, onclick: () => this.step(by) }, sign);
    this.key = element("p", { className: "key" });
    this.controls = element("div", { className: "controls" }, step(-1, "‹", "A step back (k)"), this.play, step(1, "›", "A step on (j)"), this.speed, this.label);
    this.root = element(
      "div",
      { className: "timeline" },
      this.svg,
      this.range,
      this.controls,
      this.key,
    );
  }

  show(run) {
    this.run = run;
    this.stop();
    this.following = true;
    const said = run.kind === "sudoku" ? { accepted: "accepted", entropy: "contradictions" } : { accepted: "accepted", entropy: "mean doubt", gate: "doubt of the least sure", settled: "stood still" };
    this.key.replaceChildren(...Object.entries(said).flatMap(([kind, words]) => [element("i", { className: `k-${kind}` }), words]));
    this.grow();
  }

  // The run has more frames than before.
  grow() {
    const last = this.#last();
    this.range.max = last;
    this.#draw();
    if (this.following) this.#move(last);
    else this.#told();
  }

  go(index) {
    this.following = index >= this.#last();
    this.#move(index);
  }

  step(by) {
    this.stop();
    this.go(this.index + by);
  }

  toggle() {
    if (this.timer) this.stop();
    else this.start();
  }

  start() {
    this.stop();
    if (!this.run?.frames.length) return;
    if (this.index >= this.#last()) this.#move(0);
    this.following = false;
    this.play.textContent = "❚❚";
    this.timer = setInterval(() => {
      this.#move(this.index + 1);
      if (this.index >= this.#last()) this.stop();
    }, 1000 / (SPEED * +this.speed.value));
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "▶";
  }

  #last() {
    return Math.max(0, this.run.frames.length - (this.run.end ? 0 : 1));
  }

  #move(index) {
    this.index = Math.max(0, Math.min(index, this.#last()));
    this.range.value = this.index;
    this.#told();
    this.moved(this.index);
  }

  #told() {
    const frame = this.run.frames[this.index];
    const cursor = this.svg.querySelector(".cursor");
    if (cursor) cursor.setAttribute("transform", `translate(${this.#x(this.index)} 0)`);
    const what = this.run.kind === "sudoku" ? "try" : this.run.kind === "fill" && !this.run.pages.length ? "hole" : "page";
    this.label.textContent = frame ? `${what} ${frame.block + 1}, step ${frame.step}` + (frame.total ? ` of ${frame.total}` : "") : this.run.end ? "the end" : "";
  }

  #x(index) {
    return (100 * index) / Math.max(1, this.#last());
  }

  #clicked(event) {
    const box = this.svg.getBoundingClientRect();
    this.stop();
    this.go(Math.round(((event.clientX - box.left) / box.width) * this.#last()));
  }

  #draw() {
    const frames = this.run.frames;
    const most = Math.max(...frames.map((frame) => frame.entropy), 1e-6);
    const gate = Math.max(...frames.map((frame) => frame.gate ?? 0), 1e-6);
    const line = (height) => frames.map((frame, i) => `${this.#x(i)},${(38 - 36 * height(frame)).toFixed(2)}`).join(" ");
    const cells = (frame) => frame.cells?.length ?? 81;
    const kept = (frame) => frame.accepted_count ?? frame.accepted;
    const parts = [];
    if (frames.length) {
      const upper = line((frame) => kept(frame) / cells(frame));
      parts.push(drawn("polygon", { class: "accepted", points: `0,38 ${upper} ${this.#x(frames.length - 1)},38` }));
      parts.push(drawn("polyline", { class: "entropy", points: line((frame) => frame.entropy / most) }));
      if (frames[0].cells) parts.push(drawn("polyline", { class: "gate", points: line((frame) => frame.gate / gate) }));
    }
    frames.forEach((frame, i) => {
      const last = frames[i + 1]?.block !== frame.block;
      if (last && frame.total && frame.step < frame.total && (i < frames.length - 1 || this.run.end)) parts.push(drawn("polygon", { class: "settled", points: settledMark(this.#x(i)) }));
      if (i && frame.block !== frames[i - 1].block) parts.push(drawn("line", { class: "fold", x1: this.#x(i - 0.5), x2: this.#x(i - 0.5), y1: 0, y2: 40 }));
    });
    parts.push(drawn("line", { class: "cursor", x1: 0, x2: 0, y1: 0, y2: 40, transform: `translate(${this.#x(this.index)} 0)` }));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${frames.length} steps; accepted tokens and doubt at each`);
  }
}
