// The web page: tabs with a stage each, runs as their events arrive, runs of earlier, keyboard, theme, saving.

import { Chat } from "./chat.js";
import { Home } from "./home.js";
import { picture } from "./picture.js";
import { puzzles, race, recordedRace, texts } from "./race.js";
import { replay, save } from "./replay.js";
import { PATHS, PRESETS, fillForm, fillFromBody, newSeed, requestOf, titleOf } from "./requests.js";
import { Run } from "./run.js";
import { Stage } from "./stage.js";
import { forgetRuns, keepRun, keptRuns, linkOf, readLink } from "./store.js";
import { element } from "./timeline.js";
import { events, listModels, recordedRuns } from "./wire.js";

const MODES = Object.keys(PATHS);
const $ = (selector) => document.querySelector(selector);
const $$ = (selector) => document.querySelectorAll(selector);

let mode = "home"; // or a tab
let running = null; // the tab whose run or race is under way
let abort = null;
let models = []; // of the server
const home = new Home();
const handlers = { onSteer: steer, onRefill: refill };
const chat = new Chat({ send: sendMessages, onNote: (sentence) => showStatus("chat", sentence), onError: (sentence) => showStatus("chat", sentence, true), onSteer: steer, onCanvas: showSaves });
const stages = Object.fromEntries(MODES.map((name) => [name, name === "chat" ? chat.stage : new Stage(name, handlers)]));
const playerShown = () => (mode === "home" ? home.player : stages[mode].player);
const formOf = (name) => $(`#form-${name}`);
const requestFrom = (name, more) => requestOf(name, formOf(name), { model: $("#models").value || undefined, ...more });

// Runs

function showStatus(name, sentence, isError = false) {
  if (stages[name]) stages[name].status = { sentence, isError };
  if (name !== mode) return;
  const status = $("#status");
  status.textContent = sentence;
  status.classList.toggle("bad", isError);
}

function setRunning(name) {
  running = name;
  for (const button of $$("form [type=submit], #start-race, #race-boards")) button.disabled = Boolean(name);
  $("#stop").hidden = !name;
  for (const [mode, stage] of Object.entries(stages)) stage.root.setAttribute("aria-busy", String(mode === name));
}

// Runs one thing at a time: stops the run before it, and shows errors. Whatever a stage shows stays until the server has accepted a request.
async function runExclusively(name, work) {
  abort?.abort();
  const own = (abort = new AbortController());
  setRunning(name);
  showStatus(name, "");
  try {
    await work((path, body) => events(path, body, own.signal, askKey), own.signal);
  } catch (error) {
    showStatus(name, error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
    if (stages[name].state === "running") stages[name].state = "stopped";
  } finally {
    if (abort === own) setRunning(null);
    showSaves();
    if (!models.length) showModels(); // the server wanted its API key first
  }
}

// Sends a request and shows its run, with a note about it.
async function follow(run, body, note = "") {
  const name = run.kind;
  const stage = stages[name];
  const hadFrames = run.frames.length;
  const { conversation } = chat; // another one may be shown when the answer comes
  let isShown = false;
  let isDrawScheduled = false;
  const draw = () => {
    isDrawScheduled = false;
    if (stage.player.run === run) stage.update();
  };
  const begin = () => {
    isShown = true;
    showStatus(name, note);
    if (name === "chat") chat.begin(run);
    else stage.show(run, "running");
    showSaves();
    bringIntoView(stage);
  };
  await runExclusively(name, async (request) => {
    showStatus(name, "sending …");
    for await (const event of request(run.request.path, body)) {
      if (event.type === "error" && run.frames.length === hadFrames && !isShown) throw new Error(event.error.message);
      run.add(event);
      if (!isShown) begin();
      if (!isDrawScheduled) requestAnimationFrame(draw);
      isDrawScheduled = true;
    }
    showStatus(name, run.error ?? note, Boolean(run.error));
    stage.state = "done";
  });
  draw();
  if (name === "chat") chat.finish(run, conversation);
  else if (run.end) keepRun(run, titleOf(run.request.body)).then(showHistory);
  showSaves();
}

// On a phone the stage is below the form.
function bringIntoView(stage) {
  if (mode !== stage.mode || matchMedia("(min-width: 62rem)").matches) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  (stage.race.hidden ? stage.playerRoot : stage.race).scrollIntoView({ block: "start", behavior: calm ? "auto" : "smooth" });
}

function start(name) {
  $("#linked").hidden = true;
  if (name === "chat") return chat.submit();
  const request = requestFrom(name);
  return follow(new Run(name, request), request.body);
}

function sendMessages(needsSeed) {
  const request = requestFrom("chat", { messages: chat.messages, ...(needsSeed ? { seed: newSeed() } : {}) });
  chat.render();
  return follow(new Run("chat", request), request.body);
}

// Resumes the run after a step with pins and bans. A run that was checked goes on without a check: it comes from the left,
// and cannot keep tokens that stand further to the right.
function steer({ block, step, pins, bans }) {
  const { run } = stages[mode].player;
  const { request, canvases, isVerified } = run;
  const earlier = (request.body.interventions ?? []).filter((one) => one.block < block || (one.block === block && one.step < step));
  const interventions = [...earlier, { block, step, pins, bans }];
  const check = isVerified ? "off" : request.body.check;
  const body = { ...request.body, check, seed: run.begin.seed, interventions, canvases: canvases.slice(0, block).map((canvas) => canvas.ids) };
  const note = isVerified ? `Steering turned the check off: canvas ${block + 1} and what follows it are not verified.` : "";
  follow(run.upTo(block, step, { path: request.path, body }), { ...body, resume_at: { block, step } }, note);
}

// Fills the gaps again with the lengths that were found, on one canvas, which can be steered.
function refill(text) {
  const { request } = stages.fill.player.run;
  const body = { ...request.body, text };
  follow(new Run("fill", { ...request, body }), body);
}

function startRace(name, lanes) {
  const stage = stages[name];
  const begin = () => {
    stage.showRace("running");
    showStatus(name, "");
    bringIntoView(stage);
    showSaves();
  };
  return runExclusively(name, async (request, signal) => {
    showStatus(name, "sending …");
    await race(stage.race, request, lanes, signal, begin);
    stage.state = "done";
  });
}

function raceTexts() {
  const { body } = requestFrom("write");
  return startRace("write", texts({ ...body, max_tokens: body.max_tokens ?? 128, regex: undefined }));
}

// Recorded runs and runs of earlier

async function playRecorded(name) {
  const stage = stages[name];
  if (stage.state !== "empty" || name === "chat") return;
  stage.state = "recorded";
  const recorded = await recordedRuns(name);
  if (stage.state !== "recorded" || !recorded.length) return; // the user was faster
  if (name !== "sudoku") return stage.play(Run.from(recorded[0]), "recorded");
  stage.showRace("recorded");
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  await recordedRace(stage.race, recorded, { get aborted() { return stage.state !== "recorded"; } }, isStill ? 1e9 : 1).catch(() => {}); // a run took the stage
}

async function showHistory() {
  const kept = (await keptRuns()).filter(({ kind }) => kind === mode);
  $("#history").hidden = !kept.length;
  $("#history ol").replaceChildren(
    ...kept.map((saved) => {
      const when = new Date(saved.id).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
      return element("li", {}, element("button", { type: "button", onclick: () => stages[saved.kind].play(Run.from(saved), "done") }, saved.title, element("small", {}, `${when} · seed ${saved.events[0].seed}`)));
    }),
  );
}

// Opens the run of a link. One that this browser has kept is played; a request is sent only when the user asks for it, since any page can
// hold a link.
async function openLink(name, body) {
  const key = (value) => JSON.stringify(Object.entries(value).filter(([, part]) => part !== undefined).sort());
  const kept = (await keptRuns()).find((saved) => saved.kind === name && key({ ...saved.request.body, seed: saved.events[0].seed }) === key(body));
  fillFromBody(formOf(name), body);
  if (kept) return stages[name].play(Run.from(kept), "done");
  $("#linked").hidden = false;
  $("#linked button").onclick = () => {
    $("#linked").hidden = true;
    follow(new Run(name, { path: PATHS[name], body }), body);
  };
}

// Saving

function showSaves() {
  const run = mode === "home" ? null : stages[mode].run;
  const isRecorded = mode !== "home" && stages[mode].state === "recorded";
  $(".saves").hidden = !run?.begin || isRecorded || (run.kind === "chat" && !chat.showsCanvas);
  $("#save-picture").hidden = run?.kind === "decide";
  $("#copy-link").hidden = run?.kind === "chat"; // conversations stay in this browser
}

async function saveReplay() {
  const { run } = playerShown();
  save(await replay(run, titleOf(run.request.body)), "redraft-replay.html", "text/html");
}

function saveTrace() {
  const { run } = playerShown();
  const lines = [{ type: "request", ...run.request }, ...run.events].map((event) => JSON.stringify(event));
  save(lines.join("\n") + "\n", "redraft-trace.jsonl", "application/x-ndjson");
}

async function savePicture() {
  const image = await picture(playerShown().canvas);
  if (image) save(image, "redraft-canvas.png", "image/png");
  else showStatus(mode, "this canvas is too large for a picture", true);
}

async function copyLink() {
  const { run } = playerShown();
  history.replaceState(null, "", linkOf(run));
  await navigator.clipboard?.writeText(location.href).catch(() => {}); // only https and this machine have a clipboard
  showStatus(mode, "The address of this page now holds the run: its request and its seed.");
}

// Key, tabs, theme

function askKey() {
  const dialog = $("#key");
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? $("#key input").value : ""), { once: true }));
}

function choose(name) {
  mode = name;
  document.body.dataset.mode = name;
  for (const tab of $$("[role=tab]")) {
    const isChosen = tab.dataset.mode === name;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen || (name === "home" && tab === $("[role=tab]")) ? 0 : -1;
    $(`#panel-${tab.dataset.mode}`).hidden = !isChosen;
    if (isChosen) tab.scrollIntoView({ block: "nearest", inline: "center" });
  }
  $("#panel-home").hidden = name !== "home";
  $("#chat").hidden = name !== "chat";
  $("#linked").hidden = true;
  $("#answer").replaceChildren(...(name === "chat" ? [stages.chat.root] : []));
  $("#stage").replaceChildren(...(name === "chat" ? [] : [name === "home" ? home.root : stages[name].root]));
  const { sentence, isError } = stages[name]?.status ?? { sentence: "", isError: false };
  showStatus(name, sentence, isError);
  showSaves();
  showHistory();
  if (name === "home") return home.play();
  home.stop();
  playRecorded(name);
}

function goTo(name) {
  if (name === mode) return;
  history.pushState(null, "", `#${name}`);
  choose(name);
}

// Shows what the address names: a tab, with or without a run; else the greeting.
function openAddress() {
  const [name, body] = readLink(location.hash);
  const chosen = MODES.includes(name) ? name : "home";
  if (chosen !== mode || chosen === "home") choose(chosen);
  if (body && chosen !== "home" && chosen !== "chat") openLink(chosen, body);
  scrollTo(0, 0);
}

function setTheme(next) {
  document.documentElement.dataset.theme = next;
  localStorage.setItem("redraft-theme", next);
}

function toggleTheme() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
}

// The mode of checks is the same in all forms, and the browser keeps it.
function setCheck(check) {
  for (const select of $$("[name=check]")) select.value = check;
  localStorage.setItem("redraft-check", check);
}

// Settings are open in all forms or in none, and the browser keeps that.
function setSettings(isOpen) {
  for (const settings of $$(".settings")) settings.open = isOpen;
  localStorage.setItem("redraft-settings", isOpen ? "open" : "");
}

function insertGap() {
  const box = formOf("fill").elements.text;
  box.setRangeText("[[ ]]", box.selectionStart, box.selectionEnd, "end");
  box.focus();
}

const KEYS = {
  " ": () => playerShown().timeline.toggle(),
  j: () => playerShown().timeline.step(1),
  k: () => playerShown().timeline.step(-1),
  o: () => playerShown().toggleOrder(),
  g: () => playerShown().resume(),
  t: toggleTheme,
  s: saveReplay,
  "?": () => $("#help").showModal(),
};
const ALWAYS = ["t", "?"]; // the others need a run

function onKey(event) {
  const dialog = document.querySelector("dialog[open]");
  if (event.key === "Escape" && !dialog) running ? abort.abort() : playerShown().closeDetails();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && mode !== "home") return void (event.preventDefault(), formOf(mode).requestSubmit());
  if (event.altKey && /^Digit[1-6]$/.test(event.code)) return void (event.preventDefault(), goTo(MODES[event.code.at(-1) - 1]));
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target.matches("button, a, summary")) return;
  if (!KEYS[event.key] || dialog || !(playerShown().run || ALWAYS.includes(event.key))) return;
  event.preventDefault();
  KEYS[event.key]();
}

function listenToTabs() {
  for (const tab of $$("[role=tab]")) tab.addEventListener("click", () => goTo(tab.dataset.mode));
  $("[role=tablist]").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    goTo(MODES[(Math.max(0, MODES.indexOf(mode)) + by + MODES.length) % MODES.length]);
    $("[aria-selected=true]").focus();
  });
  addEventListener("hashchange", openAddress);
}

function listen() {
  document.addEventListener("keydown", onKey);
  listenToTabs();
  for (const name of MODES) {
    const form = formOf(name);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      start(name);
    });
    form.querySelector(".presets").append(...PRESETS[name].map(([label, fields]) => element("button", { type: "button", className: "preset", onclick: () => fillForm(form, fields) }, label)));
    fillForm(form, PRESETS[name][0][1]);
  }
  $("#stop").addEventListener("click", () => abort?.abort());
  $("#start-race").addEventListener("click", raceTexts);
  $("#race-boards").addEventListener("click", () => startRace("sudoku", puzzles(requestFrom("sudoku").body)));
  $("#insert-gap").addEventListener("click", insertGap);
  $("#theme").addEventListener("click", toggleTheme);
  $("#models").addEventListener("change", describeChosen);
  for (const select of $$("[name=check]")) select.addEventListener("change", () => setCheck(select.value));
  for (const settings of $$(".settings")) settings.addEventListener("toggle", () => setSettings(settings.open));
  $("#show-help").addEventListener("click", () => $("#help").showModal());
  $("#save-replay").addEventListener("click", saveReplay);
  $("#save-trace").addEventListener("click", saveTrace);
  $("#save-picture").addEventListener("click", savePicture);
  $("#copy-link").addEventListener("click", copyLink);
  $("#forget-runs").addEventListener("click", () => forgetRuns().then(showHistory));
}

// The name of the model, or a choice if the server has several.
async function showModels() {
  models = await listModels();
  $("#model").textContent = models[0]?.id ?? "";
  $("#model").hidden = models.length > 1;
  $("#models").hidden = models.length < 2;
  if (models.length > 1) $("#models").replaceChildren(...models.map(({ id }) => element("option", {}, id)));
  describeChosen();
}

function describeChosen() {
  const chosen = models.find(({ id }) => id === $("#models").value) ?? models[0] ?? {};
  const { id: name, can_chat: chats } = chosen;
  chat.describe(chosen);
  $("#cannot-chat").hidden = chats !== false;
  $("#cannot-chat").replaceChildren(`${name || "This model"} was not made to chat: it continues your words as a text, and does not answer them. `, element("a", { href: "#write" }, "Write"), " suits it better; ", element("code", {}, "redraft serve -m FOLDER"), " serves a model that chats.");
}

listen();
if (localStorage.getItem("redraft-theme")) setTheme(localStorage.getItem("redraft-theme"));
setCheck(localStorage.getItem("redraft-check") ?? "");
setSettings(localStorage.getItem("redraft-settings") === "open");
mode = "";
openAddress();
showModels();
