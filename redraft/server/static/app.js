// The web page: the request of each mode, runs as their events arrive, keyboard, theme, saving.

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
const conversation = []; // messages
const player = new Player($("#player"), { onSteer: steer, onRefill: refill, onMove: () => preview() });

// Requests

const seedOf = (form) => number(form, "seed") ?? Math.floor(Math.random() * 2 ** 32);

function commonFields(form) {
  return { seed: seedOf(form), temperature: number(form, "temperature"), max_steps: number(form, "max_steps") };
}

const checkOf = (form) => field(form, "check") || undefined;

function withGapLength(text, length) {
  return length ? text.replace(/\[\[[ \t]*\]\]/g, `[[ ${length} ]]`) : text;
}

const REQUESTS = {
  write: (form) => ({ path: "/v1/canvas", body: { ...commonFields(form), check: checkOf(form), prompt: field(form, "prompt"), max_tokens: number(form, "max_tokens"), regex: field(form, "regex") || undefined } }),
  chat: (form) => ({ path: "/v1/canvas", body: { ...commonFields(form), check: checkOf(form), messages: [...conversation, { role: "user", content: field(form, "message") }], max_tokens: number(form, "max_tokens") } }),
  fill: (form) => ({ path: "/v1/canvas", body: { ...commonFields(form), text: withGapLength(field(form, "text"), number(form, "length")) } }),
  edit: (form) => ({ path: "/v1/canvas/edit", body: { ...commonFields(form), text: field(form, "text"), strength: number(form, "strength"), instruction: field(form, "instruction") || undefined } }),
  sudoku: (form) => ({ path: "/v1/canvas/sudoku", body: { puzzle: field(form, "puzzle"), seed: seedOf(form) } }),
  decide: (form) => ({ path: "/v1/canvas/decide", body: { messages: [{ role: "user", content: field(form, "question") }], choices: field(form, "choices").split("\n").filter((line) => line.trim()) } }),
};

// Runs

function setBusy(isBusy) {
  for (const button of document.querySelectorAll("form [type=submit]")) button.disabled = isBusy;
  $("#stop").hidden = !isBusy;
}

function showStatus(sentence, isError = false) {
  const status = $("#status");
  status.textContent = sentence;
  status.classList.toggle("bad", isError);
}

// Runs one thing at a time: stops the run before it, and shows errors.
async function runExclusively(work) {
  abort?.abort();
  const own = (abort = new AbortController());
  setBusy(true);
  showStatus("");
  try {
    await work((path, body) => events(path, body, own.signal, askKey), own.signal);
  } catch (error) {
    if (error.name !== "AbortError") showStatus(error.message, true);
    else if (abort === own) showStatus("stopped");
  } finally {
    if (abort === own) setBusy(false);
  }
}

// Sends a request and shows its run, with a note about it.
async function follow(run, body, note = "") {
  $("#race").hidden = true;
  $("#player").hidden = false;
  player.show(run);
  let isDrawScheduled = false;
  const draw = () => {
    isDrawScheduled = false;
    player.update();
    preview();
  };
  await runExclusively(async (request) => {
    showStatus(note);
    for await (const event of request(run.request.path, body)) {
      run.add(event);
      if (!isDrawScheduled) requestAnimationFrame(draw);
      isDrawScheduled = true;
    }
    if (run.error) showStatus(run.error, true);
  });
  draw();
  for (const button of document.querySelectorAll(".saves button:not(#stop)")) button.disabled = !run.frames.length;
  if (run.kind === "chat" && run.end) addToConversation(run);
}

async function start(form) {
  const request = REQUESTS[mode](form);
  const run = new Run(mode, request);
  const box = mode === "chat" ? form.elements.message : null;
  if (box) box.value = "";
  await follow(run, request.body);
  if (box && !box.value && !run.end) box.value = request.body.messages.at(-1).content; // it was not answered
}

// Resumes the run after a step with pins and bans. A run that was checked goes on without a check: it comes from the left,
// and cannot keep tokens that stand further to the right.
function steer({ block, step, pins, bans }) {
  const { request, canvases } = player.run;
  const earlier = (request.body.interventions ?? []).filter((one) => one.block < block || (one.block === block && one.step < step));
  const seed = player.run.begin.seed;
  const interventions = [...earlier, { block, step, pins, bans }];
  const isVerified = player.run.isVerified;
  const check = isVerified ? "off" : request.body.check;
  const body = { ...request.body, check, seed, interventions, canvases: canvases.slice(0, block).map((canvas) => canvas.ids) };
  const note = isVerified ? `Steering turned the check off: canvas ${block + 1} and what follows it are not verified.` : "";
  follow(player.run.upTo(block, step, { path: request.path, body }), { ...body, resume_at: { block, step } }, note);
}

// Fills the gaps again with the lengths that were found, on one canvas, which can be steered.
function refill(text) {
  const { request } = player.run;
  const body = { ...request.body, text };
  follow(new Run("fill", { ...request, body }), body);
}

function addToConversation(run) {
  conversation.splice(0, conversation.length, ...run.request.body.messages, { role: "assistant", content: run.end.text });
  $("#conversation").replaceChildren(...conversation.map(({ role, content }) => element("li", { className: role }, element("b", {}, role === "user" ? "you" : "model"), element("p", {}, content))));
}

// Completions that are HTML

const HTML = /<(!doctype|html|body|div|p|h[1-6]|svg|style|button|ul|ol|table|span|main|section)\b/i;

function markup(text) {
  const fenced = /```(?:html)?\n([\s\S]*?)(?:```|$)/i.exec(text);
  const content = fenced ? fenced[1] : text;
  return HTML.test(content) ? content : "";
}

let drawnAt = 0;
function preview() {
  const { run } = player;
  const prefix = run?.begin?.prefix && run.kind !== "edit" ? run.begin.prefix : "";
  const isLast = player.timeline.index >= (run?.frames.length ?? 0);
  const text = run ? (run.end && isLast && run.kind !== "write" ? run.end.text : prefix + run.textAt(player.timeline.index)) : "";
  const html = run?.kind === "sudoku" ? "" : markup(text);
  $("#preview").hidden = !html || $("#player").hidden;
  if ($("#preview").hidden || (performance.now() - drawnAt < 200 && !run.end)) return;
  drawnAt = performance.now();
  const frame = $("#preview iframe");
  if (frame.srcdoc !== html) frame.srcdoc = html;
}

// Saving

function title() {
  const { body } = player.run.request;
  return String(body.prompt ?? body.text ?? body.puzzle ?? body.messages?.at(-1)?.content ?? "a run").slice(0, 80);
}

async function saveReplay() {
  save(await replay(player.run, title()), "redraft-replay.html", "text/html");
}

function saveTrace() {
  const lines = [{ type: "request", ...player.run.request }, ...player.run.events].map((event) => JSON.stringify(event));
  save(lines.join("\n") + "\n", "redraft-trace.jsonl", "application/x-ndjson");
}

// Key, tabs, theme

function askKey() {
  const dialog = $("#key");
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? $("#key input").value : ""), { once: true }));
}

function choose(name) {
  mode = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isChosen = tab.dataset.mode === name;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    $(`#form-${tab.dataset.mode}`).hidden = !isChosen;
  }
  history.replaceState(null, "", `#${name}`);
}

function setTheme(next) {
  document.documentElement.dataset.theme = next;
  localStorage.setItem("redraft-theme", next);
}

function toggleTheme() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
}

// The mode is the same in all forms, and the browser keeps it.
function setCheck(check) {
  for (const select of document.querySelectorAll("[name=check]")) select.value = check;
  localStorage.setItem("redraft-check", check);
}

async function savePicture() {
  const image = await picture(player.canvas);
  if (image) save(image, "redraft-canvas.png", "image/png");
  else showStatus("this canvas is too large for a picture", true);
}

function startRace(lanes) {
  $("#race").hidden = false;
  $("#player").hidden = $("#preview").hidden = $("#save-picture").disabled = true;
  return runExclusively((request, signal) => race($("#race"), request, lanes, signal));
}

function raceTexts() {
  const { body } = REQUESTS.write($("#form-write"));
  return startRace(texts({ ...body, max_tokens: body.max_tokens ?? 128, regex: undefined }));
}

function insertGap() {
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
  g: () => player.resume(),
  t: toggleTheme,
  s: saveReplay,
  "?": () => $("#help").showModal(),
};
const ALWAYS = ["t", "?"]; // the others need a run

function onKey(event) {
  const dialog = document.querySelector("dialog[open]");
  if (event.key === "Escape" && !dialog) abort?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) return void (event.preventDefault(), $(`#form-${mode}`).requestSubmit());
  if (event.altKey && /^Digit[1-6]$/.test(event.code)) return void (event.preventDefault(), choose(Object.keys(REQUESTS)[event.code.at(-1) - 1]));
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target.matches("button")) return;
  if (!KEYS[event.key] || dialog || !(player.run || ALWAYS.includes(event.key))) return;
  event.preventDefault();
  KEYS[event.key]();
}

function listen() {
  document.addEventListener("keydown", onKey);
  for (const tab of document.querySelectorAll("[role=tab]")) tab.addEventListener("click", () => choose(tab.dataset.mode));
  $("[role=tablist]").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const names = Object.keys(REQUESTS);
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
  $("#race-boards").addEventListener("click", () => startRace(puzzles(REQUESTS.sudoku($("#form-sudoku")).body)));
  $("#insert-gap").addEventListener("click", insertGap);
  $("#theme").addEventListener("click", toggleTheme);
  for (const select of document.querySelectorAll("[name=check]")) select.addEventListener("change", () => setCheck(select.value));
  $("#show-help").addEventListener("click", () => $("#help").showModal());
  $("#save-replay").addEventListener("click", saveReplay);
  $("#save-trace").addEventListener("click", saveTrace);
  $("#save-picture").addEventListener("click", savePicture);
  $("#forget").addEventListener("click", () => {
    conversation.length = 0;
    $("#conversation").replaceChildren();
  });
  $("#puzzles").append(...PUZZLES.map((puzzle, i) => element("button", { type: "button", onclick: () => ($("#form-sudoku").elements.puzzle.value = puzzle) }, `Puzzle ${i + 1}`)));
  $("#form-sudoku").elements.puzzle.value = PUZZLES[0];
}

listen();
if (localStorage.getItem("redraft-theme")) setTheme(localStorage.getItem("redraft-theme"));
setCheck(localStorage.getItem("redraft-check") ?? "");
choose(REQUESTS[location.hash.slice(1)] ? location.hash.slice(1) : "write");
modelName().then((name) => ($("#model").textContent = name));
