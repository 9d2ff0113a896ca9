// The chat tab: conversations that this browser keeps, messages as Markdown, files, images, edit and retry. The canvas of an answer stands where
// the answer will be, and gives way to it.

import { contentOf, hasLostImages, isImage, keptMessage, messageOf, readImage } from "./images.js";
import { markdown } from "./markdown.js";
import { Stage } from "./stage.js";
import { element } from "./timeline.js";

const KEY = "redraft-conversations";
const CONVERSATIONS_KEPT = 50;
const MAX_FILE_BYTES = 200_000;
const $ = (selector) => document.querySelector(selector);

const newConversation = () => ({ id: Date.now(), system: "", messages: [] });

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
  // `send` is called to answer the messages of the conversation, with whether a fresh seed is needed; `onNote` and `onError` with a sentence;
  // `onCanvas` when the canvas of an answer is shown or hidden.
  constructor({ send, onNote, onError, onSteer, onCanvas }) {
    this.send = send;
    this.onNote = onNote;
    this.onError = onError;
    this.onCanvas = onCanvas;
    this.stage = new Stage("chat", { onSteer });
    this.form = $("#form-chat");
    this.kept = readKept();
    this.conversation = newConversation();
    this.pending = null; // the message that is being answered
    this.asked = null; // the conversation that it belongs to
    this.editing = null; // the index of the message that is edited
    this.files = [];
    this.images = [];
    this.adding = Promise.resolve(); // until files that were dropped are read
    this.model = {}; // as the server describes it
    this.showsCanvas = false;
    this.#listen();
    this.render();
  }

  // The messages of a request: the system prompt, the conversation, and the message in the form.
  get messages() {
    const { system, messages } = this.conversation;
    const asked = [...(system ? [{ role: "system", content: system }] : []), ...messages, ...(this.pending ? [this.pending] : [])];
    return asked.map((message) => ({ role: message.role, content: contentOf(message) }));
  }

  // Takes the message out of the form.
  async submit() {
    await this.adding;
    const box = this.form.elements.message;
    if (!box.value) return; // it was sent meanwhile
    this.asked = this.conversation;
    this.before = { messages: this.conversation.messages, text: box.value, files: this.files, images: this.images, editing: this.editing };
    if (this.editing !== null) this.conversation.messages = this.conversation.messages.slice(0, this.editing);
    this.pending = { role: "user", content: box.value + this.files.map(quoted).join(""), ...(this.images.length ? { images: this.images } : {}) };
    this.conversation.system = this.form.elements.system.value.trim();
    box.value = "";
    this.files = [];
    this.images = [];
    this.editing = null;
    this.send(false);
  }

  retry() {
    const { messages } = this.conversation;
    this.asked = this.conversation;
    this.before = { messages, text: "", files: [], images: [], editing: null };
    this.pending = messages.at(-2);
    this.conversation.messages = messages.slice(0, -2);
    this.send(true);
  }

  begin(run) {
    this.showsCanvas = true;
    this.stage.show(run, "running");
    this.render();
  }

  // Adds the answer of a run to the conversation that asked, or puts the message back if there is none. The user may have opened another one.
  finish(run, conversation) {
    if (run.end) {
      const reasoning = run.canvases.map((canvas) => canvas?.reasoning ?? "").join("");
      const shown = [...conversation.messages, ...(this.pending ? [this.pending] : [])]; // with what a request has not: images of earlier, reasoning
      const isSame = (message, other) => other?.role === message.role && JSON.stringify(contentOf(other)) === JSON.stringify(message.content);
      const asked = run.request.body.messages.filter(({ role }) => role !== "system");
      const messages = asked.map((message, i) => (isSame(message, shown[i]) ? shown[i] : messageOf(message, shown)));
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
        this.images = this.before.images;
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
    this.onCanvas();
  }

  #keep(conversation) {
    this.kept = [conversation, ...this.kept.filter(({ id }) => id !== conversation.id)].slice(0, CONVERSATIONS_KEPT);
    for (const withThumbnails of [true, false]) {
      try {
        const kept = this.kept.map((one) => ({ ...one, messages: one.messages.map((message) => keptMessage(message, withThumbnails)) }));
        return localStorage.setItem(KEY, JSON.stringify(kept));
      } catch {} // the room that a browser gives is used up
    }
    this.onError("this browser has no room to keep the conversation: forget older ones");
  }

  // Drawing

  render() {
    const { messages } = this.conversation;
    const items = messages.map((message, i) => this.#message(message, i));
    const isAnswered = this.pending && this.asked === this.conversation;
    if (isAnswered) items.push(element("li", { className: "user pending" }, element("div", { className: "text" }, ...this.#thumbnails(this.pending), ...markdown(this.pending.content))));
    $("#conversation").replaceChildren(...items);
    this.stage.playerRoot.hidden = this.stage.preview.hidden = !this.showsCanvas;
    $("#editing").hidden = this.editing === null;
    $("#editing span").textContent = `Sending replaces message ${(this.editing ?? 0) + 1} and everything after it.`;
    $("#form-chat .presets").hidden = messages.length > 0 || Boolean(this.pending);
    $("#files").hidden = !this.files.length;
    $("#files").replaceChildren(...this.files.map((file) => element("li", {}, file.name, element("button", { type: "button", ariaLabel: `Remove ${file.name}`, onclick: () => this.#removeFile(file) }, "×"))));
    this.#renderImages();
    this.#renderConversations();
  }

  #renderImages() {
    $("#lost-images").hidden = !hasLostImages(this.conversation.messages);
    $("#attach-image").hidden = !this.model.vision;
    this.form.elements.message.placeholder = `Ask something, or drop ${this.model.vision ? "images and " : ""}text files here`;
    $("#images").hidden = !this.images.length;
    $("#images").replaceChildren(
      ...this.images.map((image) => {
        const remove = element("button", { type: "button", ariaLabel: `Remove ${image.name}`, title: `Remove ${image.name}`, onclick: () => this.#removeImage(image) }, "×");
        return element("li", {}, element("img", { src: image.thumbnail, alt: image.name, title: image.name }), remove);
      }),
    );
  }

  // The images of a message, above its text. One that is not kept is a name.
  #thumbnails({ images = [] }) {
    const shown = images.map(({ name, thumbnail }) => (thumbnail ? element("img", { src: thumbnail, alt: name, title: name }) : element("span", {}, name)));
    return shown.length ? [element("div", { className: "images" }, ...shown)] : [];
  }

  #message({ role, content, reasoning, images }, i) {
    const isLast = i === this.conversation.messages.length - 1;
    const button = (label, onclick) => element("button", { type: "button", className: "quiet", onclick }, label);
    const hasRun = isLast && this.stage.player.run?.end?.text === content;
    const actions = [];
    if (role === "user") actions.push(button("Edit", () => this.#edit(i)));
    if (role === "assistant" && isLast && !this.pending) actions.push(button("Retry", () => this.retry()));
    if (role === "assistant") actions.push(button("Copy", () => this.#copy(content)));
    if (role === "assistant" && hasRun) actions.push(button(this.showsCanvas ? "Show the answer" : "Show the canvas", () => this.#toggleCanvas()));
    const thought = reasoning ? [element("details", {}, element("summary", {}, "Reasoning"), ...markdown(reasoning))] : [];
    const text = element("div", { className: "text", hidden: hasRun && this.showsCanvas }, ...this.#thumbnails({ images }), ...thought, ...markdown(content));
    return element("li", { className: role }, text, element("div", { className: "row" }, ...actions));
  }

  #renderConversations() {
    $("#forget-conversations").hidden = !this.kept.length;
    $("#conversations").replaceChildren(
      ...this.kept.map((conversation) => {
        const open = element("button", { type: "button", onclick: () => this.open(conversation) }, this.#titleOf(conversation));
        if (conversation.id === this.conversation.id) open.setAttribute("aria-current", "true");
        return element("li", {}, open);
      }),
    );
  }

  // The beginning of the first message; while that one is edited or retried, as it was before.
  #titleOf({ messages }) {
    const first = messages[0] ?? this.before?.messages[0];
    return first?.content.slice(0, 60) ?? "";
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
    this.onCanvas();
  }

  #edit(i) {
    this.editing = i;
    const { content, images = [] } = this.conversation.messages[i];
    this.form.elements.message.value = content;
    this.images = images.filter(({ url }) => url);
    this.render();
    this.form.elements.message.focus();
  }

  // Files and images

  // Attaches files, in order.
  addFiles(files) {
    const added = [...files]; // a browser empties its list when the event is over
    if (added.length) this.adding = this.adding.then(() => this.#addFiles(added));
    return this.adding;
  }

  async #addFiles(files) {
    const notes = [];
    const errors = [];
    for (const file of files) {
      try {
        notes.push(isImage(file) ? await this.#addImage(file) : await this.#addText(file));
      } catch (error) {
        errors.push(error.message);
      }
    }
    if (errors.length) this.onError(errors.join("; "));
    else this.onNote(notes.join(" "));
    this.render();
  }

  async #addText(file) {
    if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} has ${file.size.toLocaleString("en")} bytes: attach files of at most ${MAX_FILE_BYTES.toLocaleString("en")}`);
    const text = await file.text();
    if (/[\0\ufffd]/.test(text)) throw new Error(`${file.name} is not a text: attach files in UTF-8`);
    this.files.push({ name: file.name, text });
    return `${file.name} is attached.`;
  }

  async #addImage(file) {
    if (this.model.vision === false) throw new Error(`${this.model.id} takes no images: ${file.name} is not attached`);
    const { image, size } = await readImage(file);
    this.images = [...this.images, image];
    return `${image.name} is attached${size ? `, scaled down to ${size[0]} x ${size[1]} pixels` : ""}.`;
  }

  #removeImage(image) {
    const at = this.images.indexOf(image);
    this.images = this.images.toSpliced(at, 1);
    this.render();
    const buttons = $("#images").querySelectorAll("button");
    (buttons[Math.min(at, buttons.length - 1)] ?? this.form.elements.message).focus();
  }

  // Takes what the server says about the model that is chosen.
  describe(model) {
    this.model = model;
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
    area.addEventListener("paste", (event) => {
      const images = [...event.clipboardData.files].filter(isImage);
      if (!images.length || event.clipboardData.getData("text/plain")) return; // a spreadsheet copies its cells as a picture too
      event.preventDefault();
      this.addFiles(images);
    });
    $("#attach-image").addEventListener("click", () => $("#image").click());
    $("#image").addEventListener("change", (event) => this.addFiles(event.target.files).then(() => (event.target.value = "")));
    $("#new-conversation").addEventListener("click", () => this.open(newConversation()));
    $("#forget-conversations").addEventListener("click", () => {
      this.kept = [];
      localStorage.removeItem(KEY);
      this.open(newConversation());
    });
    $("#editing button").addEventListener("click", () => {
      this.editing = null;
      this.form.elements.message.value = "";
      this.images = [];
      this.render();
    });
  }
}
