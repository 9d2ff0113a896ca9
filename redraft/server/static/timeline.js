// The steps of a run as a line: a slider, accepted tokens and entropy per step, where canvases begin and settle.

const STEPS_PER_SECOND = 8;

// Creates an HTML element.
export function element(name, properties = {}, ...children) {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) created.addEventListener(key.slice(2), value);
    else if (key in created && key !== "list") created[key] = value;
    else created.setAttribute(key, value);
  }
  created.append(...children);
  return created;
}

function svgElement(name, properties) {
  const created = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(properties)) created.setAttribute(key, value);
  return created;
}

// A small triangle at the top: the canvas settled here, before its last step.
const settledMark = (x) => `${x - 0.9},0 ${x + 0.9},0 ${x},7`;

export class Timeline {
  // `onMove` is called with the index of the frame to show; the index after the last frame is the end.
  constructor(onMove) {
    this.onMove = onMove;
    this.run = null;
    this.index = 0;
    this.isFollowing = true;
    this.timer = null;
    this.range = element("input", { type: "range", min: 0, max: 0, value: 0, className: "slider", oninput: () => this.go(+this.range.value) });
    this.range.setAttribute("aria-label", "Step");
    this.svg = svgElement("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "spark", role: "img" });
    this.svg.addEventListener("pointerdown", (event) => this.#clicked(event));
    this.play = element("button", { type: "button", className: "play", title: "Play or pause (space)", onclick: () => this.toggle() }, "▶");
    this.play.setAttribute("aria-label", "Play or pause");
    const speeds = [0.25, 0.5, 1, 2, 4].map((speed) => element("option", { value: speed, selected: speed === 1 }, `${speed}×`));
    this.speed = element("select", { onchange: () => this.timer && this.start() }, ...speeds);
    this.speed.setAttribute("aria-label", "Speed");
    this.label = element("output", { className: "position" });
    const step = (by, sign, title) => element("button", { type: "button", title, onclick: () => this.step(by) }, sign);
    this.key = element("p", { className: "key" });
    this.controls = element("div", { className: "controls" }, step(-1, "‹", "A step back (k)"), this.play, step(1, "›", "A step forward (j)"), this.speed, this.label);
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
    this.isFollowing = true;
    const labels = run.kind === "sudoku" ? { accepted: "accepted", entropy: "conflicts" } : { accepted: "accepted", entropy: "mean entropy", "max-entropy": "largest entropy of an accepted token", settled: "settled" };
    this.key.replaceChildren(...Object.entries(labels).map(([kind, words]) => element("span", {}, element("i", { className: `k-${kind}` }), words)));
    this.update();
  }

  // Shows the frames that the run has received meanwhile.
  update() {
    const last = this.#last();
    this.range.max = last;
    this.#draw();
    if (this.isFollowing) this.#move(last);
    else this.#updateLabel();
  }

  go(index) {
    this.isFollowing = index >= this.#last();
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
    this.isFollowing = false;
    this.play.textContent = "❚❚";
    this.timer = setInterval(() => {
      this.#move(this.index + 1);
      if (this.index >= this.#last()) this.stop();
    }, 1000 / (STEPS_PER_SECOND * +this.speed.value));
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
    this.#updateLabel();
    this.onMove(this.index);
  }

  #updateLabel() {
    const frame = this.run.frames[this.index];
    const cursor = this.svg.querySelector(".cursor");
    if (cursor) cursor.setAttribute("transform", `translate(${this.#x(this.index)} 0)`);
    const unit = this.run.kind === "sudoku" ? "attempt" : this.run.kind === "fill" && !this.run.canvases.length ? "gap" : "canvas";
    const isSweep = typeof frame?.verified === "number";
    const progress = isSweep ? `${frame.verified} of ${frame.cells.length} tokens verified` : `step ${frame?.step}` + (frame?.max_steps ? ` of ${frame.max_steps}` : "");
    this.label.textContent = frame ? `${unit} ${frame.block + 1}, ${progress}` : this.run.end ? "the end" : "";
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
    const topEntropy = Math.max(...frames.map((frame) => frame.entropy), 1e-6);
    const topMaxEntropy = Math.max(...frames.map((frame) => frame.maxEntropy ?? 0), 1e-6);
    const line = (height) => frames.map((frame, i) => `${this.#x(i)},${(38 - 36 * height(frame)).toFixed(2)}`).join(" ");
    const size = (frame) => frame.cells?.length ?? 81;
    const accepted = (frame) => frame.acceptedCount ?? frame.accepted;
    const parts = [];
    if (frames.length) {
      const upper = line((frame) => accepted(frame) / size(frame));
      parts.push(svgElement("polygon", { class: "accepted", points: `0,38 ${upper} ${this.#x(frames.length - 1)},38` }));
      parts.push(svgElement("polyline", { class: "entropy", points: line((frame) => frame.entropy / topEntropy) }));
      if (frames[0].cells) parts.push(svgElement("polyline", { class: "max-entropy", points: line((frame) => frame.maxEntropy / topMaxEntropy) }));
    }
    frames.forEach((frame, i) => {
      const isLast = frames[i + 1]?.block !== frame.block;
      if (isLast && frame.max_steps && frame.step < frame.max_steps && (i < frames.length - 1 || this.run.end)) parts.push(svgElement("polygon", { class: "settled", points: settledMark(this.#x(i)) }));
      if (i && frame.block !== frames[i - 1].block) parts.push(svgElement("line", { class: "fold", x1: this.#x(i - 0.5), x2: this.#x(i - 0.5), y1: 0, y2: 40 }));
    });
    parts.push(svgElement("line", { class: "cursor", x1: 0, x2: 0, y1: 0, y2: 40, transform: `translate(${this.#x(this.index)} 0)` }));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", `${frames.length} steps; accepted tokens and entropy at each`);
  }
}
