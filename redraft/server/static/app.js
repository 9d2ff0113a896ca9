// The page: what is asked for in each mode, runs as they come, keys, theme, saving.

import { Player } from "./player.js";
import { Run } from "./run.js";
import { picture } from "./picture.js";
import { puzzles, race, texts } from "./race.js";
import { replay, save } from "./replay.js";
import { element } from "./timeline.js";
import { events, modelName } from "./wire.js";

const PUZZLES = [
  "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79",
  "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4..",
  "1....7.9..3..2...8..96..5....53..9...1..8...26....4...3......1..4......7..7...3..",
];
const $ = (selector) => document.querySelector(selector);
const field = (form, name) => form.elements.namedItem(name).value; // a field may be called length
const number = (form, name) => (field(form, name) === "" ? undefined : Number(field(form, name)));

let abort = null;
let mode = "write";
const talk = []; // the conversation
const player = new Player($("#player"), { steer, again, moved: () => preview() });

// What is asked for

const seedOf = (form) => number(form, "seed") ?? Math.floor(Math.random() * 2 ** 32);

function common(form) {
  return { seed: seedOf(form), temperature: number(form, "temperature"), max_steps: number(form, "max_steps") };
}

function holes(text, length) {
  return length ? text.replace(/\[\[[ \t]*\]\]/g, `[[ ${length} ]]`) : text;
}

const ASKED = {
  write: (form) => ({ path: "/v1/canvas", body: { ...common(form), prompt: field(form, "prompt"), max_tokens: number(form, "max_tokens"), regex: field(form, "regex") || undefined } }),
  chat: (form) => ({ path: "/v1/canvas", body: { ...common(form), messages: [...talk, { role: "user", content: field(form, "message") }], max_tokens: number(form, "max_tokens") } }),
  fill: (form) => ({ path: "/v1/canvas", body: { ...common(form), text: holes(field(form, "text"), number(form, "length")) } }),
  edit: (form) => ({ path: "/v1/canvas/edit", body: { ...common(form), text: field(form, "text"), strength: number(form, "strength"), instruction: field(form, "instruction") || undefined } }),
  sudoku: (form) => ({ path: "/v1/canvas/sudoku", body: { puzzle: field(form, "puzzle"), seed: seedOf(form) } }),
  decide: (form) => ({ path: "/v1/canvas/decide", body: { messages: [{ role: "user", content: field(form, "question") }], choices: field(form, "choices").split("\n").filter((line) => line.trim()) } }),
};

// Runs

function busy(is) {
  for (const button of document.querySelectorAll("form [type=submit]")) button.disabled = is;
  $("#stop").hidden = !is;
}

function say(sentence, bad = false) {
  const status = $("#status");
  status.textContent = sentence;
  status.classList.toggle("bad", bad);
}

// One thing at a time: what runs is let go, and a mistake is told.
async function alone(work) {
  abort?.abort();
  const own = (abort = new AbortController());
  busy(true);
  say("");
  try {
    await work((path, body) => events(path, body, own.signal, askKey), own.signal);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
    else if (abort === own) say("stopped");
  } finally {
    if (abort === own) busy(false);
  }
}

async function follow(run, body) {
  $("#race").hidden = true;
  $("#player").hidden = false;
  player.show(run);
  let waiting = false;
  const drawn = () => {
    waiting = false;
    player.grow();
    preview();
  };
  await alone(async (ask) => {
    for await (const event of ask(run.asked.path, body)) {
      run.add(event);
      if (!waiting) requestAnimationFrame(drawn);
      waiting = true;
    }
    if (run.error) say(run.error, true);
  });
  drawn();
  for (const button of document.querySelectorAll(".saves button:not(#stop)")) button.disabled = !run.frames.length;
  if (run.kind === "chat" && run.end) talked(run);
}

async function start(form) {
  const asked = ASKED[mode](form);
  const run = new Run(mode, asked);
  const box = mode === "chat" ? form.elements.message : null;
  if (box) box.value = "";
  await follow(run, asked.body);
  if (box && !box.value && !run.end) box.value = asked.body.messages.at(-1).content; // it was not answered
}

function steer({ block, step, pins, bans }) {
  const { asked, pages } = player.run;
  const earlier = (asked.body.turns ?? []).filter((turn) => turn.block < block || (turn.block === block && turn.step < step));
  const seed = player.run.begin.seed;
  const body = { ...asked.body, seed, turns: [...earlier, { block, step, pins, bans }], pages: pages.slice(0, block).map((page) => page.ids) };
  follow(player.run.upTo(block, step, { path: asked.path, body }), { ...body, since: { block, step } });
}

// Holes whose lengths were found, filled together on one page, which can be steered.
function again(text) {
  const { asked } = player.run;
  const body = { ...asked.body, text };
  follow(new Run("fill", { ...asked, body }), body);
}

function talked(run) {
  talk.splice(0, talk.length, ...run.asked.body.messages, { role: "assistant", content: run.end.text });
  $("#talk").replaceChildren(...talk.map(({ role, content }) => element("li", { className: role }, element("b", {}, role === "user" ? "you" : "model"), element("p", {}, content))));
}

// Answers that are pages themselves

const HTML = /<(!doctype|html|body|div|p|h[1-6]|svg|style|button|ul|ol|table|span|main|section)\b/i;

function markup(text) {
  const fenced = /```(?:html)?\n([\s\S]*?)(?:```|$)/i.exec(text);
  const found = fenced ? fenced[1] : text;
  return HTML.test(found) ? found : "";
}

let drawnAt = 0;
function preview() {
  const { run } = player;
  const before = run?.begin?.before && run.kind !== "edit" ? run.begin.before : "";
  const last = player.timeline.index >= (run?.frames.length ?? 0);
  const text = run ? (run.end && last && run.kind !== "write" ? run.end.text : before + run.textAt(player.timeline.index)) : "";
  const found = run?.kind === "sudoku" ? "" : markup(text);
  $("#preview").hidden = !found || $("#player").hidden;
  if ($("#preview").hidden || (performance.now() - drawnAt < 200 && !run.end)) return;
  drawnAt = performance.now();
  const frame = $("#preview iframe");
  if (frame.srcdoc !== found) frame.srcdoc = found;
}

// Saving

function title() {
  const { body } = player.run.asked;
  return String(body.prompt ?? body.text ?? body.puzzle ?? body.messages?.at(-1)?.content ?? "a run").slice(0, 80);
}

async function saveReplay() {
  save(await replay(player.run, title()), "redraft-replay.html", "text/html");
}

function saveTrace() {
  const lines = [{ type: "asked", ...player.run.asked }, ...player.run.events].map((event) => JSON.stringify(event));
  save(lines.join("\n") + "\n", "redraft-trace.jsonl", "application/x-ndjson");
}

// Around it

function askKey() {
  const dialog = $("#key");
  dialog.showModal();
  return new Promise((told) => dialog.addEventListener("close", () => told(dialog.returnValue === "ok" ? $("#key input").value : ""), { once: true }));
}

function choose(name) {
  mode = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const own = tab.dataset.mode === name;
    tab.setAttribute("aria-selected", String(own));
    tab.tabIndex = own ? 0 : -1;
    $(`#form-${tab.dataset.mode}`).hidden = !own;
  }
  history.replaceState(null, "", `#${name}`);
}

function theme(next) {
  document.documentElement.dataset.theme = next;
  localStorage.setItem("redraft-theme", next);
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
}

async function savePicture() {
  const drawn = await picture(player.page);
  if (drawn) save(drawn, "redraft-page.png", "image/png");
  else say("this page is too large for a picture", true);
}

function startRace(lanes) {
  $("#race").hidden = false;
  $("#player").hidden = $("#preview").hidden = $("#save-picture").disabled = true;
  return alone((ask, signal) => race($("#race"), ask, lanes, signal));
}

function raceTexts() {
  const { body } = ASKED.write($("#form-write"));
  return startRace(texts({ ...body, max_tokens: body.max_tokens ?? 128, regex: undefined }));
}

function wrapHole() {
  const box = $("#form-fill").elements.text;
  const { selectionStart: from, selectionEnd: to } = box;
  box.setRangeText("[[ ]]", from, to, "end");
  box.focus();
}

const KEYS = {
  " ": () => player.timeline.toggle(),
  j: () => player.timeline.step(1),
  k: () => player.timeline.step(-1),
  o: () => player.toggleOrder(),
  g: () => player.goOn(),
  t: turnTheme,
  s: saveReplay,
  "?": () => $("#help").showModal(),
};
const ALWAYS = ["t", "?"]; // the others need a run

function keyed(event) {
  const dialog = document.querySelector("dialog[open]");
  if (event.key === "Escape" && !dialog) abort?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) return void (event.preventDefault(), $(`#form-${mode}`).requestSubmit());
  if (event.altKey && /^Digit[1-6]$/.test(event.code)) return void (event.preventDefault(), choose(Object.keys(ASKED)[event.code.at(-1) - 1]));
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target.matches("button")) return;
  if (!KEYS[event.key] || dialog || !(player.run || ALWAYS.includes(event.key))) return;
  event.preventDefault();
  KEYS[event.key]();
}

function listen() {
  document.addEventListener("keydown", keyed);
  for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => choose(tab.dataset.mode));
  $("[role=tablist]").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const names = Object.keys(ASKED);
    choose(names[(names.indexOf(mode) + by + names.length) % names.length]);
    $("[aria-selected=true]").focus();
  });
  for (const form of document.querySelectorAll("form[id]"))
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      start(form);
    });
  $("#stop").addEventListener("click", () => abort?.abort());
  $("#start-race").addEventListener("click", raceTexts);
  $("#race-boards").addEventListener("click", () => startRace(puzzles(ASKED.sudoku($("#form-sudoku")).body)));
  $("#hole").addEventListener("click", wrapHole);
  $("#theme").addEventListener("click", turnTheme);
  $("#show-help").addEventListener("click", () => $("#help").showModal());
  $("#save-replay").addEventListener("click", saveReplay);
  $("#save-trace").addEventListener("click", saveTrace);
  $("#save-picture").addEventListener("click", savePicture);
  $("#forget").addEventListener("click", () => {
    talk.length = 0;
    $("#talk").replaceChildren();
  });
  $("#puzzles").append(...PUZZLES.map((puzzle, i) => element("button", { type: "button", onclick: () => ($("#form-sudoku").elements.puzzle.value = puzzle) }, `Puzzle ${i + 1}`)));
  $("#form-sudoku").elements.puzzle.value = PUZZLES[0];
}

listen();
if (localStorage.getItem("redraft-theme")) theme(localStorage.getItem("redraft-theme"));
choose(ASKED[location.hash.slice(1)] ? location.hash.slice(1) : "write");
modelName().then((name) => ($("#model").textContent = name));
