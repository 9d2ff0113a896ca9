// Markdown as elements: headings, lists, quotes, tables, code, links, emphasis.
// marked and markdown-it need a sanitizer beside them, since they make HTML. Here no text is ever parsed as HTML, so nothing that a model
// writes can run.

import { element } from "./timeline.js";

const INLINE = /(`+)([\s\S]+?)\1|\*\*([^\s*](?:[\s\S]*?[^\s])?)\*\*|__([^\s_](?:[\s\S]*?[^\s])?)__|\*([^\s*](?:[^*]*?[^\s*])?)\*|(?<!\w)_([^\s_](?:[^_]*?[^\s_])?)_(?!\w)|~~([^~]+)~~|\[([^[\]]{1,500})\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>)\]]+)/;

function inline(text) {
  const parts = [];
  for (let rest = text; rest; ) {
    const match = INLINE.exec(rest);
    if (!match) return [...parts, rest];
    if (match.index) parts.push(rest.slice(0, match.index));
    parts.push(inlineElement(match));
    rest = rest.slice(match.index + match[0].length);
  }
  return parts;
}

function inlineElement([, , code, bold, bold2, italic, italic2, struck, label, address, bare]) {
  if (code !== undefined) return element("code", {}, code);
  if (bold ?? bold2) return element("strong", {}, ...inline(bold ?? bold2));
  if (italic ?? italic2) return element("em", {}, ...inline(italic ?? italic2));
  if (struck) return element("s", {}, ...inline(struck));
  return element("a", { href: address ?? bare, target: "_blank", rel: "noopener noreferrer" }, label ?? bare);
}

const MAX_DEPTH = 20; // of quotes and lists inside one another
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+-]*)/;
const STARTS_BLOCK = /^(\s*([-*+]|\d{1,9}[.)])\s+|\s*(```|~~~)|#{1,6}\s|>|\s*([-*_])(\s*\4){2,}\s*$)/;
const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

// Each reader takes lines from the front and returns an element, or null if its block does not begin there.
const READERS = [
  function code(lines) {
    const fence = FENCE.exec(lines[0]);
    if (!fence) return null;
    lines.shift();
    const content = [];
    while (lines.length && !lines[0].trim().startsWith(fence[1])) content.push(lines.shift());
    lines.shift();
    return element("pre", { tabIndex: 0 }, element("code", {}, content.join("\n")));
  },
  function heading(lines) {
    const match = /^(#{1,6})\s+(.*?)\s*#*$/.exec(lines[0]);
    if (!match) return null;
    lines.shift();
    return element(`h${Math.min(6, match[1].length + 2)}`, {}, ...inline(match[2])); // the page has h1 and h2 of its own
  },
  function rule(lines) {
    return /^\s*([-*_])(\s*\1){2,}\s*$/.test(lines[0]) ? (lines.shift(), element("hr")) : null;
  },
  function quote(lines, depth) {
    const quoted = [];
    while (lines[0]?.startsWith(">")) quoted.push(lines.shift().replace(/^> ?/, ""));
    return quoted.length ? element("blockquote", {}, ...blocks(quoted, depth + 1)) : null;
  },
  function list(lines, depth) {
    const first = ITEM.exec(lines[0]);
    if (!first) return null;
    const root = element(first[2] ? "ol" : "ul", first[2] ? { start: +first[2] } : {});
    while (lines.length) {
      const item = ITEM.exec(lines[0]);
      if (!item || Boolean(item[2]) !== Boolean(first[2]) || item[1].length < first[1].length) break;
      lines.shift();
      const nested = [];
      while (lines.length && (/^\s{2,}\S/.test(lines[0]) && /^\s*/.exec(lines[0])[0].length > first[1].length)) nested.push(lines.shift());
      const indent = Math.min(...nested.map((line) => /^\s*/.exec(line)[0].length));
      root.append(element("li", {}, ...inline(item[3]), ...blocks(nested.map((line) => line.slice(indent)), depth + 1)));
    }
    return root;
  },
  function table(lines) {
    if (!lines[0].includes("|") || !/^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[1] ?? "")) return null;
    const head = cellsOf(lines.shift());
    lines.shift();
    const rows = [];
    while (lines[0]?.includes("|")) rows.push(cellsOf(lines.shift()));
    const row = (cells, name) => element("tr", {}, ...cells.map((cell) => element(name, {}, ...inline(cell))));
    return element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
  },
  function paragraph(lines) {
    const text = [lines.shift()];
    while (lines[0]?.trim() && !STARTS_BLOCK.test(lines[0])) text.push(lines.shift());
    return element("p", {}, ...inline(text.join("\n")));
  },
];

function blocks(lines, depth = 0) {
  if (depth > MAX_DEPTH) return [lines.join("\n")];
  const parts = [];
  while (lines.length) {
    if (!lines[0].trim()) lines.shift();
    else parts.push(READERS.reduce((part, read) => part ?? read(lines, depth), null));
  }
  return parts;
}

// The elements of a text.
export const markdown = (text) => blocks(text.split("\n"));
