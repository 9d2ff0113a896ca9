// The greeting: recorded runs of the models that ship, played at once. A puzzle, by diffusion and cell after cell, then a story.

import { Player } from "./player.js";
import { recordedRace } from "./race.js";
import { Run } from "./run.js";
import { element } from "./timeline.js";
import { recordedRuns } from "./wire.js";

const PACE = 0.25; // three steps in a fifth of a second are too fast for the eye

const seconds = (run) => `${(run.times.at(-1) / 1000).toFixed(2)} s`;
const endOf = (run) => run.events.at(-1);
const prefersStillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Home {
  constructor() {
    this.race = element("div", { className: "race" });
    this.boards = element("p", { className: "sentence" });
    this.words = element("p", { className: "sentence", hidden: true });
    this.playerRoot = element("div", { className: "player", hidden: true });
    this.player = new Player(this.playerRoot);
    const again = element("button", { type: "button", id: "again", onclick: () => this.play() }, "Play again");
    const title = element("h2", {}, "Noise becomes an answer, all positions at once", again);
    this.root = element("div", { className: "stage home" }, title, element("div", { className: "act" }, this.race, this.boards), this.words, this.playerRoot);
    this.playing = null; // an AbortController
  }

  async play() {
    this.stop();
    const playing = (this.playing = new AbortController());
    this.root.dataset.state = "playing";
    const [puzzle, [story]] = await Promise.all([recordedRuns("sudoku"), recordedRuns("write")]);
    const [diffusion, autoregressive] = puzzle;
    const cells = diffusion.events[0].puzzle.filter((digit) => !digit).length;
    this.boards.textContent =
      `A Sudoku: diffusion fills all ${cells} empty cells at once and revises them. It needs ${endOf(diffusion).forwards} forwards and ${seconds(diffusion)}; ` +
      `cell after cell, the same weights need ${endOf(autoregressive).forwards} and ${seconds(autoregressive)}.`;
    this.words.textContent = `A story: ${endOf(story).timings.predicted_n} tokens in ${endOf(story).timings.diffusion_forwards} forwards. Grey is noise, green has just changed, plain text is final. Point at a token to see what else it could have been.`;
    try {
      await recordedRace(this.race, puzzle, playing.signal, prefersStillness() ? 1e9 : PACE);
    } catch (error) {
      if (error.name === "AbortError") return;
      throw error;
    }
    this.words.hidden = this.playerRoot.hidden = false;
    this.player.show(Run.from(story));
    this.root.dataset.state = "done";
    if (prefersStillness()) return;
    this.player.timeline.go(0);
    this.player.timeline.start();
  }

  stop() {
    this.playing?.abort();
    this.player.timeline.stop();
  }
}
