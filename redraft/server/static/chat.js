// The chat tab: conversations that this browser keeps, messages as Markdown, files, edit and retry. The canvas of an answer stands where the
// answer will be, and gives way to it.

import { markdown } from "./markdown.js";
import { Stage } from "./stage.js";
import { element } from "./timeline.js";

const KEY = "redraft-conversations";
const CONVERSATIONS_KEPT = 50;
const MAX_FILE_BYTES = 200_000;
const $ = (selector) => document.querySelector(selector);

const newConversation = () => ({ id: Date.now(), system: "", messages: [] });
const titleOf = (conversation) => conversation.messages[0].content.slice(0, 60);

// The conversations of earlier; none if what is stored is not a list of them.
function readKept() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return kept.filter(({ id, messages }) => id && messages.length);
  } catch {
    return [];
  }
}

// A file as a part of a message.
const quoted = ({ name, text }) => `\n\n${name}:\n\`\`\`\n${text.replace(/\n$/, "")}\n\`\`\``;

export class Chat {
  // `send` is called to answer the messages of the conversation, with whether a fresh seed is needed; `onError` with a sentence.
  constructor({ send, onError, onSteer }) {
    this.send = send;
    this.onError = onError;
    this.stage = new Stage("chat", { onSteer });
    this.form = $("#form-chat");
    this.kept = readKept();
    this.conversation = newConversation();
    this.pending = null; // the message that is being answered
    this.editing = null; // the index of the message that is edited
    this.files = [];
    this.showsCanvas = false;
    this.#listen();
    this.render();
  }

  // The messages of a request: the system prompt, the conversation, and the message in the form.
  get messages() {
    const { system, messages } = this.conversation;
    return [...(system ? [{ role: "system", content: system }] : []), ...messages, ...(this.pending ? [{ role: "user", content: this.pending }] : [])];
  }

  // Takes the message out of the form.
  submit() {
    const box = this.form.elements.message;
    this.asked = this.conversation;
    this.before = { messages: this.conversation.messages, text: box.value, files: this.files, editing: this.editing };
    if (this.editing !== null) this.conversation.messages = this.conversation.messages.slice(0, this.editing);
    this.pending = box.value + this.files.map(quoted).join("");
    this.conversation.system = this.form.elements.system.value.trim();
    box.value = "";
    this.files = [];
    this.editing = null;
    this.send(false);
  }

  retry() {
    const { messages } = this.conversation;
    this.asked = this.conversation;
    this.before = { messages, text: "", files: [], editing: null };
    this.pending = messages.at(-2).content;
    this.conversation.messages = messages.slice(0, -2);
    this.send(true);
  }

  begin(run) {
    this.showsCanvas = true;
    this.stage.show(run, "running");
    this.render();
  }

  // Adds the answer of a run to the conversation that asked, or puts the message back if there is none. The user may have opened another one.
  finish(run) {
    const conversation = this.asked ?? this.conversation;
    if (run.end) {
      const reasoning = run.canvases.map((canvas) => canvas?.reasoning ?? "").join("");
      const messages = run.request.body.messages.filter(({ role }) => role !== "system");
      conversation.messages = [...messages, { role: "assistant", content: run.end.text, ...(reasoning ? { reasoning } : {}) }];
      this.showsCanvas = false;
      this.#keep(conversation);
    } else if (this.before) {
      conversation.messages = this.before.messages;
      this.showsCanvas = false;
      const box = this.form.elements.message;
      if (!box.value && conversation === this.conversation) {
        box.value = this.before.text;
        this.files = this.before.files;
        this.editing = this.before.editing;
      }
    }
    this.pending = this.before = this.asked = null;
    this.render();
  }

  open(conversation) {
    this.conversation = conversation;
    this.editing = null;
    this.showsCanvas = false;
    this.stage.state = "empty";
    this.form.elements.system.value = conversation.system;
    this.render();
  }

  #keep(conversation) {
    this.kept = [conversation, ...this.kept.filter(({ id }) => id !== conversation.id)].slice(0, CONVERSATIONS_KEPT);
    try {
      localStorage.setItem(KEY, JSON.stringify(this.kept));
    } catch {
      this.onError("this browser has no room to keep the conversation: forget older ones");
    }
  }

  // Drawing

  render() {
    const { messages } = this.conversation;
    const items = messages.map((message, i) => this.#message(message, i));
    const isAnswered = this.pending && (this.asked ?? this.conversation) === this.conversation;
    if (isAnswered) items.push(element("li", { className: "user pending" }, element("div", { className: "text" }, ...markdown(this.pending))));
    $("#conversation").replaceChildren(...items);
    this.stage.playerRoot.hidden = this.stage.preview.hidden = !this.showsCanvas;
    $("#editing").hidden = this.editing === null;
    $("#editing span").textContent = `Sending replaces message ${(this.editing ?? 0) + 1} and everything after it.`;
    $("#form-chat .presets").hidden = messages.length > 0 || Boolean(this.pending);
    $("#files").hidden = !this.files.length;
    $("#files").replaceChildren(...this.files.map((file) => element("li", {}, file.name, element("button", { type: "button", ariaLabel: `Remove ${file.name}`, onclick: () => this.#removeFile(file) }, "×"))));
    this.#renderConversations();
  }

  #message({ role, content, reasoning }, i) {
    const isLast = i === this.conversation.messages.length - 1;
    const button = (label, onclick) => element("button", { type: "button", className: "quiet", onclick }, label);
    const hasRun = isLast && this.stage.player.run?.end?.text === content;
    const actions = [];
    if (role === "user") actions.push(button("Edit", () => this.#edit(i)));
    if (role === "assistant" && isLast && !this.pending) actions.push(button("Retry", () => this.retry()));
    if (role === "assistant") actions.push(button("Copy", () => this.#copy(content)));
    if (role === "assistant" && hasRun) actions.push(button(this.showsCanvas ? "Show the answer" : "Show the canvas", () => this.#toggleCanvas()));
    const thought = reasoning ? [element("details", {}, element("summary", {}, "Reasoning"), ...markdown(reasoning))] : [];
    const text = element("div", { className: "text", hidden: hasRun && this.showsCanvas }, ...thought, ...markdown(content));
    return element("li", { className: role }, text, element("div", { className: "row" }, ...actions));
  }

  #renderConversations() {
    $("#forget-conversations").hidden = !this.kept.length;
    $("#conversations").replaceChildren(
      ...this.kept.map((conversation) => {
        const open = element("button", { type: "button", onclick: () => this.open(conversation) }, titleOf(conversation));
        if (conversation.id === this.conversation.id) open.setAttribute("aria-current", "true");
        return element("li", {}, open);
      }),
    );
  }

  async #copy(text) {
    try {
      await navigator.clipboard.writeText(text); // only https and this machine have a clipboard
    } catch {
      this.onError("this browser does not let the page copy: select the text instead");
    }
  }

  #toggleCanvas() {
    this.showsCanvas = !this.showsCanvas;
    this.render();
  }

  #edit(i) {
    this.editing = i;
    this.form.elements.message.value = this.conversation.messages[i].content;
    this.render();
    this.form.elements.message.focus();
  }

  // Files

  async addFiles(files) {
    for (const file of files) {
      const text = file.size <= MAX_FILE_BYTES ? await file.text() : "";
      if (file.size > MAX_FILE_BYTES) this.onError(`${file.name} has ${file.size.toLocaleString("en")} bytes: attach files of at most ${MAX_FILE_BYTES.toLocaleString("en")}`);
      else if (/[\0\ufffd]/.test(text)) this.onError(`${file.name} is not a text: attach files in UTF-8`);
      else this.files.push({ name: file.name, text });
    }
    this.render();
  }

  #removeFile(file) {
    this.files = this.files.filter((other) => other !== file);
    this.render();
  }

  #listen() {
    const area = $("#chat");
    area.addEventListener("dragover", (event) => {
      event.preventDefault();
      area.classList.add("dropping");
    });
    area.addEventListener("dragleave", () => area.classList.remove("dropping"));
    area.addEventListener("drop", (event) => {
      event.preventDefault();
      area.classList.remove("dropping");
      this.addFiles(event.dataTransfer.files);
    });
    $("#attach").addEventListener("click", () => $("#file").click());
    $("#file").addEventListener("change", (event) => this.addFiles(event.target.files).then(() => (event.target.value = "")));
    $("#new-conversation").addEventListener("click", () => this.open(newConversation()));
    $("#forget-conversations").addEventListener("click", () => {
      this.kept = [];
      localStorage.removeItem(KEY);
      this.open(newConversation());
    });
    $("#editing button").addEventListener("click", () => {
      this.editing = null;
      this.form.elements.message.value = "";
      this.render();
    });
  }
}
