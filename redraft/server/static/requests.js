// The request of each tab, made from its form, and examples that fill the form.

import { textOf } from "./images.js";

const PUZZLES = [
  "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79",
  "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4..",
  "1....7.9..3..2...8..96..5....53..9...1..8...26....4...3......1..4......7..7...3..",
];

// [label, fields] of each example.
export const PRESETS = {
  write: [
    ["A story", { prompt: "Once upon a time", regex: "" }],
    ["A dragon", { prompt: "The dragon was afraid of the dark. One night", regex: "" }],
    ["A date", { prompt: "The boy was born on", regex: " [0-9]{4}-[01][0-9]-[0-3][0-9]" }],
  ],
  chat: [
    ["A cat", { message: "Tell me a story about a cat." }],
    ["A question", { message: "Why do birds fly south?" }],
    ["A list", { message: "List three things to pack for a picnic." }],
  ],
  fill: [
    ["A name", { text: "Once upon a time there was a little [[ 1 ]] named Lily.", length: "" }],
    ["Lengths to find", { text: "The little [[ ]] wanted to play in the park. She saw a big [[ ]] and said hello.", length: "" }],
    ["Python", { text: "def add(a, b):\n    return [[ 3 ]]\n", length: "" }],
  ],
  edit: [
    ["Mistakes", { text: "The dog was very happy happy. He runned to the park and play with his friend.", strength: 0.3 }],
    ["A wrong word", { text: "The cat sat on the mat and looked at the bird. It wanted to sleep the bird.", strength: 0.1 }],
    ["Another story", { text: "Once upon a time there was a little girl named Lily. She loved to play with her toys.", strength: 0.7 }],
  ],
  sudoku: PUZZLES.map((puzzle, i) => [["Easy", "Hard", "Very hard"][i], { puzzle }]),
  decide: [
    ["A feeling", { question: "Lily lost her favorite doll. She looked everywhere but could not find it. She was very", choices: " sad\n happy\n hungry" }],
    ["An animal", { question: "The animal said woof and wagged its tail. It was a", choices: " dog\n cat\n bird" }],
    ["Yes or no", { question: "Tom asked his mom for ice cream before dinner. His mom said", choices: " no\n yes" }],
  ],
};

const field = (form, name) => form.elements.namedItem(name).value; // a field may be called length
const number = (form, name) => (field(form, name) === "" ? undefined : Number(field(form, name)));
export const newSeed = () => Math.floor(Math.random() * 2 ** 32);
const seedOf = (form) => number(form, "seed") ?? newSeed();

const commonFields = (form) => ({ seed: seedOf(form), temperature: number(form, "temperature"), max_steps: number(form, "max_steps") });
const textFields = (form) => ({ ...commonFields(form), check: field(form, "check") || undefined, max_tokens: number(form, "max_tokens") });
const withGapLength = (text, length) => (length ? text.replace(/\[\[[ \t]*\]\]/g, `[[ ${length} ]]`) : text);

export const PATHS = {
  write: "/v1/canvas",
  chat: "/v1/canvas",
  fill: "/v1/canvas",
  edit: "/v1/canvas/edit",
  sudoku: "/v1/canvas/sudoku",
  decide: "/v1/canvas/decide",
};

// The body of a tab's request. A chat's messages are added by the conversation.
const BODIES = {
  write: (form) => ({ ...textFields(form), prompt: field(form, "prompt"), regex: field(form, "regex") || undefined }),
  chat: textFields,
  fill: (form) => ({ ...commonFields(form), text: withGapLength(field(form, "text"), number(form, "length")) }),
  edit: (form) => ({ ...commonFields(form), text: field(form, "text"), strength: number(form, "strength"), instruction: field(form, "instruction") || undefined }),
  sudoku: (form) => ({ puzzle: field(form, "puzzle"), seed: seedOf(form) }),
  decide: (form) => ({ messages: [{ role: "user", content: field(form, "question") }], choices: field(form, "choices").split("\n").filter((line) => line.trim()) }),
};

export const requestOf = (mode, form, more = {}) => ({ path: PATHS[mode], body: { ...BODIES[mode](form), ...more } });

export function fillForm(form, fields) {
  for (const [name, value] of Object.entries(fields)) {
    const control = form.elements.namedItem(name);
    if (control) control.value = value ?? "";
  }
}

// Fills a form with what a request asked for.
export function fillFromBody(form, body) {
  const fields = { ...body, question: body.messages?.[0]?.content, choices: Array.isArray(body.choices) ? body.choices.join("\n") : undefined };
  fillForm(form, Object.fromEntries(Object.entries(fields).filter(([, value]) => ["string", "number"].includes(typeof value))));
}

// What a run was asked, in a few words.
const promptOf = (body) => String(body.prompt ?? body.text ?? body.puzzle ?? textOf(body.messages?.at(-1)?.content));
export const titleOf = (body) => promptOf(body).slice(0, 80) || "a run";
