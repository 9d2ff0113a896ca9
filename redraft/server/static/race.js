// The same weights both ways: pages redrafted, and one token after another. Each is measured alone, then both are shown
// at the pace that was measured.

import { Run } from "./run.js";
import { element } from "./timeline.js";

async function measured(stream, seen) {
  const began = performance.now();
  const found = [];
  for await (const event of stream) {
    if (event.type === "error") throw new Error(event.error.message);
    found.push({ at: performance.now() - began, event });
    seen(found.length);
  }
  return found;
}

class Lane {
  // `said` takes events and has the text so far.
  constructor(title, said) {
    this.said = said;
    this.clock = element("b", { className: "clock" }, "0.00 s");
    this.text = element("p", { className: "lane-text" });
    this.facts = element("p", { className: "facts" });
    this.root = element("section", { className: "lane" }, element("h3", {}, title, this.clock), this.text, this.facts);
    this.told = [];
    this.at = 0; // how many of them were shown
  }

  // Shows what had come by then; whether that is all.
  tick(now) {
    const last = this.told.at(-1);
    this.clock.textContent = `${(Math.min(now, last.at) / 1000).toFixed(2)} s`;
    while (this.at < this.told.length && this.told[this.at].at <= now) this.said.add(this.told[this.at++].event);
    this.text.textContent = this.said.text;
    if (now < last.at) return false;
    const { timings } = last.event;
    this.facts.textContent = `${timings.predicted_n} tokens, ${timings.diffusion_forwards} passes, ${timings.diffusion_output_tok_s.toFixed(1)} tokens/s`;
    this.root.classList.add("arrived");
    return true;
  }
}

class Drafted extends Run {
  get text() {
    return this.textAt(this.frames.length - (this.end ? 0 : 1));
  }
}

class Spoken {
  text = "";

  add(event) {
    this.text += event.t ?? "";
  }
}

// `ask` gives the events of a path and a body; resolves when both have arrived.
export async function race(root, ask, body, signal) {
  const pages = new Lane("Redrafted, all at once", new Drafted("write", {}));
  const words = new Lane("Left to right", new Spoken());
  const said = element("p", { className: "hint" });
  root.replaceChildren(said, pages.root, words.root);
  said.textContent = "Measuring the pages …";
  pages.told = await measured(ask("/v1/canvas", { ...body, candidates: 1 }), (count) => (said.textContent = `Measuring the pages … ${count}`));
  const { prompt, max_tokens, seed, temperature } = body;
  words.told = await measured(ask("/v1/canvas/left-to-right", { prompt, max_tokens, seed, temperature }), (count) => (said.textContent = `Measuring left to right … ${count}`));
  said.textContent = "Both at the pace that was measured, each while nothing else ran:";
  const began = performance.now();
  await new Promise((done, failed) => {
    const tick = () => {
      if (signal.aborted) return failed(new DOMException("stopped", "AbortError"));
      const now = performance.now() - began;
      const both = [pages.tick(now), words.tick(now)];
      if (both.every(Boolean)) done();
      else requestAnimationFrame(tick);
    };
    tick();
  });
  const times = words.told.at(-1).at / pages.told.at(-1).at;
  said.textContent = times >= 1 ? `The pages were ${times.toFixed(1)} times as fast.` : `Left to right was ${(1 / times).toFixed(1)} times as fast.`;
}
